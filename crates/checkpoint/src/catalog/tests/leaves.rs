//! Checkpoints that share leaves of their maps, against the memory that they stand for.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

use super::scale::{counted, recorded};
use super::*;

/// The memory of a process as the number of each page's content; 0 for zeros, none if it is absent.
pub(super) type Model = Vec<Option<u64>>;

/// Stores a checkpoint that goes on from an earlier one, with these pages now.
pub(super) fn try_go_on(
    catalog: Catalog,
    name: &str,
    earlier: &Checkpoint,
    now: &Model,
    changed: &[usize],
) -> Result<(Checkpoint, Catalog), StoreError> {
    let label = Catalog::label(&catalog.pool, earlier);
    let store = Store::new(catalog);
    let mut writer = match store.begin(name) {
        Ok(writer) => writer,
        Err(BeginError::Store(e)) => return Err(e),
        Err(e) => panic!("{e}"),
    };
    writer.set_pages(now.len());
    let mut present = vec![0; now.len().div_ceil(64)];
    now.iter().enumerate().filter(|(_, page)| page.is_some()).for_each(|(i, _)| present[i / 64] |= 1 << (i % 64));
    assert!(writer.go_on(&label, &earlier.regions, present).unwrap());
    for &number in changed {
        let bytes = pages_of(&[now[number].unwrap_or(0)]).remove(0);
        writer.put(&[number as u64], &bytes, &[hash(&bytes, writer.seed())])?;
        for off in writer.put_off() {
            writer.put_again(&[off], &bytes)?;
        }
    }
    let stored = writer.commit("test".into(), earlier.regions.clone())?;
    Ok((stored, store.into_catalog()))
}

/// What a checkpoint has, by content.
fn seeds(model: &Model) -> Vec<u64> {
    model.iter().map(|page| page.unwrap_or(0)).collect()
}

fn is(catalog: &View, name: &str, model: &Model) -> bool {
    load_from(catalog, name) == pages_of(&seeds(model))
}

/// Numbers without a pattern.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// Mblocks that the pool has, and that the catalogue needs.
fn there_and_needed(catalog: &Catalog) -> (usize, usize) {
    let parts: usize = catalog.runs.iter().map(|run| run.parts.len()).sum();
    let maps: HashSet<u64> = catalog.maps().collect();
    (catalog.pool.mblocks().len(), catalog.data.len() + maps.len() + parts)
}

#[test]
fn whatever_changes_each_checkpoint_is_the_memory_of_its_time() {
    for seed in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let mut numbers = Numbers(seed);
        let pages = [2 * LEAF, 3 * LEAF + 17, 5][seed as usize % 3];
        let mut now: Model = (0..pages).map(|i| [Some(0), None, Some(i as u64 % 50)][numbers.below(3)]).collect();
        let mut last = store(&pool, "0", &seeds(&now));
        let mut kept = vec![("0".to_owned(), now.clone())];
        let mut catalog = Catalog::open(&pool).unwrap();
        for i in 1..25 {
            let mut changed: HashSet<usize> = HashSet::new();
            for _ in 0..numbers.below(4) {
                let (from, len) = (numbers.below(pages), 1 + numbers.below(pages / 2));
                let what = [None, Some(0), Some(1000 + numbers.below(60) as u64)][numbers.below(3)];
                for (page, now) in now.iter_mut().enumerate().skip(from).take(len) {
                    // A page that is given back is seen as absent, or read as zeros, or both.
                    *now = what.map(|seed| if seed == 0 { 0 } else { seed + page as u64 % 3 });
                    if what.is_some() || numbers.below(2) == 0 {
                        changed.insert(page);
                    }
                }
            }
            let (name, changed) = (i.to_string(), changed.into_iter().collect::<Vec<_>>());
            let (stored, next) = try_go_on(catalog, &name, &last, &now, &changed).unwrap();
            catalog = next;
            kept.push((name, now.clone()));
            last = stored;
            match numbers.below(8) {
                0..=2 => {
                    let (name, _) = kept.remove(numbers.below(kept.len() - 1));
                    catalog.remove(&name).unwrap();
                }
                3 => {
                    let mut all = Repacking::new([None, Some(0), Some(1), Some(2)][numbers.below(4)]);
                    while all.turn(&mut catalog, &mut |_, _| ControlFlow::Break(())).unwrap() {
                        drop(catalog);
                        catalog = Catalog::open(&pool).unwrap();
                    }
                    last = catalog.find(&last.name).unwrap().clone();
                }
                4 => {
                    drop(catalog);
                    catalog = Catalog::open(&pool).unwrap();
                }
                _ => {}
            }
            assert_eq!(recorded(&catalog), counted(&catalog), "{seed} {i}");
            let names = [numbers.below(kept.len()), kept.len() - 1];
            assert!(names.iter().all(|at| is(&catalog, &kept[*at].0, &kept[*at].1)), "{seed} {i}");
            assert!(last.needs.leaves.len() <= map::MOST, "{:?}", last.needs.leaves);
        }
        assert!(catalog.check(Wrong::Repair).unwrap().is_empty());
        assert!(kept.iter().all(|(name, model)| is(&catalog, name, model)), "{seed}");
        let (there, needed) = there_and_needed(&catalog);
        assert_eq!(there, needed, "{seed}: nothing is left over");
        kept.iter().for_each(|(name, _)| catalog.remove(name).unwrap());
        assert!(pool.mblocks().is_empty(), "{seed}");
    }
}

#[test]
fn a_second_checkpoint_writes_the_leaves_that_changed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut now: Model = vec![Some(7); 100 * LEAF];
    let first = store(&pool, "first", &seeds(&now));
    assert_eq!(first.map_pages, 101);
    let (same, catalog) = try_go_on(Catalog::open(&pool).unwrap(), "same", &first, &now, &[]).unwrap();
    assert_eq!(same.map_pages, 1, "the root");
    // Pages that are as they were, too; and leaves of zeros take no place.
    (3 * LEAF..4 * LEAF).for_each(|page| now[page] = None);
    now[50 * LEAF] = Some(8);
    let changed = [50 * LEAF, 60 * LEAF, 70 * LEAF + 9];
    let (second, mut catalog) = try_go_on(catalog, "second", &same, &now, &changed).unwrap();
    assert_eq!(second.map_pages, 2);
    assert!(is(&catalog, "second", &now));
    // The leaves stay as long as one checkpoint needs them.
    catalog.remove("first").unwrap();
    catalog.remove("same").unwrap();
    assert!(is(&catalog, "second", &now));
    catalog.remove("second").unwrap();
    assert!(pool.mblocks().is_empty());
}

#[test]
fn many_checkpoints_do_not_leave_many_mblocks_with_a_few_leaves_each() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let leaves = 100;
    let mut now: Model = vec![Some(7); leaves * LEAF];
    let mut last = store(&pool, "0", &seeds(&now));
    let mut catalog = Catalog::open(&pool).unwrap();
    let mut written = 0;
    for i in 1..120 {
        let page = (i * 37 % leaves) * LEAF;
        now[page] = Some(100 + i as u64);
        let (stored, next) = try_go_on(catalog, &i.to_string(), &last, &now, &[page]).unwrap();
        catalog = next;
        catalog.remove(&last.name).unwrap();
        written += stored.map_pages;
        last = stored;
        assert!(last.needs.leaves.len() <= map::MOST, "{i}");
        let blocks = |id: &u64| pool.mblock(*id).unwrap().props().len / BLOCK as u64;
        let held: u64 = last.needs.leaves.iter().map(blocks).sum();
        assert!(held <= 2 * leaves as u64, "{i}: {held} blocks for {leaves} leaves");
    }
    println!("{written} blocks written for 119 changes, {} mblocks", last.needs.leaves.len());
    assert!(is(&catalog, &last.name, &now));
    assert!(written < 119 * 5, "each leaf was copied a few times: {written}");
}

#[test]
fn a_damaged_leaf_is_not_built_upon_and_hurts_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut now: Model = (0..4 * LEAF).map(|i| Some(1 + i as u64 / LEAF as u64)).collect();
    let first = store(&pool, "first", &seeds(&now));
    let data = dir.path().join("pool/data");
    let place = Catalog::open(&pool).unwrap().map(&first).unwrap()[LEAF].to_le_bytes();
    let bytes = std::fs::read(&data).unwrap();
    let at = (0..bytes.len()).step_by(BLOCK).find(|at| bytes[*at..][..8] == place && bytes[*at + 8..][..8] == place);
    let file = std::fs::File::options().write(true).open(&data).unwrap();
    file.write_all_at(&[!place[0]], at.unwrap() as u64).unwrap();
    let findings = Catalog::open(&pool).unwrap().check(Wrong::Report).unwrap();
    assert!(matches!(findings[..], [Finding::Unreadable(_)]), "{findings:?}");
    now[0] = Some(9);
    let (second, catalog) = try_go_on(Catalog::open(&pool).unwrap(), "second", &first, &now, &[0]).unwrap();
    assert!(catalog.map(&second).is_err(), "it has the damaged leaf too");
    now[LEAF] = Some(9);
    let error = try_go_on(catalog, "third", &second, &now, &[LEAF]).map(drop).unwrap_err();
    assert!(error.is_earlier() && error.to_string().ends_with("with --full the next one does not need it"), "{error}");
    // Where nothing is left of the leaf, nothing is missed.
    (LEAF..2 * LEAF).for_each(|page| now[page] = None);
    let catalog = try_go_on(Catalog::open(&pool).unwrap(), "fourth", &second, &now, &[]).unwrap().1;
    assert!(is(&catalog, "fourth", &now));
}
