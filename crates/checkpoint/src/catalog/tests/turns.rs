//! A checkpoint that lets others have the pool while it is stored.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mpool::OpenOptions;
use parking_lot::{Condvar, Mutex};

use super::scale::{counted, recorded};
use super::*;
use crate::test::Memory;

const EARLY: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const HALF: [u64; 4] = [1, 2, 9, 10];
/// The first pages are those of a checkpoint that is removed meanwhile.
const SLOW: [u64; 9] = [3, 4, 20, 21, 5, 22, 23, 24, 9];

/// Somebody waits always, and does something.
struct Do<F>(F);

impl<F: Fn() -> Option<Pool>> Others for Do<F> {
    fn wait(&self, _: &Pool) -> bool {
        true
    }

    fn again(&self) -> Result<Pool, Box<dyn Error + Send + Sync>> {
        (self.0)().ok_or_else(|| "it does not open".into())
    }

    fn least(&self) -> Duration {
        Duration::ZERO
    }
}

fn open(memory: &Memory) -> Option<Pool> {
    Pool::open_on(Arc::new(memory.clone()), Path::new("/pool"), OpenOptions::default()).ok()
}

fn base() -> Memory {
    let base = Memory::default();
    let pool = Pool::create_on(Arc::new(base.clone()), Path::new("/pool"), "test").unwrap();
    for (name, seeds) in [("early", &EARLY[..]), ("half", &HALF)] {
        store(&pool, name, seeds);
    }
    base
}

/// What others do while they have the pool.
fn others(memory: &Memory, turn: usize) -> Result<(), StoreError> {
    let pool = open(memory).ok_or(StoreError::Unread)?;
    let mut catalog = Catalog::open(&pool).map_err(|_| StoreError::Unread)?;
    match turn {
        0 => drop(catalog.remove("early")),
        1 => drop(catalog.repack(None)),
        _ => drop(try_store(catalog, "other", &[20, 30, 31, 4])?),
    }
    Ok(())
}

/// Stores "slow" in turns. Gives whether it is certain to be there.
fn run(memory: &Memory) -> bool {
    let Some(pool) = open(memory) else { return false };
    let Ok(catalog) = Catalog::open(&pool) else { return false };
    drop(pool);
    let store = Store::new(catalog);
    let Ok(mut writer) = store.begin("slow") else { return false };
    writer.set_pages(SLOW.len());
    for (turn, (seeds, first)) in SLOW.chunks(3).zip((0..).step_by(3)).enumerate() {
        if put(&mut writer, first, &pages_of(seeds).concat()).is_err() {
            return false;
        }
        let others = Do(|| {
            let _ = others(memory, turn);
            open(memory)
        });
        if writer.give_way(&others).is_err() {
            return false;
        }
    }
    writer.commit("test".into(), vec![(0, (SLOW.len() * BLOCK) as u64)]).is_ok()
}

/// Nothing is there that no checkpoint needs.
fn is_swept(catalog: &Catalog) -> bool {
    let parts: usize = catalog.runs.iter().map(|run| run.parts.len()).sum();
    let maps: std::collections::HashSet<u64> = catalog.maps().collect();
    recorded(catalog) == counted(catalog)
        && recorded(catalog).iter().all(|needed| *needed > 0)
        && catalog.pool.mblocks().len() == catalog.data.len() + maps.len() + parts
}

#[test]
fn others_remove_repack_and_store_while_a_checkpoint_is_stored() {
    let memory = base();
    assert!(run(&memory));
    let pool = open(&memory).unwrap();
    let catalog = Catalog::open(&pool).unwrap();
    let names: Vec<&str> = catalog.checkpoints().iter().map(|c| &*c.name).collect();
    assert_eq!(names, ["half", "other", "slow"]);
    for (name, seeds) in [("half", &HALF[..]), ("other", &[20, 30, 31, 4]), ("slow", &SLOW)] {
        assert!(load_from(&catalog, name) == pages_of(seeds), "{name}");
    }
    assert!(is_swept(&catalog) && !pool.is_kept());
    assert!(catalog.find("slow").unwrap().new_pages <= 6, "pages that it shares are not stored again");
}

#[test]
fn killed_at_any_change_between_turns_nothing_is_lost_and_nothing_stays() {
    let base = base();
    let whole = base.copy();
    assert!(run(&whole));
    println!("{} changes", whole.changes());
    for change in 0..whole.changes() {
        let memory = base.copy();
        memory.kill_before(change);
        let certain = run(&memory);
        let memory = memory.copy();
        let pool = open(&memory).unwrap_or_else(|| panic!("killed before {change}: the pool opens"));
        let catalog = Catalog::open(&pool).unwrap();
        assert!(!certain || catalog.find("slow").is_ok(), "killed before {change}");
        assert!(load_from(&catalog, "half") == pages_of(&HALF), "killed before {change}");
        for (name, seeds) in [("early", &EARLY[..]), ("other", &[20, 30, 31, 4]), ("slow", &SLOW)] {
            if catalog.find(name).is_ok() {
                assert!(load_from(&catalog, name) == pages_of(seeds), "killed before {change}: {name}");
            }
        }
        let catalog = try_store(catalog, "after", &[1, 101, 240]).unwrap().1;
        assert!(is_swept(&catalog), "killed before {change}: nothing is left over");
    }
}

/// Gives way once while "slow" is stored, which fails. Gives the error; nothing is used of what was
/// opened again.
fn fails(base: Pool, meanwhile: impl Fn() -> Option<Pool>) -> StoreError {
    let store = Store::new(Catalog::open(&base).unwrap());
    drop(base);
    let mut writer = store.begin("slow").unwrap();
    writer.set_pages(3);
    put(&mut writer, 0, &pages_of(&[40, 41, 42]).concat()).unwrap();
    let error = writer.give_way(&Do(meanwhile)).unwrap_err();
    assert!(writer.warnings().is_empty() && store.state.lock().catalog.if_here().is_none(), "{error}");
    error
}

#[test]
fn what_others_did_meanwhile_is_an_error_that_leaves_nothing() {
    // Others take the name; the pool does not open again; a program that knows no turns removes.
    type Meanwhile = fn(&Memory) -> Option<Pool>;
    let taken: Meanwhile = |memory| {
        store(&open(memory)?, "slow", &[50]);
        open(memory)
    };
    let removed: Meanwhile = |memory| {
        let pool = open(memory)?;
        let ids: Vec<u64> = Catalog::open(&pool).unwrap().data.keys().copied().collect();
        pool.mblock_delete(&ids[ids.len() - 1..]).unwrap();
        Some(pool)
    };
    let cases: [(Meanwhile, &str); 3] =
        [(taken, "others have stored"), (|_| None, "cannot open the pool again"), (removed, "were removed meanwhile")];
    for (meanwhile, says) in cases {
        let memory = base();
        let error = fails(open(&memory).unwrap(), || meanwhile(&memory));
        assert!(error.to_string().contains(says), "{error}");
        let pool = open(&memory).unwrap();
        let catalog = try_store(Catalog::open(&pool).unwrap(), "after", &[7]).unwrap().1;
        assert!(!pool.is_kept() && is_swept(&catalog), "{says}");
    }
}

#[test]
fn what_a_pool_has_lost_before_is_no_sign_of_others() {
    let memory = base();
    let pool = open(&memory).unwrap();
    let id = *Catalog::open(&pool).unwrap().data.keys().next().unwrap();
    pool.mblock_delete(&[id]).unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    drop(pool);
    let mut writer = store.begin("slow").unwrap();
    writer.set_pages(3);
    put(&mut writer, 0, &pages_of(&[40, 41, 42]).concat()).unwrap();
    writer.give_way(&Do(|| open(&memory))).unwrap();
    writer.commit("test".into(), vec![(0, 3 * BLOCK as u64)]).unwrap();
}

#[test]
fn what_others_have_removed_is_swept_when_all_else_is_done() {
    let memory = base();
    let store = Store::new(Catalog::open(&open(&memory).unwrap()).unwrap());
    let mut writer = store.begin("slow").unwrap();
    writer.set_pages(3);
    put(&mut writer, 0, &pages_of(&[40, 41, 42]).concat()).unwrap();
    let meanwhile = || {
        Catalog::open(&open(&memory).unwrap()).unwrap().remove("early").unwrap();
        open(&memory)
    };
    writer.give_way(&Do(meanwhile)).unwrap();
    let there = || store.view().pool().mblocks().len();
    writer.commit("test".into(), vec![(0, 3 * BLOCK as u64)]).unwrap();
    let committed = there();
    drop(store);
    let pool = open(&memory).unwrap();
    assert!(is_swept(&Catalog::open(&pool).unwrap()));
    assert!(pool.mblocks().len() < committed, "whoever stores has something to do first");
}

#[test]
fn nothing_is_written_to_another_pool_in_the_place_of_the_one_that_was_closed() {
    let (memory, other) = (base(), Memory::default());
    drop(Pool::create_on(Arc::new(other.clone()), Path::new("/pool"), "other").unwrap());
    let usage = |pool: &Pool| pool.mdc_open(ROOT_MDC).unwrap().usage();
    let before = usage(&open(&other).unwrap());
    let error = crate::chain(&fails(open(&memory).unwrap(), || open(&other)));
    assert_eq!(error, "cannot open the pool again, which others had meanwhile: another pool has its place");
    assert_eq!(usage(&open(&other).unwrap()), before);
}

#[test]
fn a_list_that_is_damaged_meanwhile_takes_nothing_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let open = || Pool::open(&path, OpenOptions::default()).unwrap();
    let pool = Pool::create(&path, "test").unwrap();
    for (name, seeds) in [("early", &EARLY[..]), ("half", &HALF)] {
        store(&pool, name, seeds);
    }
    let committed: Vec<u64> = pool.mblocks().iter().map(|m| m.id).collect();
    let all_there = |pool: &Pool| committed.iter().all(|id| pool.mblock(*id).is_ok());
    let error = fails(pool, || {
        // In the record of "early", so that nothing is known to need its pages.
        for name in ["mdc-0000000000000001-0", "mdc-0000000000000001-0.copy"] {
            let mut bytes = std::fs::read(path.join(name)).unwrap();
            let at = bytes.windows(5).position(|five| five == b"early").unwrap();
            bytes[at] ^= 1;
            std::fs::write(path.join(name), bytes).unwrap();
        }
        Some(open())
    });
    assert!(matches!(error, StoreError::Damaged(_)), "{error}");
    let pool = open();
    assert!(all_there(&pool));
    let mut catalog = Catalog::open(&pool).unwrap();
    assert!(catalog.find("early").is_err(), "its record is lost");
    assert!(matches!(catalog.sweep(), Err(StoreError::Damaged(_))) && all_there(&pool));
}

#[test]
fn a_pool_that_cannot_be_kept_stays_open_and_one_that_is_kept_no_more_is_not_used() {
    let memory = base();
    let store = Store::new(Catalog::open(&open(&memory).unwrap()).unwrap());
    let never = Do(|| panic!("it is open"));
    let mut writer = store.begin("slow").unwrap().in_turns(&never);
    writer.set_pages(2);
    memory.fail(memory.changes()..memory.changes() + 1, false);
    put(&mut writer, 0, &pages_of(&[40, 41]).concat()).unwrap();
    writer.commit("test".into(), vec![(0, 2 * BLOCK as u64)]).unwrap();
    assert!(load_from(&store.view(), "slow") == pages_of(&[40, 41]));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let error = fails(Pool::create(&path, "test").unwrap(), || {
        let pool = Pool::open(&path, OpenOptions::default()).unwrap();
        pool.keeping().unwrap().iter().for_each(|file| std::fs::remove_file(file).unwrap());
        Some(pool)
    });
    assert!(matches!(error, StoreError::Removed), "{error}");
}

#[test]
fn the_next_turn_reckons_with_the_index_of_this_one() {
    let memory = base();
    let store = Store::new(Catalog::open(&open(&memory).unwrap()).unwrap());
    let mut writer = store.begin("slow").unwrap();
    assert!(writer.give_way(&Do(|| open(&memory))).unwrap().is_some());
    assert!(store.state.lock().catalog.index.is_some(), "its time is part of what giving way takes");
}

/// Which of two programs runs. The other one waits, or has ended.
#[derive(Default)]
struct Baton {
    /// The one that runs, and whether each has ended.
    state: Mutex<(usize, [bool; 2])>,
    passed: Condvar,
}

impl Baton {
    fn wait(&self, one: usize) {
        let mut state = self.state.lock();
        self.passed.wait_while(&mut state, |(runs, ended)| *runs != one && !ended[1 - one]);
        state.0 = one;
    }

    fn pass(&self, one: usize) {
        self.state.lock().0 = 1 - one;
        self.passed.notify_all();
    }
}

/// Stores pages in turns; the other program has each turn between. Gives whether it is certain that
/// they are stored.
fn store_beside(memory: &Memory, baton: &Baton, one: usize, seeds: &[u64]) -> bool {
    let store = || {
        let store = Store::new(Catalog::open(&open(memory)?).ok()?);
        let others = Do(|| {
            baton.pass(one);
            baton.wait(one);
            open(memory)
        });
        let mut writer = store.begin(["left", "right"][one]).ok()?;
        writer.set_pages(seeds.len());
        for (seeds, first) in seeds.chunks(2).zip((0..).step_by(2)) {
            put(&mut writer, first, &pages_of(seeds).concat()).ok()?;
            writer.give_way(&others).ok()??;
        }
        writer.commit("test".into(), vec![(0, (seeds.len() * BLOCK) as u64)]).ok()
    };
    baton.wait(one);
    let stored = store().is_some();
    baton.state.lock().1[one] = true;
    baton.pass(one);
    stored
}

#[test]
fn of_two_beside_each_other_one_is_killed_at_any_change_and_the_other_loses_nothing() {
    // Both have pages that the other one finds in the pool, and those of a third.
    let seeds: [&[u64]; 2] = [&[3, 60, 61, 62], &[61, 5, 60, 63]];
    let base = base();
    for killed in 0..2 {
        for change in 0.. {
            let memory = base.copy();
            let programs = [memory.clone(), memory.of_another()];
            programs[killed].kill_before(change);
            let baton = Baton::default();
            let run = |one: usize| store_beside(&programs[one], &baton, one, seeds[one]);
            let stored = std::thread::scope(|scope| {
                let right = scope.spawn(|| run(1));
                [run(0), right.join().unwrap()]
            });
            let pool = open(&memory.of_another()).unwrap();
            let catalog = Catalog::open(&pool).unwrap();
            let of = format!("program {killed} killed before {change}");
            assert!(stored[1 - killed] && !pool.is_kept(), "{of}");
            for (one, name) in ["left", "right"].into_iter().enumerate() {
                assert!(!stored[one] || catalog.find(name).is_ok(), "{of}: {name}");
                assert!(
                    catalog.find(name).is_err() || load_from(&catalog, name) == pages_of(seeds[one]),
                    "{of}: {name}"
                );
            }
            assert!(load_from(&catalog, "early") == pages_of(&EARLY) && load_from(&catalog, "half") == pages_of(&HALF));
            assert!(is_swept(&try_store(catalog, "after", &[1, 101, 240]).unwrap().1), "{of}: nothing is left over");
            if !programs[killed].is_killed() {
                println!("{change} changes");
                break;
            }
        }
    }
}

#[test]
fn another_turn_of_two_checkpoints_keeps_what_both_need() {
    let memory = base();
    let begin = || Store::new(Catalog::open(&open(&memory).unwrap()).unwrap());
    let one = begin();
    let mut first = one.begin("first").unwrap();
    first.set_pages(4);
    put(&mut first, 0, &pages_of(&[60, 61]).concat()).unwrap();
    let meanwhile = || {
        // It finds pages there of the one that is given up before it ends itself.
        let two = begin();
        let mut second = two.begin("second").unwrap();
        second.set_pages(3);
        put(&mut second, 0, &pages_of(&[61, 62, 60]).concat()).unwrap();
        second.commit("test".into(), vec![(0, 3 * BLOCK as u64)]).unwrap();
        drop(two);
        Catalog::open(&open(&memory).unwrap()).unwrap().remove("early").unwrap();
        open(&memory)
    };
    first.give_way(&Do(meanwhile)).unwrap();
    drop(first);
    let catalog = Catalog::open(&open(&memory).unwrap()).unwrap();
    assert!(load_from(&catalog, "second") == pages_of(&[61, 62, 60]));
}
