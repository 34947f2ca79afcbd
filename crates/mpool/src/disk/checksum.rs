//! Checksums of data: one for each block, which knows the mblock and the position too.
//!
//! A block that is whole but belongs elsewhere does not pass, so misdirected reads and writes are
//! found.

use crate::BLOCK;

fn seed(id: u64, block: u64) -> u32 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    bytes[8..].copy_from_slice(&block.to_le_bytes());
    crc32c::crc32c(&bytes)
}

/// The checksum of block number `block` of mblock `id`.
pub(crate) fn of_block(id: u64, block: u64, data: &[u8]) -> u32 {
    crc32c::crc32c_append(seed(id, block), data)
}

/// Adds the checksums of whole blocks; the first block is the next one of the table.
pub(crate) fn extend(table: &mut Vec<u32>, id: u64, data: &[u8]) {
    for block in data.chunks_exact(BLOCK) {
        table.push(of_block(id, table.len() as u64, block));
    }
}

/// The first of the whole blocks from number `first` on that does not pass.
pub(crate) fn first_bad(table: &[u32], id: u64, first: u64, data: &[u8]) -> Option<u64> {
    (first..).zip(data.chunks_exact(BLOCK)).find_map(|(number, block)| {
        let right = table.get(number as usize) == Some(&of_block(id, number, block));
        (!right).then_some(number)
    })
}

/// Blocks of data in an mblock of `len` bytes.
pub(crate) fn blocks(len: u64) -> u64 {
    len.div_ceil(BLOCK as u64)
}

/// Bytes of data and checksums on the medium; `u64::MAX`, which no medium has, when that is more
/// than can be counted.
pub(crate) fn stored_len(len: u64) -> u64 {
    let blocks = blocks(len);
    (blocks + (blocks * 4).div_ceil(BLOCK as u64)).saturating_mul(BLOCK as u64)
}

/// The table as it is stored.
pub(crate) fn table_bytes(table: &[u32]) -> crate::AlignedBuf {
    let mut bytes = crate::AlignedBuf::zeroed(table.len() * 4);
    for (bytes, crc) in bytes.chunks_exact_mut(4).zip(table) {
        bytes.copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}
