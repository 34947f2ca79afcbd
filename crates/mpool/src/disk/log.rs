//! A log file: frames (module `frame`) behind a header, with a generation.
//!
//! The header is two blocks with the same content; the higher generation of the whole ones counts.
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
//! The fields lie within 512 bytes, which media write whole or not at all. Erasing writes the
//! second block with the new generation and syncs; then frames are cut off, and the first block
//! follows. A crash leaves the old log or an empty new one.

use std::sync::Arc;

use crate::disk::frame::{self, Frame, Kind};
use crate::disk::medium::{Medium, MediumFile, Open};
use crate::error::{Damage, During, IoError, Object, ObjectError};
use crate::{BLOCK, MediaClass};

/// Bytes before the first frame.
pub(crate) const DATA: u64 = 2 * BLOCK as u64;
/// Space is allocated in steps of this many bytes, so that an append finds it there.
const STEP: u64 = 256 << 10;
/// Bytes of the allocated space that only records which free space may use.
const RESERVE: u64 = 64 << 10;
const MAGIC: &[u8; 8] = b"PGONELOG";

/// An open log.
pub(crate) struct Log {
    file: Arc<dyn MediumFile>,
    object: Object,
    class: MediaClass,
    id: u64,
    pub(crate) generation: u64,
    /// Where the next frame goes, from the first frame on.
    pub(crate) end: u64,
    /// All before it is durable.
    synced: u64,
    next_number: u32,
    /// Bytes for frames that the file has space for.
    allocated: u64,
    /// How often each record is written.
    copies: u8,
    failed: bool,
}

/// What opening found.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    pub(crate) damage: Vec<Damage>,
    pub(crate) lost: u32,
    /// Where a tail that was not whole was cut.
    pub(crate) torn: Option<u64>,
    /// Whether there is a durable mark.
    pub(crate) marked: bool,
}

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
    pub(crate) copies: u8,
}

impl Log {
    /// Makes an empty log. Its name is durable when the medium's names are synced.
    pub(crate) fn create(place: &Place<'_>, generation: u64) -> Result<Self, ObjectError> {
        let &Place { medium, name, object, class, id, copies } = place;
        let file = medium.open(name, Open { create: true, ..Open::default() }).during("creating", object)?;
        file.set_len(0).during("emptying", object)?;
        let full = |e: IoError| full_or(e, class, STEP + DATA);
        file.allocate(0, DATA + STEP).during("allocating", object).map_err(full)?;
        let block = header(generation, id);
        file.write_at(&block.repeat(2), 0).during("writing", object).map_err(full)?;
        file.sync().during("syncing", object)?;
        let (end, synced, allocated) = (0, 0, STEP);
        Ok(Self { file, object, class, id, generation, end, synced, next_number: 1, allocated, copies, failed: false })
    }

    /// Opens a log; `each` gets its frames. With `repair` a torn tail is cut, a bad header block
    /// written anew, and all that was read is made durable.
    pub(crate) fn open(
        place: &Place<'_>,
        repair: bool,
        each: &mut dyn FnMut(&Frame<'_>),
    ) -> Result<(Self, Opened), ObjectError> {
        let &Place { medium, name, object, class, id, copies } = place;
        let file = medium.open(name, Open { read_only: !repair, ..Open::default() }).during("opening", object)?;
        let len = file.len().during("looking at", object)?;
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        file.read_at(&mut bytes, 0).during("reading", object)?;
        if len < DATA {
            return Err(Damage { object, offset: len, what: "the log ends inside of its header" }.into());
        }
        let generations = [0, 1].map(|i| bytes.get(i * BLOCK..(i + 1) * BLOCK).and_then(|b| decode_header(b, id)));
        let what = "neither copy of the log's header is whole";
        let generation = generations.iter().flatten().max().copied().ok_or(Damage { object, offset: 0, what })?;
        let frames = bytes.get(DATA as usize..).unwrap_or(&[]);
        let walk = frame::walk(frames, generation, object, each);
        let (torn, marked) = (walk.torn.then_some(walk.end), walk.last_mark.is_some());
        let mut opened = Opened { damage: walk.damage, lost: walk.lost, torn, marked };
        let zeros = |copy: usize| bytes[copy * BLOCK + 28..(copy + 1) * BLOCK].iter().all(|&b| b == 0);
        let whole = [0, 1].map(|copy| generations[copy].is_some() && zeros(copy));
        for (copy, whole) in whole.into_iter().enumerate() {
            // An interrupted erasure leaves an older generation in one block.
            if !whole {
                let what = "a copy of the log's header is not whole";
                opened.damage.push(Damage { object, offset: (copy * BLOCK) as u64, what });
            }
        }
        let (end, allocated) = (walk.end, frames.len() as u64);
        let log = Self {
            file,
            object,
            class,
            id,
            generation,
            end,
            synced: 0,
            next_number: walk.next_number,
            allocated,
            copies,
            failed: false,
        };
        if repair {
            if walk.torn {
                log.clear_behind_end()?;
            }
            let same = generations == [Some(generation); 2] && whole == [true; 2];
            if !same {
                log.file.write_at(&header(generation, id).repeat(2), 0).during("repairing", object)?;
            }
            // If a sync failed before, what was read here may be in the page cache only, where no
            // later sync looks for it.
            let doubtful = walk.last_mark.unwrap_or(0);
            let bytes = &frames[doubtful as usize..end as usize];
            log.file.write_at(bytes, DATA + doubtful).during("writing again", object)?;
            log.file.sync().during("syncing", object)?;
        }
        Ok((log, opened))
    }

    /// Whatever is behind the end must not be taken for frames.
    fn clear_behind_end(&self) -> Result<(), ObjectError> {
        self.file.set_len(DATA + self.end).during("cutting", self.object)?;
        if self.allocated > self.end {
            // Without space the file stays short; the next append asks for it again.
            let _ = self.file.allocate(DATA + self.end, self.allocated - self.end);
        }
        Ok(())
    }

    /// Whether a write or a sync failed. The medium's contents are unknown until the log is opened
    /// again.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed
    }

    fn check(&self) -> Result<(), ObjectError> {
        if self.failed { Err(ObjectError::Failed(self.object)) } else { Ok(()) }
    }

    /// Allocates space for `more` bytes of frames. `releasing` records may use the reserve.
    fn reserve(&mut self, more: u64, releasing: bool) -> Result<(), ObjectError> {
        let need = self.end + more;
        if need + RESERVE <= self.allocated {
            return Ok(());
        }
        let target = (need + RESERVE).next_multiple_of(STEP);
        match self.file.allocate(DATA + self.allocated, target - self.allocated).during("extending", self.object) {
            Ok(()) => {
                self.allocated = target;
                Ok(())
            }
            Err(_) if releasing && need <= self.allocated => Ok(()),
            Err(e) => Err(full_or(e, self.class, more)),
        }
    }

    fn write(&mut self, frames: &[u8], records: u32) -> Result<(), ObjectError> {
        let written = self.file.write_at(frames, DATA + self.end).during("appending to", self.object);
        // A partial write may have left whole frames.
        self.failed |= written.is_err();
        written.map_err(|e| full_or(e, self.class, frames.len() as u64))?;
        self.end += frames.len() as u64;
        self.next_number = self.next_number.wrapping_add(records);
        Ok(())
    }

    /// Appends records; they are durable after the next [`Log::sync`]. All or, after an error, none
    /// of them are there, unless the log is [`Log::is_failed`] then.
    pub(crate) fn append(&mut self, records: &[&[u8]], releasing: bool) -> Result<(), ObjectError> {
        self.append_kind(Kind::Record, records, releasing)
    }

    fn append_kind(&mut self, kind: Kind, records: &[&[u8]], releasing: bool) -> Result<(), ObjectError> {
        self.check()?;
        if let Some(long) = records.iter().find(|r| r.len() > frame::MAX_PAYLOAD) {
            let (capacity, wanted) = (frame::MAX_PAYLOAD as u64, long.len() as u64);
            return Err(ObjectError::Capacity { object: self.object, capacity, wanted });
        }
        let mut frames = Vec::new();
        for (index, record) in records.iter().enumerate() {
            let number = self.next_number.wrapping_add(index as u32);
            for _ in 0..self.copies {
                let position = self.end + frames.len() as u64;
                frame::encode(&mut frames, self.generation, position, number, kind, record);
            }
        }
        self.reserve(frames.len() as u64, releasing)?;
        self.write(&frames, records.len() as u32)
    }

    /// The last frame of a compaction.
    pub(crate) fn append_compaction_end(&mut self) -> Result<(), ObjectError> {
        // It gives space back: the old log goes.
        self.append_kind(Kind::CompactionEnd, &[b""], true)
    }

    /// Makes all records durable.
    pub(crate) fn sync(&mut self) -> Result<(), ObjectError> {
        self.check()?;
        if self.synced == self.end {
            return Ok(());
        }
        if let Err(e) = self.file.sync().during("syncing", self.object) {
            // After a failed sync the medium's contents are unknown; the kernel does not write
            // those pages again.
            self.failed = true;
            return Err(e.into());
        }
        let mut mark = Vec::new();
        let last = self.next_number.wrapping_sub(1);
        frame::encode(&mut mark, self.generation, self.end, last, Kind::Mark, b"");
        if self.reserve(mark.len() as u64, true).is_ok() {
            // The records are durable; without the mark only damage to them would look like a torn
            // tail.
            let _ = self.write(&mark, 0);
            self.failed = false;
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
        let second = |log: &Self| {
            log.file.write_at(&block, BLOCK as u64).during("erasing", log.object)?;
            log.file.sync().during("syncing", log.object)
        };
        if let Err(e) = second(self) {
            self.failed = true;
            return Err(e.into());
        }
        self.generation = generation;
        (self.end, self.synced, self.next_number) = (0, 0, 1);
        self.allocated = 0;
        // From here on it is empty, whatever fails: old frames have another generation.
        let _ = self.file.set_len(DATA);
        let _ = self.file.write_at(&block, 0);
        Ok(())
    }

    /// Cuts the frames off without a new generation: for a log that is not read again.
    pub(crate) fn release(&mut self) -> Result<(), ObjectError> {
        (self.end, self.synced, self.next_number, self.allocated) = (0, 0, 1, 0);
        Ok(self.file.set_len(DATA).during("cutting", self.object)?)
    }

    /// Makes the last mark durable too.
    pub(crate) fn close(&mut self) -> Result<(), ObjectError> {
        self.sync()?;
        Ok(self.file.sync().during("syncing", self.object)?)
    }

    /// The next record at or behind `position`, and where the one after it may be.
    pub(crate) fn read(&self, position: u64) -> Result<Option<(Vec<u8>, u64)>, ObjectError> {
        let mut position = position;
        let damaged = |offset| Damage { object: self.object, offset, what: "no whole frame" };
        while position < self.end {
            let mut head = [0; frame::HEADER];
            let rest = self.end - position;
            if rest < head.len() as u64 {
                return Err(damaged(position).into());
            }
            self.file.read_at(&mut head, DATA + position).during("reading", self.object)?;
            let len = frame::frame_len(u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize);
            if len as u64 > rest {
                return Err(damaged(position).into());
            }
            let mut bytes = vec![0; len];
            self.file.read_at(&mut bytes, DATA + position).during("reading", self.object)?;
            let found = frame::decode_at(&bytes, self.generation, position).ok_or_else(|| damaged(position))?;
            let next = found.end();
            if found.kind == Kind::Record {
                return Ok(Some((found.payload.to_vec(), next)));
            }
            position = next;
        }
        Ok(None)
    }

    /// The first whole frame behind damage at `position`; the end when there is none.
    pub(crate) fn skip_damage(&self, position: u64) -> Result<u64, ObjectError> {
        let mut bytes = vec![0; (self.end - position.min(self.end)) as usize];
        self.file.read_at(&mut bytes, DATA + position.min(self.end)).during("reading", self.object)?;
        let found = (8..bytes.len())
            .step_by(8)
            .find(|&at| frame::decode_at(&bytes[at..], self.generation, position + at as u64).is_some());
        Ok(found.map_or(self.end, |at| position + at as u64))
    }

    /// Bytes of the medium that it takes.
    pub(crate) fn used(&self) -> Result<u64, ObjectError> {
        Ok(self.file.used().during("looking at", self.object)?)
    }
}

/// A full medium has an error of its own.
pub(crate) fn full_or(error: IoError, class: MediaClass, bytes: u64) -> ObjectError {
    if error.is_full() { ObjectError::Full { class, bytes } } else { error.into() }
}
