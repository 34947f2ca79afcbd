//! The two files of a log, read: where one is missing, or a part of it cannot be read, it has
//! zeros.

use std::io;
use std::sync::Arc;

use super::{DATA, Place, decode_header, header, names};
use crate::BLOCK;
use crate::disk::medium::{MediumFile, Open};
use crate::error::{Damage, During, Object, ObjectError};

/// One of a log's files, and what is in it. Bytes that cannot be read are zeros.
pub(super) struct Copy {
    pub(super) file: Arc<dyn MediumFile>,
    pub(super) bytes: Vec<u8>,
    /// Why a part of it, or all, is not what was written.
    pub(super) damage: Option<(u64, &'static str)>,
}

impl Copy {
    fn read(file: Arc<dyn MediumFile>, object: Object) -> Result<Self, ObjectError> {
        let len = file.len().during("looking at", object)?;
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        let damage = read_blocks(&*file, &mut bytes).map(|at| (at, "a part of one of its files cannot be read"));
        Ok(Self { file, bytes, damage })
    }

    pub(super) fn generation(&self, id: u64) -> Option<u64> {
        self.bytes.get(..BLOCK).and_then(|block| decode_header(block, id))
    }

    pub(super) fn has_whole_header(&self, generation: u64, id: u64) -> bool {
        self.bytes.get(..BLOCK).is_some_and(|block| *block == *header(generation, id))
    }

    pub(super) fn frames(&self) -> &[u8] {
        self.bytes.get(DATA as usize..).unwrap_or(&[])
    }
}

/// The log's files, which are made with `repair` where they are missing.
pub(super) fn copies(place: &Place<'_>, repair: bool) -> Result<[Copy; 2], ObjectError> {
    let &Place { medium, name, object, .. } = place;
    let how = Open { read_only: !repair, ..Open::default() };
    let open = |name: &String| match medium.open(name, how) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        file => Copy::read(file.during("opening", object)?, object).map(Some),
    };
    let [first, second] = names(name);
    let lost = |name: &String| {
        // For reading only, the whole file stands for both.
        let file = medium.open(name, Open { create: repair, ..how }).during("opening", object)?;
        Ok::<_, ObjectError>(Copy { file, bytes: Vec::new(), damage: Some((0, "one of its two files is missing")) })
    };
    match [open(&first)?, open(&second)?] {
        [Some(one), Some(two)] => Ok([one, two]),
        [Some(one), None] => Ok([one, lost(if repair { &second } else { &first })?]),
        [None, Some(two)] => Ok([lost(if repair { &first } else { &second })?, two]),
        [None, None] => {
            let what = "both files of the log are missing";
            Err(Damage { object, offset: 0, what }.into())
        }
    }
}

/// Reads a file from its start; blocks that cannot be read become zeros. Returns where the first of
/// them is.
pub(super) fn read_blocks(file: &dyn MediumFile, into: &mut [u8]) -> Option<u64> {
    file.read_at(into, 0).err()?;
    let mut bad = None;
    for (at, block) in (0u64..).step_by(BLOCK).zip(into.chunks_mut(BLOCK)) {
        if file.read_at(block, at).is_err() {
            block.fill(0);
            bad = bad.or(Some(at));
        }
    }
    bad
}
