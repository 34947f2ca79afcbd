//! A block that stands alone: eight bytes say what it is, the last four are the crc32c of all
//! before.

use crate::BLOCK;

/// Fills the bytes up to a whole block with zeros and the checksum.
pub(crate) fn encode(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(BLOCK - 4, 0);
    let crc = crc32c::crc32c(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes
}

/// The bytes before the checksum, if that is right and they begin with `magic`.
pub(crate) fn decode<'a>(block: &'a [u8], magic: &[u8; 8]) -> Option<&'a [u8]> {
    let (bytes, crc) = block.get(..BLOCK)?.split_last_chunk::<4>()?;
    let is_whole = bytes.starts_with(magic) && crc32c::crc32c(bytes) == u32::from_le_bytes(*crc);
    is_whole.then_some(bytes)
}
