//! The log of dm-log-writes: what was written, in the order in which it became durable.
//!
//! Sector 0 says how many entries there are. Each entry is a sector, behind it the data
//! (`struct log_write_super`, `struct log_write_entry` in drivers/md/dm-log-writes.c,
//! Documentation/admin-guide/device-mapper/log-writes.rst). A write is logged when a flush that
//! began after its end has ended, or at once if it says so itself (FUA).

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use rustix::fs::FallocateFlags;

use crate::Random;
use crate::block::SECTOR;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// One entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where it was written on the device, in bytes.
    to: u64,
    /// Bytes of it.
    len: u64,
    flags: u64,
    /// Where its data are in the log, in bytes.
    data: u64,
    /// The number of a mark: how many events there had been.
    pub(crate) mark: Option<usize>,
}

impl Entry {
    /// All that is logged before it, and itself, is durable.
    pub(crate) fn is_durable(&self) -> bool {
        self.flags & (FLUSH | FUA) != 0
    }

    pub(crate) fn is_mark(&self) -> bool {
        self.flags & MARK != 0
    }
}

/// A log, read.
pub(crate) struct WriteLog {
    file: File,
    pub(crate) entries: Vec<Entry>,
}

impl WriteLog {
    /// Reads the entries. The log's device is removed: its last entry says so.
    pub(crate) fn read(file: File) -> Result<Self> {
        let mut sector = [0; SECTOR as usize];
        let word = |sector: &[u8], at: usize| {
            sector[at * 8..][..8].try_into().map(u64::from_le_bytes).context("a word has eight bytes")
        };
        file.read_exact_at(&mut sector, 0)?;
        let (magic, version, count) = (word(&sector, 0)?, word(&sector, 1)?, word(&sector, 2)?);
        let unit = word(&sector, 3)? & 0xffff_ffff;
        if magic != MAGIC || version != 1 || unit < SECTOR {
            bail!("this is no log of dm-log-writes: {magic:x}, version {version}, sectors of {unit} bytes");
        }
        let (mut at, mut entries, mut last) = (unit, Vec::new(), String::new());
        for _ in 0..count {
            file.read_exact_at(&mut sector, at)?;
            let (flags, bytes) = (word(&sector, 2)?, word(&sector, 3)? as usize);
            let mut entry = Entry {
                to: word(&sector, 0)? * unit,
                len: word(&sector, 1)? * unit,
                flags,
                data: at + unit,
                mark: None,
            };
            if entry.is_mark() {
                last = String::from_utf8_lossy(sector.get(32..32 + bytes).unwrap_or_default()).into_owned();
                entry.mark = last.parse().ok();
            }
            at += unit + if flags & DISCARD == 0 { entry.len } else { 0 };
            entries.push(entry);
        }
        if last != "dm-log-writes-end" {
            bail!("the log ends before its device did: it needs more space");
        }
        Ok(Self { file, entries })
    }

    fn bytes(&self, entry: &Entry) -> Result<Vec<u8>> {
        let mut bytes = vec![0; entry.len as usize];
        self.file.read_exact_at(&mut bytes, entry.data)?;
        Ok(bytes)
    }

    /// Does to `image` what an entry did to the device.
    pub(crate) fn apply(&self, entry: &Entry, image: &File) -> Result<()> {
        if entry.flags & DISCARD != 0 {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            return Ok(rustix::fs::fallocate(image, how, entry.to, entry.len)?);
        }
        Ok(image.write_all_at(&self.bytes(entry)?, entry.to)?)
    }

    /// Does some of the entries, which nothing made durable: as much of each as chance has it.
    /// Returns how many bytes were written.
    pub(crate) fn apply_some(&self, entries: &[Entry], image: &File, random: &mut Random) -> Result<u64> {
        // Whole requests, or blocks; and how likely one is there. Not sectors: XFS does not recover
        // a block of its metadata of which the first sector, with the new LSN, is there without the
        // others. Torn sectors of a pool's files are the simulation's.
        let unit = [u64::MAX, 4096][random.below(2) as usize];
        let share = 1 + random.below(7);
        let mut written = 0;
        for entry in entries.iter().filter(|entry| entry.flags & (DISCARD | MARK) == 0) {
            let bytes = self.bytes(entry)?;
            for (at, part) in (0..).zip(bytes.chunks(unit.min(entry.len.max(1)) as usize)) {
                if random.below(8) < share {
                    image.write_all_at(part, entry.to + at * unit.min(entry.len))?;
                    written += part.len() as u64;
                }
            }
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    /// A log as the kernel writes it: entries of sector, length, flags and data.
    fn log(entries: &[(u64, u64, u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        file.write_all_at(&words(&[MAGIC, 1, entries.len() as u64, SECTOR]), 0).unwrap();
        let mut at = SECTOR;
        for &(sector, sectors, flags, data) in entries {
            let is_mark = flags & MARK != 0;
            let len = if is_mark { data.len() as u64 } else { 0 };
            file.write_all_at(&words(&[sector, sectors, flags, len]), at).unwrap();
            file.write_all_at(data, at + if is_mark { 32 } else { SECTOR }).unwrap();
            at += SECTOR + if flags & DISCARD == 0 { sectors * SECTOR } else { 0 };
        }
        file.set_len(at).unwrap();
        file
    }

    #[test]
    fn writes_discards_and_marks_are_read_and_done_again() {
        let (ones, twos) = ([1; 1024], [2; 512]);
        let file = log(&[
            (4, 2, 0, &ones),
            (0, 0, FLUSH, &[]),
            (0, 0, MARK, b"7"),
            (5, 1, FUA, &twos),
            (4, 1, DISCARD, &[]),
            (0, 0, MARK, b"dm-log-writes-end"),
        ]);
        let log = WriteLog::read(file).unwrap();
        let marks: Vec<Option<usize>> = log.entries.iter().map(|entry| entry.mark).collect();
        assert_eq!(marks, [None, None, Some(7), None, None, None]);
        assert!(log.entries[1].is_durable() && log.entries[3].is_durable() && !log.entries[0].is_durable());
        let image = tempfile::tempfile().unwrap();
        image.set_len(8 * SECTOR).unwrap();
        let at = |sector: u64| {
            let mut byte = [9];
            image.read_exact_at(&mut byte, sector * SECTOR).unwrap();
            byte[0]
        };
        log.apply(&log.entries[0], &image).unwrap();
        assert_eq!((at(3), at(4), at(5), at(6)), (0, 1, 1, 0));
        log.apply(&log.entries[3], &image).unwrap();
        log.apply(&log.entries[4], &image).unwrap();
        assert_eq!((at(4), at(5)), (0, 2));
    }

    #[test]
    fn a_log_that_was_cut_short_is_refused() {
        assert!(WriteLog::read(log(&[(0, 0, MARK, b"7")])).is_err());
        assert!(WriteLog::read(log(&[])).is_err());
    }

    #[test]
    fn what_nothing_made_durable_is_there_in_part() {
        let data = [3; 16 * 512];
        let log = WriteLog::read(log(&[(0, 16, 0, &data), (0, 0, MARK, b"dm-log-writes-end")])).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 1..200 {
            let image = tempfile::tempfile().unwrap();
            image.set_len(16 * SECTOR).unwrap();
            seen.insert(log.apply_some(&log.entries, &image, &mut Random::new(seed)).unwrap() / SECTOR);
        }
        assert!(seen.into_iter().eq([0, 8, 16]));
    }
}
