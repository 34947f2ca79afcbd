//! Checkpoints in pools on disk: kept once, removed, damaged, cut short.

mod classes;
mod compressed;
mod kills;
mod leases;
mod leaves;
mod refused;
mod scale;
mod several;
mod turns;

use std::io::IoSlice;

use mpool::{Allocation, BLOCK};

pub(super) use leaves::Numbers;

use super::*;

fn page(seed: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|i| (seed * 31 + i * (seed + 7)) as u8).collect()
}

fn store(pool: &Pool, name: &str, seeds: &[u64]) -> Checkpoint {
    try_store(Catalog::open(pool).unwrap(), name, seeds).unwrap().0
}

/// Stores a checkpoint unless the pool fails.
fn try_store(catalog: Catalog, name: &str, seeds: &[u64]) -> Result<(Checkpoint, Catalog), StoreError> {
    let store = Store::new(catalog);
    let mut writer = match store.begin(name) {
        Ok(writer) => writer,
        Err(BeginError::Store(e)) => return Err(e),
        Err(e) => panic!("{e}"),
    };
    writer.set_pages(seeds.len());
    put(&mut writer, 0, &pages_of(seeds).concat())?;
    if let Some(bytes) = beside(name) {
        writer.keep_beside(bytes);
    }
    let stored = writer.commit("test".into(), vec![(0, (seeds.len() * BLOCK) as u64)])?;
    Ok((stored, store.into_catalog()))
}

/// What is kept beside checkpoints of some names.
fn beside(name: &str) -> Option<Vec<u8>> {
    name.starts_with("few").then(|| name.as_bytes().repeat(1000))
}

/// Stores consecutive pages, and those that are put off.
fn put(writer: &mut Writer<'_>, first: u64, bytes: &[u8]) -> Result<(), StoreError> {
    let hashes: Vec<_> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
    writer.put(&(first..).take(hashes.len()).collect::<Vec<_>>(), bytes, &hashes)?;
    let off = writer.put_off();
    let again = off.iter().flat_map(|off| &bytes[(off.page - first) as usize * BLOCK..][..BLOCK]);
    let again: Vec<u8> = again.copied().collect();
    writer.put_again(&off, &again)
}

/// The memory of these contents.
fn pages_of(seeds: &[u64]) -> Vec<Vec<u8>> {
    seeds.iter().map(|&seed| if seed == 0 { vec![0; BLOCK] } else { page(seed) }).collect()
}

fn load(pool: &Pool, name: &str) -> Vec<Vec<u8>> {
    load_from(&Catalog::open(pool).unwrap(), name)
}

impl View {
    /// The place of each page.
    fn map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>, ReadError> {
        let flawed = |flaw| self.damaged(&checkpoint.name, flaw);
        let root = self.root(checkpoint).map_err(flawed)?;
        let mut map = vec![0; (checkpoint.bytes() / BLOCK as u64) as usize];
        for (number, places) in self.leaves(root.named()) {
            let pages = map.iter_mut().skip(number * LEAF);
            pages.zip(*places.map_err(flawed)?).for_each(|(to, at)| *to = at);
        }
        Ok(map)
    }
}

fn load_from(catalog: &View, name: &str) -> Vec<Vec<u8>> {
    let checkpoint = catalog.find(name).unwrap();
    let bytes = catalog.beside_checkpoint(checkpoint).unwrap();
    assert!(bytes == beside(name) && bytes.is_some() == catalog.has_beside(checkpoint), "beside {name}");
    let image = catalog.image(checkpoint).unwrap();
    let mut bytes = vec![0; image.pages() as usize * BLOCK];
    image.read(0, &mut bytes).unwrap();
    bytes.chunks(BLOCK).map(<[u8]>::to_vec).collect()
}

#[test]
fn an_image_has_every_page_wherever_it_is_read_from() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let seeds = [1, 2, 0, 0, 3, 2, 1, 0, 4, 5];
    store(&pool, "few", &seeds);
    let catalog = Catalog::open(&pool).unwrap();
    let image = catalog.image(catalog.find("few").unwrap()).unwrap();
    // Behind the last page are zeros.
    let want = [pages_of(&seeds).concat(), vec![0; 2 * BLOCK]].concat();
    for first in 0..seeds.len() {
        for len in 1..=seeds.len() + 2 - first {
            let mut bytes = vec![9; len * BLOCK];
            image.read(first as u64, &mut bytes).unwrap();
            assert!(bytes == want[first * BLOCK..(first + len) * BLOCK], "{len} pages from {first}");
        }
    }
    // What is missing from the pool is an error, not zeros.
    let data = *catalog.data.keys().next().unwrap();
    pool.mblock_delete(&[data]).unwrap();
    let error = image.read(0, &mut vec![0; BLOCK]).unwrap_err().to_string();
    assert!(error.contains("checkpoint few") && catalog.image(catalog.find("few").unwrap()).is_err(), "{error}");
    assert!(image.read(2, &mut vec![0; BLOCK]).is_ok(), "zeros are known without it");
}

#[test]
fn pages_are_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    assert_eq!(store(&pool, "one", &[1, 2, 0, 1, 3]).new_pages, 3);
    assert_eq!(store(&pool, "two", &[3, 2, 4, 0, 0, 1]).new_pages, 1);
    let want = |seeds: &[u64]| -> Vec<Vec<u8>> {
        seeds.iter().map(|&seed| if seed == 0 { vec![0; BLOCK] } else { page(seed) }).collect()
    };
    assert!(load(&pool, "one") == want(&[1, 2, 0, 1, 3]) && load(&pool, "two") == want(&[3, 2, 4, 0, 0, 1]));
    assert!(Store::new(Catalog::open(&pool).unwrap()).begin("one").is_err());
    Catalog::open(&pool).unwrap().remove("one").unwrap();
    assert!(load(&pool, "two") == want(&[3, 2, 4, 0, 0, 1]));
    Catalog::open(&pool).unwrap().remove("two").unwrap();
    assert!(pool.mblocks().is_empty());
}

#[test]
fn equal_hashes_are_not_equality() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("lie").unwrap();
    writer.set_pages(2);
    writer.put(&[0], &page(1), &[Some(7)]).unwrap();
    writer.put(&[1], &page(2), &[Some(7)]).unwrap();
    writer.commit("test".into(), vec![(0, 2 * BLOCK as u64)]).unwrap();
    drop(all);
    assert!(load(&pool, "lie") == [page(1), page(2)]);
}

#[test]
fn a_damaged_page_is_stored_once_more_and_found_from_then_on() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1, 2, 3]);
    let data = dir.path().join("pool/data");
    let at = std::fs::read(&data).unwrap().chunks(BLOCK).position(|block| *block == page(2)).unwrap();
    std::fs::File::options().write(true).open(&data).unwrap().write_all_at(b"?", (at * BLOCK + 99) as u64).unwrap();
    assert_eq!(store(&pool, "two", &[2, 2, 1, 3, 2]).new_pages, 1);
    assert!(load(&pool, "two") == [page(2), page(2), page(1), page(3), page(2)]);
    assert_eq!(store(&pool, "three", &[3, 2]).new_pages, 0, "where it is whole");
    assert!(load(&pool, "three") == [page(3), page(2)]);
}

#[test]
fn data_of_no_checkpoint_are_removed_and_never_missed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1, 2]);
    // A crash cut the list's end off: the record of data is there, that of their checkpoint is not.
    let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
    writer.write(&[IoSlice::new(&[7; BLOCK + HASH])]).unwrap();
    let id = writer.commit().unwrap();
    Catalog::open(&pool).unwrap().append(&[Entry::Data(vec![(id, 1)])]).unwrap();
    assert_eq!(store(&pool, "two", &[2, 3]).new_pages, 1);
    assert!(pool.mblock(id).is_err(), "its space is free");
    assert_eq!(store(&pool, "three", &[3]).new_pages, 0);
    assert!(load(&pool, "two") == [page(2), page(3)] && load(&pool, "three") == [page(3)]);
    // The record that the last checkpoint is gone is there, those of its data are not.
    let gone = ["one", "two", "three"].map(|name| Entry::Gone(name.into()));
    Catalog::open(&pool).unwrap().append(&gone).unwrap();
    assert_eq!(store(&pool, "four", &[3]).new_pages, 1);
    assert_eq!(pool.mblocks().len(), 3, "data, leaves and root of the last one");
}

#[test]
fn what_is_given_up_frees_its_space_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1, 2]);
    let before = pool.mblocks();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("cut").unwrap();
    writer.set_pages(PAGES + 5);
    for number in 0..PAGES + 5 {
        writer.put(&[number as u64], &page(number as u64 + 5), &[Some(number as u128)]).unwrap();
    }
    assert!(pool.mblocks().len() > before.len());
    drop(writer);
    drop(all);
    assert_eq!(pool.mblocks(), before);
    assert!(load(&pool, "one") == [page(1), page(2)]);
}

#[test]
fn what_is_not_stored_is_what_the_earlier_checkpoint_has() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let first = store(&pool, "first", &[1, 2, 3]);
    let label = Catalog::label(&pool, &first);
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("second").unwrap();
    writer.set_pages(3);
    let present = || vec![0b111];
    assert!(!writer.go_on("something", &first.regions, present()).unwrap());
    assert!(!writer.go_on(&label, &[(4096, 3 * BLOCK as u64)], present()).unwrap(), "of other memory");
    assert!(writer.go_on(&label, &first.regions, present()).unwrap());
    writer.put(&[1], &page(9), &[hash(&page(9), writer.seed())]).unwrap();
    writer.put(&[2], &[0; BLOCK], &[None]).unwrap();
    writer.commit("test".into(), first.regions.clone()).unwrap();
    drop(all);
    Catalog::open(&pool).unwrap().remove("first").unwrap();
    assert!(load(&pool, "second") == [page(1), page(9), vec![0; BLOCK]]);
}

#[test]
fn records_that_do_not_fit_the_mblocks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let one = store(&pool, "one", &[1, 2, 3]);
    let page = BLOCK as u64;
    let data = *Catalog::open(&pool).unwrap().data.keys().next().unwrap();
    let wrong = [
        (Checkpoint { regions: vec![(0, 4 * page)], ..one.clone() }, "its map has 3 pages, and its memory 4"),
        (Checkpoint { regions: vec![(0, 3 * page - 1)], ..one.clone() }, "bytes, which cannot be"),
        (
            Checkpoint { regions: vec![(0, u64::MAX - 4095), (0, u64::MAX - 4095)], ..one.clone() },
            "bytes, which cannot be",
        ),
        (Checkpoint { root: 77, ..one.clone() }, "mblock 0x4d does not exist"),
        // Data, or leaves, and no root.
        (Checkpoint { root: data, ..one.clone() }, "is not the root of a map"),
        (Checkpoint { root: one.needs.leaves[0], ..one.clone() }, "its map has"),
        // Another root.
        (Checkpoint { root: store(&pool, "other", &[7; 600]).root, ..one.clone() }, "its map has 600 pages"),
        // Data in the place of leaves, and none at all.
        (
            Checkpoint { needs: Needs { leaves: vec![data], ..one.needs.clone() }, ..one.clone() },
            "is not the one that its map names",
        ),
        (
            Checkpoint { needs: Needs { leaves: Vec::new(), ..one.needs.clone() }, ..one.clone() },
            "is not the root of a map",
        ),
    ];
    for (i, (wrong, why)) in wrong.into_iter().enumerate() {
        let name = format!("wrong-{i}");
        let needs = wrong.needs.clone();
        let entry = Entry::Checkpoint(Checkpoint { name: name.clone(), ..wrong }, needs);
        Catalog::open(&pool).unwrap().append(&[entry]).unwrap();
        let catalog = Catalog::open(&pool).unwrap();
        let error = catalog.map(catalog.find(&name).unwrap()).unwrap_err();
        assert!(error.to_string().contains(&format!("pageone pool rm test {name}")), "{error:#}");
        let text = crate::chain(&error);
        assert!(text.contains(why), "{text}: {why}");
        drop(catalog);
        Catalog::open(&pool).unwrap().append(&[Entry::Gone(name)]).unwrap();
    }
    assert!(load(&pool, "one") == [self::page(1), self::page(2), self::page(3)]);
}

#[test]
fn a_record_of_what_no_checkpoint_can_be_is_damage_and_not_listed() {
    let wrong: [fn(&mut Checkpoint); 4] = [
        |one| one.name = "a\x1b[2J".into(),
        |one| one.name = "a".repeat(128),
        |one| one.new_pages = u64::MAX,
        |one| one.map_pages = u64::MAX,
    ];
    for wrong in wrong {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let one = store(&pool, "one", &[1]);
        let mut other = Checkpoint { name: "other".into(), ..one.clone() };
        wrong(&mut other);
        Catalog::open(&pool).unwrap().append(&[Entry::Checkpoint(other, one.needs.clone())]).unwrap();
        let catalog = Catalog::open(&pool).unwrap();
        assert!(catalog.damage().unwrap().to_string().contains("that none can have"));
        assert_eq!(catalog.checkpoints().iter().map(|c| &c.name[..]).collect::<Vec<_>>(), ["one"]);
    }
}

#[test]
fn what_was_cut_short_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("cut").unwrap();
    writer.set_pages(PAGES + 5);
    for number in 0..PAGES + 5 {
        writer.put(&[number as u64], &page(number as u64 + 1), &[Some(number as u128 + 1)]).unwrap();
    }
    std::mem::forget(writer);
    drop(all);
    assert_eq!(pool.mblocks().len(), 1, "the first data mblock was committed");
    store(&pool, "whole", &[1]);
    assert_eq!(pool.mblocks().len(), 3, "it is gone; data and map of the new one are there");
}
