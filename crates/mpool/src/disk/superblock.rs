//! The superblock: the first thing read of a class's directory.
//!
//! A block with a checksum, in two files. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PGONEPL1` |
//! | 8..12 | format version; 3 for an encrypted pool |
//! | 12..16 | class: 0 capacity, 1 staging, 2 memory |
//! | 16..32 | identity of the pool |
//! | 32..40 | when the pool was made, in seconds since 1970 |
//! | 40..48 | epoch: how often the pool was opened exclusively |
//! | 48..56 | a random number of that opening |
//! | 56..64 | that of the opening before |
//! | 64..72 | the identity of the capacity class's directory at that opening |
//! | 72..76 | state: 0 being opened, 1 open, 2 closed |
//! | 76..80 | closed: the number of the next metadata record |
//! | 80..88 | closed: the generation of the metadata |
//! | 88..96 | closed: where they end |
//! | 96..104 | serial number: how often one of the two files was written |
//! | 104..4092 | zeros |
//! | 4092..4096 | crc32c of all before |
//!
//! **Epochs.** All classes of a pool are of the same opening, or the last one did not get past its
//! beginning: then the capacity class is being opened, and others are of the opening before.
//! Anything else is a copy, or a class that was restored from a backup; nothing is written there.
//!
//! **Serial numbers.** The file with the higher one was written last. Only that may not be on its
//! medium, though it can be read, because its sync failed: so it is the first to be written again.
//!
//! **The end of the metadata.** A clean close notes where they end. If they end before that when
//! the pool is opened, they are damaged, and the end was not unfinished.

use std::io;

use crate::disk::block;
use crate::disk::medium::{Medium, Open};
use crate::error::{Damage, During, IoError, Object};
use crate::{BLOCK, MediaClass};

/// Its files.
pub(crate) const NAMES: [&str; 2] = ["superblock", "superblock.copy"];
/// The format of everything in a pool. A program refuses a version that it does not know.
pub const FORMAT_VERSION: u32 = 2;
/// The same, with everything but superblocks encrypted: a program that does not know it must not
/// take such a pool for a damaged one.
pub const ENCRYPTED_VERSION: u32 = 3;

const MAGIC: &[u8; 8] = b"PGONEPL1";

/// How far an opening got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Opening,
    Open,
    Closed(End),
}

/// Where the metadata end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) generation: u64,
    pub(crate) end: u64,
    /// The number of the next record.
    pub(crate) number: u32,
}

/// An exclusive opening of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    pub(crate) epoch: u64,
    pub(crate) random: u64,
    pub(crate) before: u64,
    /// The identity of the capacity class's directory.
    pub(crate) home: u64,
    pub(crate) state: State,
}

/// A decoded superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) version: u32,
    pub(crate) class: MediaClass,
    pub(crate) pool: [u8; 16],
    pub(crate) created: u64,
    pub(crate) opening: Opening,
    /// How often its files were written.
    pub(crate) serial: u64,
}

impl Superblock {
    /// Whether the rest of the pool is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.version == ENCRYPTED_VERSION
    }

    /// The same, at another point of the opening.
    pub(crate) fn in_state(self, state: State) -> Self {
        Self { opening: Opening { state, ..self.opening }, ..self }
    }

    /// A block.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Opening { epoch, random, before, home, state } = self.opening;
        let (state, end) = match state {
            State::Opening => (0u32, End { generation: 0, end: 0, number: 0 }),
            State::Open => (1, End { generation: 0, end: 0, number: 0 }),
            State::Closed(end) => (2, end),
        };
        let mut block = Vec::with_capacity(BLOCK);
        block.extend(MAGIC);
        block.extend(self.version.to_le_bytes());
        block.extend((self.class as u32).to_le_bytes());
        block.extend(self.pool);
        [self.created, epoch, random, before, home].iter().for_each(|word| block.extend(word.to_le_bytes()));
        block.extend(state.to_le_bytes());
        block.extend(end.number.to_le_bytes());
        [end.generation, end.end, self.serial].iter().for_each(|word| block.extend(word.to_le_bytes()));
        block::encode(block)
    }

    pub(crate) fn decode(block: &[u8]) -> Option<Self> {
        let bytes = block::decode(block, MAGIC)?;
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        // Format 1 had none of what follows, and zeros there.
        let state = match word(72)? {
            0 => State::Opening,
            1 => State::Open,
            2 => State::Closed(End { number: word(76)?, generation: long(80)?, end: long(88)? }),
            _ => return None,
        };
        Some(Self {
            version: word(8)?,
            class: MediaClass::from_number(word(12)?)?,
            pool: bytes.get(16..32)?.try_into().ok()?,
            created: long(32)?,
            opening: Opening { epoch: long(40)?, random: long(48)?, before: long(56)?, home: long(64)?, state },
            serial: long(96)?,
        })
    }

    /// The newer of two copies, and the damage of one that is not whole. `None`: neither is.
    pub(crate) fn newer(copies: [Option<Self>; 2]) -> Option<(Self, Option<Damage>)> {
        let found = match copies {
            [Some(one), Some(two)] if one.serial > two.serial => one,
            [Some(_), Some(two)] => two,
            [one, two] => one.or(two)?,
        };
        let damage = copies.iter().position(Option::is_none).map(|copy| Damage {
            object: Object::Superblock(found.class),
            offset: 0,
            what: ["its first file is not whole", "its second file is not whole"][copy],
        });
        Some((found, damage))
    }
}

/// The superblocks in the two files. An error: neither is whole, and one cannot be read.
pub(crate) fn read_copies(medium: &dyn Medium) -> Result<[Option<Superblock>; 2], IoError> {
    let at = || medium.path().display();
    let mut failed = None;
    let mut found = [None; 2];
    for (name, found) in NAMES.iter().zip(&mut found) {
        let file = match medium.open(name, Open { read_only: true, ..Open::default() }) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => file.during("opening the superblock in", at())?,
        };
        let mut block = vec![0; BLOCK];
        match file.read_at(&mut block, 0).or_else(|_| file.read_at(&mut block, 0)) {
            Ok(()) => *found = Superblock::decode(&block),
            // It is too short, as a power failure leaves one that was being made.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(e) => failed = Some(e),
        }
    }
    match failed.filter(|_| found == [None; 2]) {
        Some(e) => Err(e).during("reading the superblock in", at()),
        None => Ok(found),
    }
}

/// Writes the superblock: first one file, then the other, so that a power failure leaves one.
pub(crate) fn write_superblock(medium: &dyn Medium, superblock: &Superblock) -> Result<(), IoError> {
    let at = || medium.path().display();
    let serials = read_copies(medium).unwrap_or_default().map(|found| found.map(|found| found.serial));
    let first = match serials {
        [None, _] => 0,
        [_, None] => 1,
        [one, two] => usize::from(two > one),
    };
    let last = serials.into_iter().flatten().max().unwrap_or(0);
    for (step, name) in (1..).zip([NAMES[first], NAMES[1 - first]]) {
        let file = medium.open(name, Open { create: true, ..Open::default() });
        let file = file.during("opening the superblock in", at())?;
        file.write_at(&Superblock { serial: last.saturating_add(step), ..*superblock }.encode(), 0)
            .during("writing the superblock in", at())?;
        file.sync().during("syncing the superblock in", at())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Superblock = Superblock {
        version: FORMAT_VERSION,
        class: MediaClass::Staging,
        pool: [7; 16],
        created: 0x0102_0304,
        opening: Opening {
            epoch: 5,
            random: 6,
            before: 8,
            home: 9,
            state: State::Closed(End { generation: 10, end: 11, number: 12 }),
        },
        serial: 13,
    };

    #[test]
    fn the_layout_is_fixed() {
        let bytes = SAMPLE.encode();
        assert_eq!(bytes.len(), BLOCK);
        assert_eq!(&bytes[..16], b"PGONEPL1\x02\0\0\0\x01\0\0\0");
        assert_eq!((&bytes[16..32], &bytes[32..40]), (&[7; 16][..], &[4, 3, 2, 1, 0, 0, 0, 0][..]));
        let words: Vec<u64> =
            bytes[40..104].chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [5, 6, 8, 9, 2 | 12 << 32, 10, 11, 13]);
        assert_eq!(Superblock::decode(&bytes), Some(SAMPLE));
        for state in [State::Opening, State::Open] {
            let other = Superblock { opening: Opening { state, ..SAMPLE.opening }, ..SAMPLE };
            assert_eq!(Superblock::decode(&other.encode()), Some(other));
        }
    }

    #[test]
    fn every_flipped_bit_is_found_and_survived() {
        let whole = SAMPLE.encode();
        for bit in 0..BLOCK * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Superblock::decode(&bytes), None, "bit {bit}");
        }
        assert_eq!(Superblock::decode(&whole[..BLOCK - 1]), None);
        let damage = |copies| Superblock::newer(copies).map(|(found, damage)| (found, damage.is_some()));
        assert_eq!(damage([Some(SAMPLE), None]), Some((SAMPLE, true)));
        assert_eq!(damage([None, Some(SAMPLE)]), Some((SAMPLE, true)));
        assert_eq!(damage([Some(SAMPLE); 2]), Some((SAMPLE, false)));
        assert_eq!(damage([None; 2]), None);
    }
}
