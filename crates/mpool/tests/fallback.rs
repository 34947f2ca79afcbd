//! Large mblocks, with `io_uring` and without: written, read whole and in part, mapped, damaged.
//!
//! One test, since doing without is for the whole process.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::IoSlice;
use std::os::unix::fs::FileExt;

use mpool::{AlignedBuf, Allocation, BLOCK, Mcache, ObjectError, Pool, Settings, Temperature};

/// More than is written or read at a time, and no whole block at the end.
const LEN: usize = (9 << 20) + 4567;

fn works(aligned: bool) {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "fallback").unwrap();
    let mut bytes = AlignedBuf::zeroed(LEN + BLOCK);
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    }
    let content = if aligned { &bytes[..LEN] } else { &bytes[1..LEN + 1] };
    let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
    writer.write(&[IoSlice::new(content)]).unwrap();
    let id = writer.commit().unwrap();
    let mblock = pool.mblock(id).unwrap();

    let mut into = AlignedBuf::zeroed(LEN);
    for (offset, len) in [(0, LEN), (BLOCK, 5 << 20), (1, LEN - 1), (3 << 20, 1), (LEN - 5, 5)] {
        into.fill(0);
        mblock.read(offset as u64, &mut into[..len]).unwrap();
        assert!(into[..len] == content[offset..offset + len], "{len} bytes from {offset} on");
    }
    match Mcache::new(Settings::default()) {
        Ok(cache) => {
            let map = cache.map(&pool, &[id], Temperature::Warm).unwrap();
            let mut pages = Vec::new();
            map.get_pages(0, &[2000, 3, 700, 3], &mut pages).unwrap();
            for (got, page) in pages.iter().zip([2000, 3, 700, 3]) {
                assert!(*got == &content[page * BLOCK..][..BLOCK], "page {page}");
            }
            assert!(map.mblock(0) == content);
        }
        Err(why) => println!("SKIPPED maps: {why}"),
    }

    // Two bad blocks, in different requests: the first one is named.
    let data = std::fs::File::options().read(true).write(true).open(dir.path().join("pool/data")).unwrap();
    for block in [1900, 700] {
        let at = (block * BLOCK + 17) as u64;
        let mut byte = [0];
        data.read_exact_at(&mut byte, at).unwrap();
        data.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    data.sync_all().unwrap();
    match mblock.read(0, &mut into[..LEN]) {
        Err(ObjectError::Damaged(damage)) => assert_eq!(damage.offset, 700 * BLOCK as u64),
        other => panic!("{other:?}"),
    }
    mblock.read(0, &mut into[..700 * BLOCK]).unwrap();
    mblock.read((701 * BLOCK) as u64, &mut into[..1199 * BLOCK]).unwrap();

    // What is cut off is an error, not zeros.
    data.set_len(6 << 20).unwrap();
    assert!(mblock.read(BLOCK as u64, &mut into[..8 << 20]).is_err());
}

#[test]
fn large_mblocks_with_io_uring_and_without() {
    works(true);
    works(false);
    mpool::disable_io_uring();
    works(true);
    works(false);
}
