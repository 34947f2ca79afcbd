//! A program that is killed before each of its changes.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use mpool::OpenOptions;

use super::leaves::try_go_on;
use super::scale::{counted, recorded};
use super::*;
use crate::test::{Memory, Then};

/// The checkpoints that were stored, removed, or may be either.
#[derive(Clone, Default)]
struct Model {
    certain: Vec<(String, Vec<u64>)>,
    perhaps: Option<(String, Vec<u64>)>,
    /// What is not known to be removed is still there.
    removing: bool,
}

impl Model {
    fn store(&mut self, catalog: Catalog, name: &str, seeds: &[u64]) -> Result<Catalog, StoreError> {
        let new = (name.to_owned(), seeds.to_vec());
        self.perhaps = Some(new.clone());
        let (_, catalog) = try_store(catalog, name, seeds)?;
        self.certain.push(new);
        self.perhaps = None;
        Ok(catalog)
    }

    /// Stores a checkpoint that has one other page than an earlier one.
    fn go_on(&mut self, catalog: Catalog, name: &str, from: &str, page: usize) -> Result<Catalog, StoreError> {
        let mut seeds = self.certain.iter().find(|(known, _)| known == from).unwrap().1.clone();
        seeds[page] = 300;
        self.perhaps = Some((name.to_owned(), seeds.clone()));
        let now = seeds.iter().map(|seed| Some(*seed)).collect();
        let earlier = catalog.find(from).unwrap().clone();
        let (stored, catalog) = try_go_on(catalog, name, &earlier, &now, &[page])?;
        assert!(stored.needs.leaves.len() > 1, "it shares leaves");
        self.certain.extend(self.perhaps.take());
        Ok(catalog)
    }

    fn remove(&mut self, catalog: &mut Catalog, name: &str) -> Result<(), StoreError> {
        let at = self.certain.iter().position(|(known, _)| known == name).unwrap();
        (self.perhaps, self.removing) = (Some(self.certain.remove(at)), true);
        match catalog.remove(name) {
            Ok(()) => (self.perhaps, self.removing) = (None, false),
            Err(RemoveError::Store(e)) => return Err(e),
            Err(e) => panic!("{e}"),
        }
        Ok(())
    }

    /// Stores two checkpoints at once that have pages in common.
    fn store_two(&mut self, catalog: Catalog, both: [(&str, &[u64]); 2]) -> Result<Catalog, StoreError> {
        let store = Store::new(catalog);
        let mut writers = Vec::new();
        for (name, seeds) in both {
            let mut writer = match store.begin(name) {
                Ok(writer) => writer,
                Err(BeginError::Store(e)) => return Err(e),
                Err(e) => panic!("{e}"),
            };
            writer.set_pages(seeds.len());
            put(&mut writer, 0, &pages_of(seeds).concat())?;
            writers.push((writer, (name.to_owned(), seeds.to_vec())));
        }
        for (writer, new) in writers {
            let regions = vec![(0, (new.1.len() * BLOCK) as u64)];
            self.perhaps = Some(new);
            writer.commit("test".into(), regions)?;
            self.certain.extend(self.perhaps.take());
        }
        Ok(store.into_catalog())
    }

    /// Stores, removes and repacks; checkpoints share leaves, and the index is written on the way.
    fn run(&mut self, pool: &Pool) -> Result<(), StoreError> {
        let open = || match Catalog::open(pool) {
            Ok(catalog) => Ok(catalog),
            Err(OpenError::Store(e)) => Err(e),
            Err(e) => panic!("{e}"),
        };
        let many: Vec<u64> = (1..=30).chain((0..LEAF as u64 + 40).map(|i| 101 + i % 2)).collect();
        let mut catalog = self.store(open()?, "many", &many)?;
        for i in 0..5 {
            catalog = self.store(catalog, &format!("few-{i}"), &[i + 1, 0, 100 + i, 100 + i])?;
        }
        drop(catalog);
        let mut catalog = open()?;
        catalog = self.go_on(catalog, "next", "many", LEAF + 1)?;
        self.remove(&mut catalog, "many")?;
        catalog = self.go_on(catalog, "after-next", "next", 7)?;
        self.remove(&mut catalog, "few-3")?;
        self.remove(&mut catalog, "next")?;
        // Moved; then all but the newest compressed; then what is left of that compressed again.
        for compress in [None, Some(1)] {
            repack(&mut catalog, compress)?;
        }
        self.remove(&mut catalog, "few-1")?;
        self.remove(&mut catalog, "few-2")?;
        repack(&mut catalog, Some(0))?;
        drop(catalog);
        let catalog = self.store_two(open()?, [("left", &[241, 242, 3]), ("right", &[242, 243, 4])])?;
        drop(catalog);
        let catalog = self.store(open()?, "last", &[3, 30, 101, 200])?;
        drop(catalog);
        self.remove(&mut open()?, "few-0")
    }
}

fn repack(catalog: &mut Catalog, compress: Option<usize>) -> Result<Repacked, StoreError> {
    let mut all = Repacking::new(compress);
    loop {
        match all.turn(catalog, &mut |_, _| ControlFlow::Break(())) {
            Ok(true) => {}
            Ok(false) => return Ok(all.done),
            Err(RepackError::Store(e)) => return Err(e),
            Err(e) => panic!("{e}"),
        }
    }
}

fn open(memory: &Memory) -> Option<Pool> {
    Pool::open_on(Arc::new(memory.clone()), Path::new("/pool"), OpenOptions::default()).ok()
}

#[test]
fn killed_at_any_change_nothing_is_lost_and_nothing_stays() {
    let base = Memory::default();
    drop(Pool::create_on(Arc::new(base.clone()), Path::new("/pool"), "test").unwrap());
    kill_everywhere(&base);
}

#[test]
fn nor_with_a_staging_class_from_which_pages_move_to_capacity() {
    let base = Memory::default();
    let pool = Pool::create_on(Arc::new(base.clone()), Path::new("/pool"), "test").unwrap();
    pool.add_class(mpool::MediaClass::Staging, Path::new("/fast")).unwrap();
    drop(pool);
    kill_everywhere(&base);
}

fn kill_everywhere(base: &Memory) {
    let whole = base.copy();
    let pool = open(&whole).unwrap();
    Model::default().run(&pool).unwrap();
    drop(pool);
    let changes = whole.changes();
    println!("{changes} changes");
    for change in 0..changes {
        let memory = base.copy();
        memory.kill_before(change);
        let mut model = Model::default();
        if let Some(pool) = open(&memory) {
            let _ = model.run(&pool);
        }
        let memory = memory.copy();
        let pool = open(&memory).unwrap_or_else(|| panic!("killed before {change}: the pool opens"));
        let catalog = Catalog::open(&pool).unwrap();
        for (name, seeds) in &model.certain {
            assert!(load_from(&catalog, name) == pages_of(seeds), "killed before {change}: {name}");
        }
        let more = catalog.checkpoints().len() - model.certain.len();
        if let Some((name, seeds)) = model.perhaps.filter(|_| more == 1) {
            assert!(load_from(&catalog, &name) == pages_of(&seeds), "killed before {change}: {name}");
        } else {
            assert_eq!(more, 0, "killed before {change}");
        }
        assert_eq!(recorded(&catalog), counted(&catalog), "{change}");
        let catalog = try_store(catalog, "after", &[1, 101, 240]).unwrap().1;
        assert!(load_from(&catalog, "after") == pages_of(&[1, 101, 240]));
        let parts: usize = catalog.runs.iter().map(|run| run.parts.len()).sum();
        let needed = catalog.data.len() + catalog.maps().collect::<HashSet<u64>>().len() + parts;
        assert_eq!(pool.mblocks().len(), needed, "killed before {change}: nothing is left over");
        assert!(recorded(&catalog).iter().all(|needed| *needed > 0), "killed before {change}");
    }
}

/// Each change fails in turn, alone or with all behind it, and is made or not; then all can be
/// read, or nothing, or all but what was written last. What a command says is true: done, not done,
/// or not known. A third of the changes, or all with `CHECKPOINT_CHANGES=all`.
#[test]
fn what_is_said_of_a_failure_is_true() {
    let base = Memory::default();
    drop(Pool::create_on(Arc::new(base.clone()), Path::new("/pool"), "test").unwrap());
    let whole = base.copy();
    Model::default().run(&open(&whole).unwrap()).unwrap();
    let (mut said, mut unknown) = (0, 0);
    let step = if std::env::var_os("CHECKPOINT_CHANGES").is_some() { 1 } else { 3 };
    for change in (0..whole.changes()).step_by(step) {
        // Each takes as long as the others: two of them take turns.
        let then = [Then::ButTheLast, [Then::All, Then::None][change as usize % 2]];
        let fails = [(1, false), (1, true), (u64::MAX - change, false), (u64::MAX - change, true)];
        for (then, (behind, done)) in then.into_iter().flat_map(|then| fails.map(|fails| (then, fails))) {
            let (memory, mut model) = (base.copy(), Model::default());
            memory.fail(change..change + behind, done);
            memory.then(then);
            // The model gives up where a list cannot even be opened.
            let run = || open(&memory).map(|pool| model.run(&pool));
            let Ok(outcome) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) else { continue };
            match (&outcome, model.perhaps.take()) {
                (Some(Err(error)), Some(perhaps)) if error.is_unknown() => {
                    (model.perhaps, unknown) = (Some(perhaps), unknown + 1);
                }
                (Some(Err(_)), Some(kept)) if model.removing => model.certain.push(kept),
                _ => said += 1,
            }
            let what =
                format!("change {change} and {} more fail, made: {done}, reads: {then:?}: {outcome:?}", behind - 1);
            // The next program finds what is there.
            let pool = open(&memory.copy()).unwrap_or_else(|| panic!("{what}: the pool opens"));
            let catalog = Catalog::open(&pool).unwrap();
            for (name, seeds) in &model.certain {
                assert!(load_from(&catalog, name) == pages_of(seeds), "{what}: {name}");
            }
            let names: Vec<&str> = catalog.checkpoints().iter().map(|c| &*c.name).collect();
            let more = names.len() - model.certain.len();
            match &model.perhaps {
                Some((name, seeds)) if more == 1 => assert!(load_from(&catalog, name) == pages_of(seeds), "{what}"),
                _ => assert_eq!(more, 0, "{what}: {names:?}"),
            }
            try_store(catalog, "after", &[1, 101, 240]).unwrap();
        }
    }
    println!("{said} times known, {unknown} times not");
    assert!(unknown > 0);
}
