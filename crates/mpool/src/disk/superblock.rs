//! The superblock: the first thing read of a class's directory.
//!
//! A file of two equal blocks, each with a checksum: one may be damaged. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PGONEPL1` |
//! | 8..12 | format version |
//! | 12..16 | class: 0 capacity, 1 staging, 2 memory |
//! | 16..32 | identity of the pool |
//! | 32..40 | when the pool was made, in seconds since 1970 |
//! | 40..4092 | zeros |
//! | 4092..4096 | crc32c of all before |

use crate::error::{Damage, Object};
use crate::{BLOCK, MediaClass};

/// Its file.
pub(crate) const NAME: &str = "superblock";
/// Both copies.
pub(crate) const LEN: usize = 2 * BLOCK;
/// The format of everything in a pool. A program refuses a version that it does not know.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"PGONEPL1";

/// A decoded superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) version: u32,
    pub(crate) class: MediaClass,
    pub(crate) pool: [u8; 16],
    pub(crate) created: u64,
}

impl Superblock {
    /// Both copies.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        block[..8].copy_from_slice(MAGIC);
        block[8..12].copy_from_slice(&self.version.to_le_bytes());
        block[12..16].copy_from_slice(&(self.class as u32).to_le_bytes());
        block[16..32].copy_from_slice(&self.pool);
        block[32..40].copy_from_slice(&self.created.to_le_bytes());
        let crc = crc32c::crc32c(&block[..BLOCK - 4]);
        block[BLOCK - 4..].copy_from_slice(&crc.to_le_bytes());
        block.repeat(2)
    }

    fn decode_copy(block: &[u8]) -> Option<Self> {
        let (bytes, crc) = block.split_last_chunk::<4>()?;
        if bytes.first_chunk::<8>()? != MAGIC || crc32c::crc32c(bytes) != u32::from_le_bytes(*crc) {
            return None;
        }
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            version: word(8)?,
            class: MediaClass::from_number(word(12)?)?,
            pool: bytes.get(16..32)?.try_into().ok()?,
            created: u64::from_le_bytes(bytes.get(32..40)?.try_into().ok()?),
        })
    }

    /// The superblock, and the damage of a copy that is not whole. `None`: neither copy is one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, Option<Damage>)> {
        let copies: Vec<_> = bytes.chunks(BLOCK).take(2).map(Self::decode_copy).collect();
        let found = copies.iter().flatten().next().copied()?;
        let bad = (0..2).find(|&copy| copies.get(copy).copied().flatten() != Some(found));
        let damage = bad.map(|copy| Damage {
            object: Object::Superblock(found.class),
            offset: (copy * BLOCK) as u64,
            what: "one of the two copies is not whole",
        });
        Some((found, damage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Superblock =
        Superblock { version: FORMAT_VERSION, class: MediaClass::Staging, pool: [7; 16], created: 0x0102_0304 };

    #[test]
    fn the_layout_is_fixed() {
        let bytes = SAMPLE.encode();
        assert_eq!(bytes.len(), LEN);
        assert_eq!(&bytes[..16], b"PGONEPL1\x01\0\0\0\x01\0\0\0");
        assert_eq!((&bytes[16..32], &bytes[32..40]), (&[7; 16][..], &[4, 3, 2, 1, 0, 0, 0, 0][..]));
        assert_eq!(bytes[..BLOCK], bytes[BLOCK..]);
        assert_eq!(Superblock::decode(&bytes), Some((SAMPLE, None)));
    }

    #[test]
    fn every_flipped_bit_is_found_and_survived() {
        let whole = SAMPLE.encode();
        for bit in 0..LEN * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (found, damage) = Superblock::decode(&bytes).unwrap();
            assert_eq!(found, SAMPLE);
            assert_eq!(damage.unwrap().offset, (bit / 8 / BLOCK * BLOCK) as u64, "bit {bit}");
        }
        assert_eq!(Superblock::decode(&whole[..BLOCK - 1]), None);
        assert!(Superblock::decode(&whole[..BLOCK]).unwrap().1.is_some());
    }
}
