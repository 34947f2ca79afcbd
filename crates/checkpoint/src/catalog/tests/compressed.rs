//! Compressed data mblocks: what they save, and that nothing but the pages ever comes out of them.

use std::fs::File;
use std::os::unix::fs::FileExt;

use mpool::OpenOptions;

use super::leaves::Numbers;
use super::list::Data;
use super::*;
use crate::catalog::compressed::{DataMblock, Reader};

/// Pages of many kinds: text, a few words, nearly one byte, noise, noise in a half.
fn mixed(number: u64) -> Vec<u8> {
    let mut numbers = Numbers(number + 1);
    let mut noise = |len: usize| (0..len).map(|_| numbers.below(256) as u8).collect::<Vec<u8>>();
    match number % 5 {
        0 => format!("page {number}: what is written twice is kept once. ").into_bytes().repeat(100)[..BLOCK].to_vec(),
        1 => noise(40).repeat(BLOCK)[..BLOCK].to_vec(),
        2 => [number.to_le_bytes().to_vec(), vec![number as u8 | 1; BLOCK - 8]].concat(),
        3 => noise(BLOCK),
        _ => [noise(BLOCK / 2), vec![number as u8; BLOCK / 2]].concat(),
    }
}

/// Stores a checkpoint of these pages.
fn store_pages(pool: &Pool, name: &str, pages: &[Vec<u8>]) -> Checkpoint {
    let all = Store::new(Catalog::open(pool).unwrap());
    let mut writer = all.begin(name).unwrap();
    writer.set_pages(pages.len());
    put(&mut writer, 0, &pages.concat()).unwrap();
    writer.commit("test".into(), vec![(0, (pages.len() * BLOCK) as u64)]).unwrap()
}

fn compressed(catalog: &View) -> Vec<(u64, Data)> {
    catalog.data.iter().filter(|(_, data)| data.compressed).map(|(id, data)| (*id, *data)).collect()
}

#[test]
fn what_only_older_checkpoints_have_is_compressed_and_stays_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let old: Vec<_> = (0..3003).map(mixed).collect();
    let new: Vec<_> = (2800..3500).map(mixed).collect();
    store_pages(&pool, "old", &old);
    store_pages(&pool, "new", &new);
    let both = |catalog: &View| load_from(catalog, "old") == old && load_from(catalog, "new") == new;
    let mut catalog = Catalog::open(&pool).unwrap();
    assert_eq!(catalog.repack(Some(2)).unwrap(), Repacked::default(), "both are new");
    let done = catalog.repack(Some(1)).unwrap();
    assert_eq!((done.mblocks, done.moved, done.compressed, done.freed, done.left), (1, 3003, 2800, 0, 0));
    assert!(done.compressed_bytes < 2800 * BLOCK as u64 / 2, "{done:?}");
    let usage = catalog.usage();
    let bytes = done.compressed_bytes.next_multiple_of(BLOCK as u64);
    assert_eq!((usage.compressed, usage.compressed_bytes, usage.stored), (2800, bytes, 3500));
    assert_eq!(usage.checkpoints["old"], Held { alone: 2800, freed: bytes / BLOCK as u64 });
    assert!(
        both(&catalog) && catalog.check(Wrong::Report).unwrap().is_empty() && catalog.check_compressed().is_empty()
    );
    assert_eq!(catalog.repack(Some(1)).unwrap(), Repacked::default(), "nothing is left to do");
    drop(catalog);
    // Opened again, by every way of reading.
    let catalog = Catalog::open(&pool).unwrap();
    assert!(both(&catalog));
    let file = dir.path().join("memory");
    catalog.write_image(catalog.find("old").unwrap(), &std::fs::File::create(&file).unwrap()).unwrap();
    assert!(std::fs::read(&file).unwrap() == old.concat());
    // A pipe has no holes.
    let (mut read, write) = std::io::pipe().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut read, &mut bytes).map(|_| bytes)
    });
    let write = std::fs::File::from(std::os::fd::OwnedFd::from(write));
    catalog.write_image(catalog.find("old").unwrap(), &write).unwrap();
    drop(write);
    assert!(reader.join().unwrap().unwrap() == old.concat());
    let image = catalog.image(catalog.find("old").unwrap()).unwrap();
    let mut numbers = Numbers(7);
    for _ in 0..300 {
        let (first, len) = (numbers.below(3003), 1 + numbers.below(40));
        let mut bytes = vec![9; len * BLOCK];
        image.read(first as u64, &mut bytes).unwrap();
        let want = old[first..].iter().chain(std::iter::repeat(&vec![0; BLOCK])).take(len).cloned().collect::<Vec<_>>();
        assert!(bytes == want.concat(), "{len} pages from {first}");
    }
    drop((catalog, image));
    // Its pages are found and not stored again.
    assert_eq!(store_pages(&pool, "again", &old).new_pages, 0);
    let mut catalog = Catalog::open(&pool).unwrap();
    // All pages of the newest one are compressed, and all of the one before.
    assert_eq!(catalog.repack(Some(0)).unwrap().compressed, 700);
    assert!(both(&catalog) && load_from(&catalog, "again") == old);
    assert_eq!(catalog.usage().compressed, 3500);
    // What is left of a compressed one is compressed again, also when nobody asks.
    catalog.remove("new").unwrap();
    catalog.remove("again").unwrap();
    let done = catalog.repack(None).unwrap();
    assert_eq!((done.mblocks, done.moved, done.compressed, done.freed), (1, 203, 203, 497));
    assert!(load_from(&catalog, "old") == old && catalog.usage().stored == 3003);
    catalog.remove("old").unwrap();
    assert!(pool.mblocks().is_empty());
}

#[test]
fn a_lease_of_compressed_pages_is_read_and_an_older_program_refuses_it() {
    for encrypted in [false, true] {
        let (dir, key) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        std::fs::write(&key, [9; 32]).unwrap();
        let path = dir.path().join("pool");
        let open = |access| Pool::open(&path, OpenOptions { access, ..OpenOptions::default() }).unwrap();
        let pool =
            if encrypted { Pool::create_encrypted(&path, "test", key.path()) } else { Pool::create(&path, "test") };
        let pages: Vec<_> = (0..100).map(mixed).collect();
        store_pages(pool.as_ref().unwrap(), "one", &pages);
        drop(pool);
        Catalog::open(&open(Access::Exclusive)).unwrap().repack(Some(0)).unwrap();
        let pool = open(Access::Shared);
        let catalog = Catalog::open(&pool).unwrap();
        let lease: File = catalog.image(catalog.find("one").unwrap()).unwrap().lease(&pool).unwrap();
        drop((catalog, pool));
        Catalog::open(&open(Access::Exclusive)).unwrap().remove("one").unwrap();
        let image = Image::of_lease(&lease).unwrap();
        let mut bytes = vec![0; 100 * BLOCK];
        image.read(0, &mut bytes).unwrap();
        assert!(bytes == pages.concat());
        let note = mpool::Leased::open(&lease).unwrap().note().to_vec();
        assert!(image::is_unknown_to_older(&note), "it would take compressed bytes for pages");
    }
}

/// The records that programs know that do not know compressed data mblocks.
#[derive(serde::Deserialize)]
#[expect(dead_code, reason = "only decoded")]
enum Older {
    Format(u32),
    Data(Vec<(u64, u32)>),
    Checkpoint(Checkpoint, Needs),
    Gone(String),
    DataGone(Vec<u64>),
    Index(Vec<Run>, u64),
    Attached(u64, list::Attached),
}

#[test]
fn an_older_program_reads_a_pool_until_something_is_compressed_and_refuses_it_from_then_on() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store_pages(&pool, "one", &(0..50).map(mixed).collect::<Vec<_>>());
    // The version that an older program has read before the first record that it does not know; if
    // it knows all, whether it would go on.
    let older = || {
        let (mut mdc, mut format) = (pool.mdc_open(ROOT_MDC).unwrap(), 0);
        while let Some(record) = mdc.read().unwrap() {
            match postcard::from_bytes(&record) {
                Ok(Older::Format(now)) => format = now,
                Ok(_) => {}
                Err(_) => return (format, false),
            }
        }
        (format, true)
    };
    Catalog::open(&pool).unwrap().repack(Some(1)).unwrap();
    assert_eq!(older(), (FORMAT, true), "nothing was compressed");
    Catalog::open(&pool).unwrap().repack(Some(0)).unwrap();
    assert_eq!(older(), (COMPRESSED, false));
    // Said once.
    store_pages(&pool, "two", &(50..90).map(mixed).collect::<Vec<_>>());
    Catalog::open(&pool).unwrap().repack(Some(0)).unwrap();
    let catalog = Catalog::open(&pool).unwrap();
    assert_eq!((catalog.format, compressed(&catalog).len()), (COMPRESSED, 2));
}

#[test]
fn a_list_that_is_written_anew_keeps_what_is_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let one: Vec<_> = (0..50).map(mixed).collect();
    store_pages(&pool, "one", &one);
    let mut catalog = Catalog::open(&pool).unwrap();
    catalog.repack(Some(0)).unwrap();
    let fill = |catalog: &mut Catalog| {
        let long = Entry::Gone("x".repeat(100_000));
        (0..11).for_each(|_| catalog.append(std::slice::from_ref(&long)).unwrap());
        let before = catalog.mdc.usage();
        catalog.compact().unwrap();
        assert!(catalog.mdc.usage() < before / 2);
    };
    fill(&mut catalog);
    assert!(catalog.format == COMPRESSED && load_from(&catalog, "one") == one);
    drop(catalog);
    assert!(load(&pool, "one") == one);
    let mut catalog = Catalog::open(&pool).unwrap();
    catalog.remove("one").unwrap();
    fill(&mut catalog);
    assert_eq!(catalog.format, FORMAT, "older programs can use it again");
    drop(catalog);
    assert_eq!(Catalog::open(&pool).unwrap().format, FORMAT);
    store_pages(&pool, "one", &one);
    Catalog::open(&pool).unwrap().repack(Some(0)).unwrap();
    assert_eq!(Catalog::open(&pool).unwrap().format, COMPRESSED);
    assert!(load(&pool, "one") == one);
}

/// A pool with one compressed checkpoint, its pages, and the data mblock.
fn compressed_pool(dir: &std::path::Path, pages: u64) -> (Pool, Vec<Vec<u8>>, u64) {
    let pool = Pool::create(&dir.join("pool"), "test").unwrap();
    let pages: Vec<_> = (0..pages).map(mixed).collect();
    store_pages(&pool, "one", &pages);
    let mut catalog = Catalog::open(&pool).unwrap();
    catalog.repack(Some(0)).unwrap();
    let id = compressed(&catalog)[0].0;
    drop(catalog);
    (pool, pages, id)
}

#[test]
fn whatever_byte_of_the_medium_changes_the_pages_are_right_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, pages, id) = compressed_pool(dir.path(), 29);
    let mut contents = vec![0; pool.mblock(id).unwrap().props().len as usize];
    pool.mblock(id).unwrap().read(0, &mut contents).unwrap();
    let stored = pool.mblock(id).unwrap().props().stored;
    drop(pool);
    let file = File::options().read(true).write(true).open(dir.path().join("pool/data")).unwrap();
    let mut all = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    let start = all.windows(64).position(|part| *part == contents[..64]).unwrap();
    let (mut errors, end) = (0, start + stored as usize);
    let mut numbers = Numbers(3);
    for at in (start..end.min(all.len())).step_by(7) {
        let wrong = all[at] ^ (1 + numbers.below(255) as u8);
        file.write_all_at(&[wrong], at as u64).unwrap();
        let options = OpenOptions { access: Access::Shared, ..OpenOptions::default() };
        let pool = Pool::open(&dir.path().join("pool"), options).unwrap();
        let catalog = Catalog::open(&pool).unwrap();
        let image = catalog.image(catalog.find("one").unwrap()).unwrap();
        for (number, page) in pages.iter().enumerate() {
            let mut bytes = vec![0; BLOCK];
            match image.read(number as u64, &mut bytes) {
                Ok(()) => assert!(bytes == *page, "byte {at} of the medium, page {number}"),
                Err(error) => {
                    assert!(error.to_string().contains("checkpoint one in pool test is damaged"), "{error}");
                    errors += 1;
                }
            }
        }
        file.write_all_at(&all[at..=at], at as u64).unwrap();
    }
    assert!(errors > 1000, "{errors}");
}

#[test]
fn whatever_a_compressed_mblock_says_the_pages_are_right_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, pages, id) = compressed_pool(dir.path(), 29);
    let mut contents = vec![0; pool.mblock(id).unwrap().props().len as usize];
    pool.mblock(id).unwrap().read(0, &mut contents).unwrap();
    let (hashes, table) = (contents.len() - 4 * END_OF_CHUNK - 29 * HASH, contents.len() - 4 * END_OF_CHUNK);
    let read = |bytes: &[u8], pages: u32| {
        let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
        writer.write(&[IoSlice::new(bytes)]).unwrap();
        let mblock = pool.mblock(writer.commit().unwrap()).unwrap();
        let (id, mblock) = (mblock.props().id, DataMblock::compressed(mblock, pages));
        let (mut reader, mut found) = (Reader::default(), Vec::new());
        for number in 0..29 {
            let mut bytes = vec![0; BLOCK];
            found.push(mblock.read(number, &mut bytes, &mut reader).map(|()| bytes));
        }
        pool.mblock_delete(&[id]).unwrap();
        found
    };
    assert!(read(&contents, 29).into_iter().zip(&pages).all(|(found, page)| found.unwrap() == *page));
    let mut numbers = Numbers(5);
    let mut errors = Vec::new();
    for at in (0..hashes).step_by(61).chain(table..contents.len()) {
        let mut wrong = contents.clone();
        wrong[at] ^= 1 + numbers.below(255) as u8;
        let is_in_plain = |number: usize| wrong.windows(BLOCK).any(|part| *part == pages[number]);
        for (number, found) in read(&wrong, 29).into_iter().enumerate() {
            match found {
                Ok(bytes) if bytes == pages[number] => {}
                // What is stored as it is has mpool's checksum, and no other.
                Ok(bytes) => assert!(at < hashes && !is_in_plain(number) && wrong.windows(BLOCK).any(|w| w == bytes)),
                Err(flaw) => errors.push(flaw.to_string()),
            }
        }
    }
    let has = |text: &str| errors.iter().any(|error| error.ends_with(text));
    assert!(has("does not decode to its pages") && has("is not one of 29 pages"), "{}", errors.len());
    // Other numbers of pages, and mblocks that are cut off.
    for pages in [0, 1, 28, 30, 8192, u32::MAX] {
        assert!(read(&contents, pages).iter().all(Result::is_err), "{pages}");
    }
    for len in [0, 1, 15, 16, contents.len() / 2, contents.len() - 1] {
        assert!(read(&contents[..len], 29).iter().all(Result::is_err), "{len}");
    }
}

/// Bytes of an entry of the table.
const END_OF_CHUNK: usize = 4;
