//! Checkpoints that are stored at once.

use std::collections::HashSet;
use std::sync::Barrier;

use mpool::ObjectError;

use super::leaves::Numbers;
use super::scale::{counted, recorded};
use super::*;
use crate::catalog::pages::{Pages, hashes};

/// Hashes of all pages in the data mblocks.
fn stored(view: &View) -> Vec<u128> {
    view.data.iter().flat_map(|(id, data)| hashes(&view.pool, *id, *data).unwrap()).collect()
}

fn is_once(view: &View) -> bool {
    let all = stored(view);
    all.iter().collect::<HashSet<_>>().len() == all.len()
}

fn nothing_is_left_over(catalog: &Catalog) {
    assert_eq!(recorded(catalog), counted(catalog));
    assert!(recorded(catalog).iter().all(|needed| *needed > 0));
    let index = catalog.runs.iter().map(|run| run.parts.len()).sum::<usize>();
    let needed = catalog.data.len() + catalog.maps().collect::<HashSet<u64>>().len() + index;
    assert_eq!(catalog.pool.mblocks().len(), needed);
}

#[test]
fn writers_that_take_turns_store_each_page_once_and_their_own_memory() {
    const LEN: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let (mut numbers, mut whole) = (Numbers(7), Vec::new());
    let mut next = |end: u64| numbers.below(end as usize) as u64;
    let mut writers: Vec<(String, Writer<'_>, Vec<u64>)> = Vec::new();
    for step in 0..2000_u64 {
        if writers.len() < 3 {
            let name = format!("{step}");
            let mut writer = store.begin(&name).unwrap();
            assert!(matches!(store.begin(&name), Err(BeginError::Exists(_))), "it is being stored");
            writer.set_pages(LEN);
            writers.push((name, writer, vec![0; LEN]));
        }
        let chosen = next(writers.len() as u64) as usize;
        match next(16) {
            0 => {
                let (name, writer, seeds) = writers.remove(chosen);
                writer.commit("test".into(), vec![(0, (LEN * BLOCK) as u64)]).unwrap();
                let view = store.view();
                assert!(load_from(&view, &name) == pages_of(&seeds) && is_once(&view), "{name}");
                whole.push((name, seeds));
            }
            1 if next(4) == 0 => drop(writers.remove(chosen)),
            _ => {
                let (_, writer, now) = &mut writers[chosen];
                // Later pages are those of later guests.
                let seeds: Vec<u64> = (0..4).map(|_| next(8) * (step / 100 + 1) % 240).collect();
                let first = next(LEN as u64 - 4);
                now[first as usize..][..4].copy_from_slice(&seeds);
                put(writer, first, &pages_of(&seeds).concat()).unwrap();
            }
        }
    }
    assert!(whole.len() > 50, "{}", whole.len());
    drop(writers);
    let catalog = store.into_catalog();
    whole.iter().for_each(|(name, seeds)| assert!(load_from(&catalog, name) == pages_of(seeds), "{name}"));
    nothing_is_left_over(&catalog);
}

#[test]
fn writers_in_threads_fill_the_same_data_mblocks() {
    const COMMON: u64 = PAGES as u64 + 700;
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let content = |guest: u64, i: u64| if i.is_multiple_of(5) { (guest << 32) | (i + 1) } else { i + 1 };
    let bytes = |guest: u64, from: u64| -> Vec<u8> {
        (from..COMMON.min(from + 64)).flat_map(|i| content(guest, i).to_le_bytes().repeat(BLOCK / 8)).collect()
    };
    let (begin, ends) = (Barrier::new(4), Barrier::new(4));
    std::thread::scope(|scope| {
        for guest in 1..=4 {
            let (store, begin, ends) = (&store, &begin, &ends);
            scope.spawn(move || {
                let mut writer = store.begin(&format!("{guest}")).unwrap();
                writer.set_pages(COMMON as usize);
                begin.wait();
                (0..COMMON).step_by(64).for_each(|from| put(&mut writer, from, &bytes(guest, from)).unwrap());
                // What the last one has stored is there for the others.
                if guest == 4 {
                    // One that begins now does not take it for leftovers.
                    drop(store.begin("late").unwrap());
                    drop(writer);
                    ends.wait();
                } else {
                    ends.wait();
                    writer.commit("test".into(), vec![(0, COMMON * BLOCK as u64)]).unwrap();
                }
            });
        }
    });
    let catalog = store.into_catalog();
    assert!(is_once(&catalog), "{} pages", stored(&catalog).len());
    assert!(catalog.find("4").is_err());
    for guest in 1..4 {
        let want = (0..COMMON).map(|i| content(guest, i).to_le_bytes().repeat(BLOCK / 8));
        assert!(load_from(&catalog, &format!("{guest}")).into_iter().eq(want), "{guest}");
    }
    nothing_is_left_over(&catalog);
}

#[test]
fn a_data_mblock_that_was_not_written_is_missed_by_its_checkpoints_only() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let begin = |name: &str, seed: u64| {
        let mut writer = all.begin(name).unwrap();
        writer.set_pages(1);
        put(&mut writer, 0, &page(seed)).unwrap();
        writer
    };
    let (one, two) = (begin("one", 1), begin("two", 1));
    let mut state = all.state.lock();
    let full = state.take(Pages::take_open).unwrap();
    assert!(all.land(&mut state, full.contents.id, 0, Err(ObjectError::NotFound(mpool::Object::Mblock(0)))).is_err());
    drop((state, full));
    let region = || vec![(0, BLOCK as u64)];
    // It stores the page again.
    let three = begin("three", 1);
    assert!(matches!(one.commit("test".into(), region()), Err(StoreError::Lost)));
    assert_eq!(three.commit("test".into(), region()).unwrap().new_pages, 1);
    assert!(matches!(two.commit("test".into(), region()), Err(StoreError::Lost)));
    let catalog = all.into_catalog();
    assert!(load_from(&catalog, "three") == pages_of(&[1]));
    nothing_is_left_over(&catalog);
}
