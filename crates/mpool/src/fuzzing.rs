//! What fuzzing and the tests of decoders call: every decoder of the on-disk format, and pools whose files were damaged.

use std::path::Path;

use crate::error::Object;
use crate::record::Record;
use crate::superblock::{self, Superblock};
use crate::{Access, OpenOptions, Pool, frame, log};

/// Gives the bytes to every decoder. None may panic or loop; what one accepts must be what is written for it.
///
/// # Panics
///
/// When a decoder is at fault.
pub fn decode_all(bytes: &[u8]) {
    if let Some((found, None)) = Superblock::decode(bytes) {
        assert_eq!(found.encode()[..], bytes[..superblock::LEN], "what passes is what is written");
    }
    let _ = log::decode_header(bytes, 0);
    if let Some((&generation, frames)) = bytes.split_first() {
        let walk = frame::walk(frames, generation.into(), Object::Mlog(0), &mut |_| {});
        assert!(walk.end as usize <= frames.len());
    }
    if let Some(record) = Record::decode(bytes) {
        assert_eq!(Record::decode(&record.encode()), Some(record));
    }
}

/// Opens a pool, however damaged its files are, reads all that is there, and checks it. Errors are right, panics are not.
pub fn use_pool(directory: &Path) {
    for salvage in [false, true] {
        let access = if salvage { Access::Shared } else { Access::Exclusive };
        let Ok(pool) = Pool::open(directory, OpenOptions { access, salvage }) else {
            continue;
        };
        for mblock in pool.mblocks() {
            let len = usize::try_from(mblock.len).unwrap_or(usize::MAX).min(1 << 16);
            let _ = pool.mblock(mblock.id).and_then(|mblock| mblock.read(0, &mut vec![0; len]));
        }
        for props in pool.mlogs() {
            let Ok(mut mlog) = pool.mlog_open(props.id) else { continue };
            while matches!(mlog.read(), Ok(Some(_))) {}
        }
        if let Ok(mut mdc) = pool.mdc_open(crate::ROOT_MDC) {
            while matches!(mdc.read(), Ok(Some(_))) {}
        }
        let _ = pool.check(false);
    }
}
