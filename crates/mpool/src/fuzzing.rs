//! For fuzzing and the tests of decoders: every decoder of the on-disk format, and pools with
//! damaged files.

use std::path::Path;

use crate::disk::frame::{self, Frame, Kind};
use crate::disk::key::KeyFile;
use crate::disk::log;
use crate::disk::record::Record;
use crate::disk::sealed::SealedLease;
use crate::disk::superblock::Superblock;
use crate::error::Object;
use crate::pool::lease;
use crate::{Access, Allocation, BLOCK, MediaClass, OpenOptions, Pool};

/// Gives the bytes to every decoder. None may panic or loop. Encoding an accepted value must give
/// the same bytes.
///
/// # Panics
/// When a decoder is at fault.
pub fn decode_all(bytes: &[u8]) {
    let _ = Superblock::decode(bytes);
    let _ = log::decode_header(bytes, 0);
    // Also with correct checksums, so that the code behind them is reached.
    let mut block = bytes.to_vec();
    block.resize(BLOCK, 0);
    block[..8].copy_from_slice(b"PGONEPL1");
    let crc = crc32c::crc32c(&block[..BLOCK - 4]);
    block[BLOCK - 4..].copy_from_slice(&crc.to_le_bytes());
    if let Some(found) = Superblock::decode(&block) {
        assert_eq!(Superblock::decode(&found.encode()), Some(found));
    }
    block[..8].copy_from_slice(b"PGONELOG");
    let crc = crc32c::crc32c(&block[..24]);
    block[24..28].copy_from_slice(&crc.to_le_bytes());
    assert!(log::decode_header(&block, u64::from_le_bytes(block[16..24].try_into().unwrap_or_default())).is_some());
    let mut lease = [b"PGLEASE1", bytes].concat();
    lease.extend(crc32c::crc32c(&lease).to_le_bytes());
    for bytes in [bytes, &lease] {
        let _ = lease::decode(bytes);
    }
    for block in [bytes, &key_file(1, bytes), &key_file(2, bytes)] {
        if let Some(found) = KeyFile::decode(block) {
            assert_eq!(found.encode(), block[..BLOCK]);
        }
    }
    for bytes in [bytes, &[b"PGLEASEX", bytes].concat()] {
        let _ = SealedLease::decode(bytes, bytes.len() as u64);
    }
    if let Some((&generation, frames)) = bytes.split_first() {
        for copies in [[frames, frames], [frames, &[]], [&[], frames], frames.split_at(frames.len() / 2).into()] {
            let walk = frame::walk(copies, generation.into(), Object::Mlog(0), &mut |_| {});
            assert!(walk.end as usize <= frames.len());
        }
    }
    if let Some(record) = Record::decode(bytes) {
        assert_eq!(Record::decode(&record.encode()), Some(record));
    }
}

/// A key file of this version, with these bytes behind that, and a right checksum.
pub(crate) fn key_file(version: u32, bytes: &[u8]) -> Vec<u8> {
    let mut block = [b"PGONEKEY", &version.to_le_bytes()[..], bytes].concat();
    block.resize(BLOCK - 4, 0);
    let crc = crc32c::crc32c(&block);
    block.extend(crc.to_le_bytes());
    block
}

/// The frames of a log with these records that was closed.
pub(crate) fn closed_log(generation: u64, payloads: &[&[u8]]) -> Vec<u8> {
    let mut frames = Vec::new();
    let mut add = |number, kind, durable, payload| {
        let position = frames.len() as u64;
        Frame { position, number, kind, durable, payload }.encode(generation, &mut frames);
    };
    (1..).zip(payloads).for_each(|(number, payload)| add(number, Kind::Record, 0, *payload));
    let (number, durable) = (payloads.len() as u32, frames.len() as u64);
    frames.resize(frames.len().next_multiple_of(BLOCK), 0);
    let position = frames.len() as u64;
    Frame { position, number, kind: Kind::Close, durable, payload: b"" }.encode(generation, &mut frames);
    frames
}

/// Writes these as the metadata of a pool that has a name, a capacity class and a root MDC, in
/// frames that are whole: only their contents can be wrong.
///
/// # Panics
/// When the file cannot be written.
pub fn write_metadata(directory: &Path, payloads: &[&[u8]]) {
    use crate::disk::record::LogRecord;
    let class = MediaClass::Capacity;
    let first = [
        Record::Name("fuzzed".into()),
        Record::Class { class, path: directory.into() },
        Record::Mdc(LogRecord { id: crate::ROOT_MDC, class, capacity: 1 << 20 }),
    ];
    let first = first.map(|record| record.encode());
    let payloads: Vec<&[u8]> = first.iter().map(Vec::as_slice).chain(payloads.iter().copied()).collect();
    let whole = [log::header(9, 0), closed_log(9, &payloads)].concat();
    for name in log::names("meta-0") {
        std::fs::write(directory.join(name), &whole).expect("metadata can be written");
    }
}

/// Opens a pool with damaged files, reads all its objects, and checks it. Errors are right, panics
/// are not.
pub fn use_pool(directory: &Path) {
    for salvage in [false, true] {
        let access = if salvage { Access::Shared } else { Access::Exclusive };
        let Ok(pool) = Pool::open(directory, OpenOptions { access, salvage, ..OpenOptions::default() }) else {
            continue;
        };
        for mblock in pool.mblocks() {
            let len = usize::try_from(mblock.len).unwrap_or(usize::MAX).min(1 << 16);
            let _ = pool.mblock(mblock.id).and_then(|mblock| mblock.read(0, &mut vec![0; len]));
            let end = mblock.len.saturating_sub(1);
            let _ = pool.mblock(mblock.id).and_then(|mblock| mblock.read(end, &mut [0]));
        }
        for props in pool.mlogs() {
            let Ok(mut mlog) = pool.mlog_open(props.id) else { continue };
            while matches!(mlog.read(), Ok(Some(_))) {}
        }
        if let Ok(mut mdc) = pool.mdc_open(crate::ROOT_MDC) {
            while matches!(mdc.read(), Ok(Some(_))) {}
        }
        let _ = pool.check(crate::Depth::Metadata);
        // Its space is used, too.
        if let Ok(writer) = pool.mblock_alloc(Allocation { capacity: 1, ..Allocation::default() }) {
            let _ = writer.commit();
        }
        let all: Vec<u64> = pool.mblocks().iter().map(|mblock| mblock.id).collect();
        let _ = pool.mblock_delete(&all);
        let _ = pool.mblock_alloc(Allocation { capacity: 1 << 16, ..Allocation::default() }).map(drop);
        let _ = pool.usage();
    }
}
