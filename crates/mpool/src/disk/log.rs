//! A log: frames (module `frame`) behind a header, with a generation; twice, in two files.
//!
//! The header is a block, the same in both files; the higher generation of the whole ones counts.
//! Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PGONELOG` |
//! | 8..16 | generation, from 1 on |
//! | 16..24 | identity of the object |
//! | 24..28 | crc32c of all before |
//! | 28..4096 | zeros |
//!
//! Records are durable when both files are synced. Erasing writes a header with a new generation to
//! both and syncs; then frames are cut off. A crash leaves the old log or an empty new one.
//!
//! A file that is missing, or of which a part cannot be read, is like one that is damaged there:
//! the other one serves, and the first is written anew when the pool is opened exclusively (module
//! `mend`). At no time are both written before one of them is whole and synced.
//!
//! Where both have lost the same part, the rest is served, and the loss is named. A lost header
//! costs nothing as long as a frame is left: its checksum tells the generation. A log whose end
//! neither file can read is not written any more.

mod copy;
mod mend;

use std::io;
use std::sync::Arc;

use self::copy::{copies, lost_generation, read_blocks};
pub(crate) use self::mend::Mending;
use crate::disk::frame::{self, Frame, Kind};
use crate::disk::medium::{Access, Medium, MediumFile, Open};
use crate::disk::superblock::End;
use crate::error::{Damage, During, IoError, Object, ObjectError};
use crate::{BLOCK, MediaClass};

/// Bytes before the first frame.
pub(crate) const DATA: u64 = BLOCK as u64;
/// Space is allocated in steps of this many bytes, so that an append finds it there.
const STEP: u64 = 256 << 10;
/// Bytes of the allocated space that only records which free space may use.
const RESERVE: u64 = 64 << 10;
const MAGIC: &[u8; 8] = b"PGONELOG";

/// Whether records may take the last allocated space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reserve {
    Keep,
    /// They may: because of them space will be free.
    Use,
}

/// An open log.
pub(crate) struct Log {
    files: [Arc<dyn MediumFile>; 2],
    object: Object,
    class: MediaClass,
    id: u64,
    pub(crate) generation: u64,
    /// Where the last frame ends, from the first frame on.
    pub(crate) end: u64,
    /// Bytes of frames.
    pub(crate) content: u64,
    /// All before it is durable.
    synced: u64,
    next_number: u32,
    /// Bytes for frames that both files have space for.
    allocated: u64,
    /// The last frame says that the log was closed.
    closed: bool,
    failed: bool,
    /// Why it is not written any more.
    broken: Option<Damage>,
}

impl AsRef<Self> for Log {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// What opening found.
#[derive(Default)]
pub(crate) struct Opened {
    /// Of its frames.
    pub(crate) damage: Vec<Damage>,
    /// Of the files: one is missing, a part of one cannot be read, neither has a whole header.
    pub(crate) file_damage: Vec<Damage>,
    /// Records that neither file has, or an end that neither can read.
    pub(crate) lost: u32,
    /// Neither file has a whole header, and no frame tells the generation.
    pub(crate) no_header: bool,
    /// Where something unfinished was cut off, or was finished from the other file.
    pub(crate) torn: Option<u64>,
    /// Whether something in it is known to have been durable.
    pub(crate) durable: bool,
    /// For [`Log::mend`].
    pub(crate) mending: Option<Mending>,
}

pub(crate) const MISSING: &str = "both files of the log are missing";
pub(crate) const NO_HEADER: &str = "neither of the log's two files has a whole header";

/// A log's header.
pub(crate) fn header(generation: u64, id: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    block[..8].copy_from_slice(MAGIC);
    block[8..16].copy_from_slice(&generation.to_le_bytes());
    block[16..24].copy_from_slice(&id.to_le_bytes());
    let crc = crc32c::crc32c(&block[..24]);
    block[24..28].copy_from_slice(&crc.to_le_bytes());
    block
}

/// The generation of a header block.
pub(crate) fn decode_header(block: &[u8], id: u64) -> Option<u64> {
    let (bytes, crc) = block.first_chunk::<28>()?.split_last_chunk::<4>()?;
    let whole = bytes.first_chunk::<8>()? == MAGIC && crc32c::crc32c(bytes) == u32::from_le_bytes(*crc);
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    (whole && word(16)? == id).then(|| word(8)).flatten()
}

/// Where a log lies, and to which object it belongs.
pub(crate) struct Place<'a> {
    pub(crate) medium: &'a dyn Medium,
    pub(crate) name: &'a str,
    pub(crate) object: Object,
    pub(crate) class: MediaClass,
    pub(crate) id: u64,
}

/// The names of a log's files.
pub(crate) fn names(name: &str) -> [String; 2] {
    [name.to_owned(), format!("{name}.copy")]
}

impl Log {
    /// Makes an empty log. Its names are durable when the medium's names are synced.
    pub(crate) fn create(place: &Place<'_>, generation: u64) -> Result<Self, ObjectError> {
        let &Place { medium, name, object, class, id } = place;
        let create = |name: &String| {
            let file = medium.open(name, Open { create: true, ..Open::default() }).during("creating", object)?;
            file.set_len(0).during("emptying", object)?;
            let full = |e: IoError| full_or(e, class, STEP + DATA);
            file.allocate(0, DATA + STEP).during("allocating", object).map_err(full)?;
            file.write_at(&header(generation, id), 0).during("writing", object).map_err(full)?;
            file.sync().during("syncing", object)?;
            Ok::<_, ObjectError>(file)
        };
        let [first, second] = names(name);
        let files = [create(&first)?, create(&second)?];
        Ok(Self::of(files, place, generation))
    }

    fn of(files: [Arc<dyn MediumFile>; 2], place: &Place<'_>, generation: u64) -> Self {
        let &Place { object, class, id, .. } = place;
        Self {
            files,
            object,
            class,
            id,
            generation,
            end: 0,
            content: 0,
            synced: 0,
            next_number: 1,
            allocated: STEP,
            closed: false,
            failed: false,
            broken: None,
        }
    }

    /// Opens a log; `each` gets its frames. Nothing is written before [`Log::mend`]. `None`: both
    /// files are missing.
    pub(crate) fn open(
        place: &Place<'_>,
        access: Access,
        each: &mut dyn FnMut(&Frame<'_>),
    ) -> Result<Option<(Self, Opened)>, ObjectError> {
        let &Place { object, id, .. } = place;
        let copies = copies(place, access)?;
        let Some(some) = copies.iter().find_map(|copy| copy.file.clone()) else { return Ok(None) };
        let frames = [copies[0].frames(), copies[1].frames()];
        let mut opened = Opened::default();
        let generation = copies.iter().filter_map(|copy| copy.generation(id)).max();
        if generation.is_none() {
            opened.file_damage.push(Damage { object, offset: 0, what: NO_HEADER });
        }
        let generation = generation.or_else(|| lost_generation(frames)).unwrap_or_else(|| {
            opened.no_header = true;
            0
        });
        // An interrupted erasure leaves frames of an older generation, which are none.
        let mut whole = Vec::new();
        let walk = frame::walk(frames, generation, object, &mut |found| {
            whole.resize(found.position as usize, 0);
            found.encode(generation, &mut whole);
            each(found);
        });
        (opened.lost, opened.durable) = (walk.lost, walk.durable > 0);
        opened.torn = walk.single.or(walk.torn.then_some(walk.end));
        opened.damage = walk.damage;
        for copy in &copies {
            if let Some((offset, what)) = copy.damage() {
                opened.file_damage.push(Damage { object, offset, what });
            } else if !copy.has_whole_header(generation, id) {
                // As a crash during an erasure leaves it.
                opened.torn = opened.torn.or(Some(0));
            }
        }
        let mut log =
            Self::of(copies.each_ref().map(|copy| copy.file.clone().unwrap_or(some.clone())), place, generation);
        log.end = walk.end;
        log.content = walk.content;
        log.next_number = walk.next_number;
        log.closed = walk.closed;
        log.allocated = frames.iter().map(|frames| frames.len() as u64).min().unwrap_or(0);
        log.synced = log.end;
        // What neither file can read may have been frames, whether or not one behind says so.
        let bad = copies.iter().flat_map(|copy| &copy.bad).filter_map(|at| at.checked_sub(DATA));
        let unknown = |at: &u64| at + BLOCK as u64 > walk.end && !copies.iter().any(|copy| copy.knows(*at));
        if let Some(at) = bad.filter(unknown).min() {
            let damage = Damage { object, offset: at.max(walk.end), what: "its end cannot be read in either file" };
            (opened.torn, opened.lost) = (None, opened.lost + 1);
            opened.damage.push(damage.clone());
            log.broken = Some(damage);
        } else if opened.no_header {
            log.broken = Some(Damage { object, offset: 0, what: NO_HEADER });
        }
        // What one file cannot read behind the end goes, too: it would be there again when it can.
        let unread = copies.iter().flat_map(|copy| &copy.bad).any(|at| at + BLOCK as u64 > DATA + walk.end);
        let (gaps, durable, torn) = (walk.gaps, walk.durable, walk.torn || unread);
        opened.mending = Some(Mending { copies, whole, gaps, durable, torn });
        Ok(Some((log, opened)))
    }

    /// A log without files: nothing is in it, and nothing can be written. `other` lends the files
    /// that it never uses.
    pub(crate) fn missing(place: &Place<'_>, other: &Self) -> Self {
        let broken = Some(Damage { object: place.object, offset: 0, what: MISSING });
        Self { broken, ..Self::of(other.files.clone(), place, 0) }
    }

    /// Where it ends.
    pub(crate) fn end(&self) -> End {
        End { generation: self.generation, end: self.end, number: self.next_number }
    }

    /// Whether a write or a sync failed. The medium's contents are unknown until the log is opened
    /// again.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed
    }

    fn check(&self) -> Result<(), ObjectError> {
        match &self.broken {
            _ if self.failed => Err(ObjectError::Failed(self.object)),
            Some(damage) => Err(damage.clone().into()),
            None => Ok(()),
        }
    }

    /// Makes a log that has lost its header, and has nothing else, an empty one.
    pub(crate) fn begin_anew(&mut self, place: &Place<'_>) -> Result<(), ObjectError> {
        *self = Self::create(place, 1)?;
        self.release()
    }

    /// Whether records were lost at its end, or nothing of it can be read.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Does the same to both files.
    fn both(&self, during: &'static str, act: impl Fn(&dyn MediumFile) -> io::Result<()>) -> Result<(), IoError> {
        self.files.iter().try_for_each(|file| act(&**file)).during(during, self.object)
    }

    /// Allocates space for frames up to `need`.
    fn allocate(&mut self, need: u64, reserve: Reserve) -> Result<(), ObjectError> {
        if need + RESERVE <= self.allocated {
            return Ok(());
        }
        let target = (need + RESERVE).next_multiple_of(STEP);
        let (from, more) = (DATA + self.allocated, target - self.allocated);
        match self.both("extending", |file| file.allocate(from, more)) {
            Ok(()) => {
                self.allocated = target;
                Ok(())
            }
            Err(_) if reserve == Reserve::Use && need <= self.allocated => Ok(()),
            Err(e) => Err(full_or(e, self.class, need - self.end)),
        }
    }

    /// Where the next frame goes: behind what is durable in a block of its own.
    fn next(&self) -> u64 {
        if self.synced == self.end { self.end.next_multiple_of(BLOCK as u64) } else { self.end }
    }

    /// Appends records; they are durable after the next [`Log::sync`]. All or, after an error, none
    /// of them are there, unless the log is [`Log::is_failed`] then.
    pub(crate) fn append(&mut self, records: &[&[u8]], reserve: Reserve) -> Result<(), ObjectError> {
        self.append_kind(Kind::Record, records, reserve)
    }

    fn append_kind(&mut self, kind: Kind, records: &[&[u8]], reserve: Reserve) -> Result<(), ObjectError> {
        self.check()?;
        if let Some(long) = records.iter().find(|r| r.len() > frame::MAX_PAYLOAD) {
            let (capacity, wanted) = (frame::MAX_PAYLOAD as u64, long.len() as u64);
            return Err(ObjectError::Capacity { object: self.object, capacity, wanted });
        }
        let start = self.next();
        let mut frames = Vec::new();
        for (index, payload) in (0u32..).zip(records) {
            let number = match kind {
                Kind::Close => self.next_number.wrapping_sub(1),
                _ => self.next_number.wrapping_add(index),
            };
            let position = start + frames.len() as u64;
            Frame { position, number, kind, durable: self.synced, payload }.encode(self.generation, &mut frames);
        }
        let end = start + frames.len() as u64;
        // To the end of the block: what is left there of an erased log would look like damage.
        let whole = end.next_multiple_of(BLOCK as u64);
        self.allocate(whole, reserve)?;
        let content = frames.len() as u64;
        frames.resize((whole - start) as usize, 0);
        let written = self.both("appending to", |file| file.write_at(&frames, DATA + start));
        // A partial write may have left whole frames.
        self.failed |= written.is_err();
        written.map_err(|e| full_or(e, self.class, content))?;
        self.end = end;
        self.content += content;
        self.closed = kind == Kind::Close;
        if kind != Kind::Close {
            self.next_number = self.next_number.wrapping_add(records.len() as u32);
        }
        Ok(())
    }

    /// The last frame of a compaction.
    pub(crate) fn append_compaction_end(&mut self) -> Result<(), ObjectError> {
        // It gives space back: the old log goes.
        self.append_kind(Kind::CompactionEnd, &[b""], Reserve::Use)
    }

    /// Makes all records durable.
    pub(crate) fn sync(&mut self) -> Result<(), ObjectError> {
        self.check()?;
        if self.synced == self.end {
            return Ok(());
        }
        let synced = self.files[0].sync_both(&*self.files[1]).during("syncing", self.object);
        if let Err(e) = synced {
            // After a failed sync the medium's contents are unknown; the kernel does not write
            // those pages again.
            self.failed = true;
            return Err(e.into());
        }
        self.synced = self.end;
        Ok(())
    }

    /// Empties the log; its generation becomes `generation`, or the next one if that is higher.
    /// Durable at once.
    pub(crate) fn erase(&mut self, generation: u64) -> Result<(), ObjectError> {
        self.check()?;
        let generation = generation.max(self.generation + 1);
        let block = header(generation, self.id);
        // One after the other: a power failure may destroy a block that is being written.
        let erased = self.files.iter().try_for_each(|file| {
            file.write_at(&block, 0).during("erasing", self.object)?;
            file.sync().during("syncing", self.object)
        });
        if let Err(e) = erased {
            self.failed = true;
            return Err(e.into());
        }
        self.generation = generation;
        self.forget_frames();
        // From here on it is empty, whatever fails: old frames have another generation.
        let _ = self.both("cutting", |file| file.set_len(DATA));
        Ok(())
    }

    fn forget_frames(&mut self) {
        (self.end, self.content, self.synced, self.next_number, self.allocated) = (0, 0, 0, 1, 0);
        self.closed = false;
    }

    /// Cuts the frames off without a new generation: for a log that is not read again.
    pub(crate) fn release(&mut self) -> Result<(), ObjectError> {
        self.forget_frames();
        Ok(self.both("cutting", |file| file.set_len(DATA))?)
    }

    /// Makes all records durable, and says so in the log: if its end is missing afterwards, that is
    /// damage.
    pub(crate) fn close(&mut self) -> Result<(), ObjectError> {
        self.sync()?;
        if self.closed || self.end == 0 {
            return Ok(());
        }
        self.append_kind(Kind::Close, &[b""], Reserve::Use)?;
        self.sync()
    }

    /// The next record at or behind `position`, and where the one after it may be.
    pub(crate) fn read(&self, position: u64) -> Result<Option<(Vec<u8>, u64)>, ObjectError> {
        let mut position = position;
        while position < self.end {
            let found = match self.frame_at(position)? {
                Some(found) => Some(found),
                // The rest of a block behind what was durable.
                None => self.frame_at(position.next_multiple_of(BLOCK as u64))?.filter(|f| f.durable == position),
            };
            let what = "no whole frame";
            let found = found.ok_or(Damage { object: self.object, offset: position, what })?;
            if found.kind == Kind::Record {
                return Ok(Some((found.payload, found.end)));
            }
            position = found.end;
        }
        Ok(None)
    }

    /// The frame at `position` that one of the files has. An error: neither can be read there.
    fn frame_at(&self, position: u64) -> Result<Option<Owned>, ObjectError> {
        let from = |file: &Arc<dyn MediumFile>| -> io::Result<Option<Owned>> {
            let mut head = [0; frame::HEADER];
            let rest = self.end.saturating_sub(position);
            if rest < head.len() as u64 {
                return Ok(None);
            }
            file.read_at(&mut head, DATA + position)?;
            let len = frame::frame_len(u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize);
            if len as u64 > rest {
                return Ok(None);
            }
            let mut bytes = vec![0; len];
            file.read_at(&mut bytes, DATA + position)?;
            Ok(frame::decode_at(&bytes, self.generation, position).map(|found| Owned {
                kind: found.kind,
                durable: found.durable,
                end: found.end(),
                payload: found.payload.to_vec(),
            }))
        };
        let first = from(&self.files[0]);
        if let Ok(Some(found)) = first {
            return Ok(Some(found));
        }
        match (first, from(&self.files[1])) {
            (_, Ok(Some(found))) => Ok(Some(found)),
            (Err(e), Err(_)) => Err(IoError::new("reading", self.object, e).into()),
            _ => Ok(None),
        }
    }

    /// The first whole frame behind damage at `position`; the end when there is none.
    pub(crate) fn skip_damage(&self, position: u64) -> Result<u64, ObjectError> {
        let position = position.min(self.end);
        let copies = self.files.each_ref().map(|file| {
            let mut bytes = vec![0; (DATA + self.end) as usize];
            let _ = read_blocks(&**file, &mut bytes);
            bytes
        });
        let whole = |&at: &u64| {
            copies.iter().any(|bytes| frame::decode(&bytes[DATA as usize..], self.generation, at).is_some())
        };
        Ok((position + 8..self.end).step_by(8).find(whole).unwrap_or(self.end))
    }

    /// Bytes of the medium that it takes.
    pub(crate) fn used(&self) -> Result<u64, ObjectError> {
        let used = self.files.iter().map(|file| file.used()).sum::<io::Result<u64>>();
        Ok(used.during("looking at", self.object)?)
    }
}

/// A frame that was read on its own.
struct Owned {
    kind: Kind,
    durable: u64,
    end: u64,
    payload: Vec<u8>,
}

/// A full medium has an error of its own.
pub(crate) fn full_or(error: IoError, class: MediaClass, bytes: u64) -> ObjectError {
    if error.is_full() { ObjectError::Full { class, bytes } } else { error.into() }
}
