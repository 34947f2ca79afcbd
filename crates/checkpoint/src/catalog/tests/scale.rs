//! Counts, the index from one checkpoint to the next, and repacking.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

use super::*;

/// Number of checkpoints that need each data mblock, as the maps say.
pub(super) fn counted(catalog: &View) -> Vec<u32> {
    let maps: Vec<Vec<u64>> = catalog.checkpoints().iter().map(|c| catalog.map(c).unwrap()).collect();
    let needs = |id: u64| maps.iter().filter(|map| map.iter().any(|at| *at != 0 && at >> 16 == id)).count() as u32;
    catalog.data.keys().map(|id| needs(*id)).collect()
}

pub(super) fn recorded(catalog: &View) -> Vec<u32> {
    catalog.data.values().map(|data| data.needed).collect()
}

#[test]
fn what_is_removed_is_what_no_other_checkpoint_needs_and_no_other_map_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let one = store(&pool, "one", &[1, 2, 3]);
    let two = store(&pool, "two", &[3, 4, 5]);
    store(&pool, "three", &[5, 6, 0]);
    let catalog = Catalog::open(&pool).unwrap();
    assert_eq!(recorded(&catalog), [2, 2, 1]);
    assert_eq!(recorded(&catalog), counted(&catalog));
    let usage = catalog.usage();
    let held = |alone, freed| Held { alone, freed };
    let want = [("one", held(2, 0)), ("three", held(1, 1)), ("two", held(1, 0))];
    assert_eq!(usage.checkpoints, want.map(|(name, held)| (name.to_owned(), held)).into());
    assert_eq!((usage.stored, usage.live, usage.repack), (6, 6, 0));
    drop(catalog);
    // Without its map, "two" cannot be read. Removing "one" does not read it.
    pool.mblock_delete(&[two.root]).unwrap();
    Catalog::open(&pool).unwrap().remove("one").unwrap();
    let left = Catalog::open(&pool).unwrap();
    assert_eq!(recorded(&left), [1, 2, 1]);
    assert!(pool.mblock(one.root).is_err() && load_from(&left, "three") == pages_of(&[5, 6, 0]));
    drop(left);
    Catalog::open(&pool).unwrap().remove("two").unwrap();
    assert_eq!(recorded(&Catalog::open(&pool).unwrap()), [1, 1], "data of 5, and of 6");
    assert_eq!(Catalog::open(&pool).unwrap().remove("three").ok(), Some(()));
    assert!(pool.mblocks().is_empty());
}

#[test]
fn a_record_that_names_other_data_than_its_map_is_found_and_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1, 2, 3]);
    let two = store(&pool, "two", &[3, 4]);
    let mut catalog = Catalog::open(&pool).unwrap();
    assert!(catalog.check(Wrong::Repair).unwrap().is_empty());
    catalog.append(&[Entry::Checkpoint(two.clone(), Needs { data: list::Ids::default(), ..two.needs })]).unwrap();
    drop(catalog);
    let mut catalog = Catalog::open(&pool).unwrap();
    assert_eq!(recorded(&catalog), [1, 0]);
    let finding = |findings: Vec<Finding>| findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    let found = finding(catalog.check(Wrong::Report).unwrap());
    assert!(found.starts_with("the record of checkpoint two names other data mblocks than its map; "), "{found}");
    assert!(found.contains("without --read-only"), "{found}");
    drop((catalog, pool));
    // It cannot be written: what was found is there all the same, of all checkpoints.
    let shared = mpool::OpenOptions { access: mpool::Access::Shared, ..Default::default() };
    let pool = Pool::open(&dir.path().join("pool"), shared).unwrap();
    let unrepaired = Catalog::open(&pool).unwrap().check(Wrong::Repair).unwrap_err();
    assert!(finding(unrepaired.findings) == found && matches!(unrepaired.source, StoreError::Object(_)));
    drop(pool);
    let pool = Pool::open(&dir.path().join("pool"), mpool::OpenOptions::default()).unwrap();
    let mut catalog = Catalog::open(&pool).unwrap();
    let found = finding(catalog.check(Wrong::Repair).unwrap());
    assert!(found.contains("checkpoint two") && found.ends_with("written anew"), "{found}");
    assert_eq!(recorded(&catalog), counted(&catalog));
    drop(catalog);
    let mut catalog = Catalog::open(&pool).unwrap();
    assert!(catalog.check(Wrong::Repair).unwrap().is_empty());
    catalog.remove("one").unwrap();
    assert!(load_from(&catalog, "two") == pages_of(&[3, 4]));
}

/// Few pages of the index in memory, and hardly any hashes.
const SMALL: Limits = Limits { entries: 1 << 20, collected: 2, pieces: 2, lists: 2 };

#[test]
fn the_index_is_used_from_one_checkpoint_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    for (limits, first) in [(SMALL, 0), (Limits::default(), 100)] {
        for i in 0..12 {
            let (name, from) = (format!("{first}-{i}"), first + 1 + i * 3);
            // Three new pages, and all that there were.
            let seeds: Vec<u64> = (first + 1..from + 3).rev().collect();
            let stored = try_store(Catalog::open_with(&pool, limits).unwrap(), &name, &seeds).unwrap().0;
            assert_eq!(stored.new_pages, 3, "{name}");
            assert!(load(&pool, &name) == pages_of(&seeds), "{name}");
        }
        drop(Store::new(Catalog::open(&pool).unwrap()).begin("nothing").unwrap());
        let catalog = Catalog::open(&pool).unwrap();
        let uncovered = catalog.data.range(catalog.covered..).count();
        assert!(!catalog.runs.is_empty() && uncovered <= 4, "{uncovered}");
        let others = catalog.data.len() + catalog.maps().collect::<HashSet<u64>>().len();
        let parts: usize = catalog.runs.iter().map(|run| run.parts.len()).sum();
        assert_eq!(pool.mblocks().len(), others + parts, "old runs are deleted");
    }
    let names: Vec<String> = Catalog::open(&pool).unwrap().checkpoints().iter().map(|c| c.name.clone()).collect();
    names.iter().for_each(|name| Catalog::open(&pool).unwrap().remove(name).unwrap());
    assert!(pool.mblocks().is_empty(), "the index too");
}

#[test]
fn a_damaged_index_costs_space_once_and_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    for i in 0..6 {
        store(&pool, &format!("{i}"), &[3 * i + 1, 3 * i + 2, 3 * i + 3]);
    }
    let part = Catalog::open(&pool).unwrap().runs[0].parts[0];
    let data = dir.path().join("pool/data");
    let bytes = std::fs::read(&data).unwrap();
    let first = part.first.to_le_bytes();
    let at = (0..bytes.len()).step_by(BLOCK).find(|at| bytes[*at..*at + 8] == first).unwrap();
    std::fs::File::options().write(true).open(&data).unwrap().write_all_at(b"??", at as u64 + 8).unwrap();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("again").unwrap();
    writer.set_pages(1);
    writer.put(&[0], &page(1), &[hash(&page(1), writer.seed())]).unwrap();
    assert!(writer.put_off().is_empty());
    let warnings = writer.warnings();
    assert!(matches!(warnings[..], [Warning::Index { .. }]) && writer.warnings().is_empty(), "{warnings:?}");
    assert!(warnings[0].to_string().contains("index of pool test"), "{}", warnings[0]);
    writer.commit("test".into(), vec![(0, BLOCK as u64)]).unwrap();
    drop(all);
    assert!(load(&pool, "again") == pages_of(&[1]));
    assert!(pool.mblock(part.id).is_err(), "the next one makes it anew");
    let all: Vec<u64> = (1..19).collect();
    assert_eq!(store(&pool, "whole", &all).new_pages, 0);
    assert!(load(&pool, "whole") == pages_of(&all));
}

#[test]
fn above_the_limit_of_the_index_memory_is_right_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let limits = Limits { entries: 8, ..SMALL };
    let mut catalog = Catalog::open_with(&pool, limits).unwrap();
    for i in 0..10 {
        let seeds: Vec<u64> = (i * 20 + 1..i * 20 + 60).collect();
        catalog = try_store(catalog, &format!("{i}"), &seeds).unwrap().1;
        assert!(load_from(&catalog, &format!("{i}")) == pages_of(&seeds));
    }
    assert!(catalog.runs.iter().all(|run| run.shift > 0), "{:?}", catalog.runs);
    let stored: u32 = catalog.data.values().map(|data| data.pages).sum();
    println!("{stored} pages stored of 239 different ones");
}

#[test]
fn repacking_moves_what_is_left_and_frees_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let many: Vec<u64> = (1..=100).collect();
    store(&pool, "one", &many);
    let two = store(&pool, "two", &[7, 0, 200, 99, 7]);
    let three = store(&pool, "three", &[98, 200, 99]);
    let mut catalog = Catalog::open(&pool).unwrap();
    assert_eq!(catalog.repack(None).unwrap(), Repacked::default(), "nothing is gone yet");
    catalog.remove("one").unwrap();
    assert_eq!(catalog.usage().repack, 97);
    let (before, label) = (pool.mblocks().len(), Catalog::label(&pool, &two));
    let done = catalog.repack(None).unwrap();
    assert_eq!(done, Repacked { mblocks: 1, moved: 3, freed: 97, ..Repacked::default() });
    assert_eq!((catalog.usage().repack, pool.mblocks().len()), (0, before));
    assert_eq!(Catalog::label(&pool, catalog.find("two").unwrap()), label, "the next checkpoint goes on from it");
    assert!(pool.mblock(two.root).is_err() && pool.mblock(three.root).is_err());
    drop(catalog);
    let check = |pool: &Pool| {
        assert!(load(pool, "two") == pages_of(&[7, 0, 200, 99, 7]) && load(pool, "three") == pages_of(&[98, 200, 99]));
        let catalog = Catalog::open(pool).unwrap();
        assert_eq!(recorded(&catalog), counted(&catalog));
    };
    check(&pool);
    assert_eq!(store(&pool, "four", &[98, 7, 200, 1]).new_pages, 1, "what was moved is found");
    check(&pool);
}

/// Each turn finds what others have made of the pool, moves on, and takes nothing of theirs.
#[test]
fn others_store_remove_and_repack_between_the_turns_of_a_repacking() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut kept = Vec::new();
    for i in 0..6 {
        let all: Vec<u64> = (1..=20).map(|page| 40 * i + page).collect();
        store(&pool, &format!("all-{i}"), &all);
        let few = vec![40 * i + 3, 0, 40 * i + 17];
        store(&pool, &format!("few-{i}"), &few);
        kept.push((format!("few-{i}"), few));
    }
    let mut catalog = Catalog::open(&pool).unwrap();
    (0..6).for_each(|i| catalog.remove(&format!("all-{i}")).unwrap());
    drop(catalog);
    let mut all = Repacking::new(None);
    let mut turn = || {
        let mut seen = Vec::new();
        let more = all.turn(&mut Catalog::open(&pool).unwrap(), &mut |moved, left| {
            seen.push((moved / BLOCK as u64, left / BLOCK as u64));
            ControlFlow::Break(())
        });
        (more.unwrap(), seen, all.done)
    };
    let is_whole = |kept: &[(String, Vec<u64>)]| {
        kept.iter().for_each(|(name, seeds)| assert!(load(&pool, name) == pages_of(seeds), "{name}"));
        let catalog = Catalog::open(&pool).unwrap();
        assert_eq!(recorded(&catalog), counted(&catalog));
    };
    assert_eq!(turn(), (true, vec![(2, 10)], Repacked { mblocks: 1, moved: 2, freed: 18, ..Repacked::default() }));
    is_whole(&kept);
    // One that was to be moved is gone, and one is found by another.
    Catalog::open(&pool).unwrap().remove("few-1").unwrap();
    kept.remove(1);
    let new = vec![3, 83, 241, 242, 243];
    assert_eq!(store(&pool, "new", &new).new_pages, 3, "what was moved is found, and what will be");
    kept.push(("new".into(), new));
    assert_eq!(turn().1, [(2, 6)]);
    is_whole(&kept);
    // Another repacking takes what is left.
    assert_eq!(Catalog::open(&pool).unwrap().repack(None).unwrap().mblocks, 3);
    // What came later is the next repacking's.
    store(&pool, "gaps", &[250, 251, 252]);
    store(&pool, "of-gaps", &[250]);
    Catalog::open(&pool).unwrap().remove("gaps").unwrap();
    kept.push(("of-gaps".into(), vec![250]));
    let (more, seen, done) = turn();
    assert_eq!((more, seen, done.mblocks, done.left), (false, vec![], 2, 0));
    is_whole(&kept);
    let mut catalog = Catalog::open(&pool).unwrap();
    assert!(catalog.check(Wrong::Report).unwrap().is_empty());
    kept.iter().for_each(|(name, _)| catalog.remove(name).unwrap());
    assert!(pool.mblocks().is_empty());
}

#[test]
fn what_cannot_be_read_is_not_repacked() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let many: Vec<u64> = (1..=100).collect();
    store(&pool, "one", &many);
    store(&pool, "two", &[7, 9]);
    let three = store(&pool, "three", &[1, 250]);
    let mut catalog = Catalog::open(&pool).unwrap();
    catalog.remove("one").unwrap();
    // The map of one of them is gone: it may name any page of what it needs.
    pool.mblock_delete(&[three.root]).unwrap();
    assert_eq!(catalog.usage().unreadable, ["three"]);
    let mut all = Repacking::new(None);
    assert!(!all.turn(&mut catalog, &mut |_, _| ControlFlow::Break(())).unwrap());
    assert!(!all.turn(&mut catalog, &mut |_, _| ControlFlow::Break(())).unwrap());
    assert_eq!(all.done, Repacked { left: 2, ..Repacked::default() }, "each is looked at once");
    assert!(load_from(&catalog, "two") == pages_of(&[7, 9]));
    catalog.remove("three").unwrap();
    // A page cannot be read.
    let data = dir.path().join("pool/data");
    let at = std::fs::read(&data).unwrap().chunks(BLOCK).position(|block| *block == page(9)).unwrap();
    std::fs::File::options().write(true).open(&data).unwrap().write_all_at(b"?", (at * BLOCK + 99) as u64).unwrap();
    assert_eq!(catalog.repack(None).unwrap(), Repacked { left: 1, ..Repacked::default() });
    assert_eq!(catalog.checkpoints().len(), 1);
}
