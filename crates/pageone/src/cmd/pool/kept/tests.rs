use std::fs::File;
use std::path::Path;

use checkpoint::Store;
use clap::Parser;
use mpool::Sign;
use parking_lot::Mutex;

use super::*;
use crate::cmd::pool::Storing;
use crate::cmd::pool::names::RETRY;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    names: Names,
    #[command(flatten)]
    answer: Tabular,
}

/// Stores pages; gives how many of them the pool did not have.
fn store(pool: &Pool, name: &str, fills: &[u64]) -> u64 {
    let store = Store::new(Catalog::open(pool).unwrap());
    let mut writer = store.begin(name).unwrap();
    writer.set_pages(fills.len());
    let page = |at: u64| fills[at as usize].to_le_bytes().repeat(BLOCK / 8);
    for at in 0..fills.len() as u64 {
        let hash = checkpoint::hash(&page(at), writer.seed());
        writer.put(&[at], &page(at), &[hash]).unwrap();
    }
    writer.put_off().iter().for_each(|off| writer.put_again(&[*off], &page(off.page)).unwrap());
    writer.commit("test".into(), vec![(0, (fills.len() * BLOCK) as u64)]).unwrap().new_pages
}

/// A pool with five data mblocks of 19 pages of which two are left.
fn sparse(path: &Path) -> Pool {
    let pool = Pool::create(path, "store").unwrap();
    for i in 1..6 {
        store(&pool, &format!("all-{i}"), &(1..20).map(|page| i * 100 + page).collect::<Vec<_>>());
        assert_eq!(store(&pool, &format!("few-{i}"), &[i * 100 + 3, i * 100 + 9]), 0);
        Catalog::open(&pool).unwrap().remove(&format!("all-{i}")).unwrap();
    }
    assert!(!pool.is_awaited());
    pool
}

fn open(path: &Path) -> Pool {
    Pool::open(path, mpool::OpenOptions::default()).unwrap()
}

/// Waits for it. A child that another test starts has what this process has open, too, until it
/// becomes another program.
fn eventually(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Pages that repacking would free.
fn left(pool: &Pool) -> u64 {
    Catalog::open(pool).unwrap().usage().repack
}

/// A pool that is repacked in turns as short as can be.
struct Repacks {
    names: Names,
    name: String,
    signal: AtomicUsize,
    told: Mutex<Vec<String>>,
    /// Say that somebody waits for it.
    waits: Mutex<Vec<File>>,
    taken: AtomicBool,
    /// Who kept what was to be freed, in the end.
    keepers: Mutex<Vec<Keeper>>,
}

impl Repacks {
    fn new(name: &Path) -> Self {
        let names = Line::parse_from(["test"]).names;
        let (signal, told, waits, taken, keepers) = Default::default();
        Self { names, name: name.to_str().unwrap().into(), signal, told, waits, taken, keepers }
    }

    /// Somebody else waits for the pool.
    fn wait(&self) {
        self.waits.lock().push(Sign::Waits.give(&self.names.find(&self.name).unwrap().path).unwrap());
    }

    /// The same, until somebody has taken it.
    fn wait_for_taker(&self) {
        if !self.taken.load(Ordering::Relaxed) {
            self.wait();
        }
    }

    /// Takes the pool when it is closed.
    fn take(&self) -> Pool {
        let path = self.names.find(&self.name).unwrap().path;
        loop {
            match Pool::open(&path, mpool::OpenOptions::default()) {
                Err(mpool::PoolError::Busy(_)) => std::thread::sleep(Duration::from_millis(2)),
                opened => {
                    self.taken.store(true, Ordering::Relaxed);
                    return opened.unwrap();
                }
            }
        }
    }

    /// Repacks. Calls `plans` in each turn, with what recording the last one took, and `beside`
    /// beside them; what that gives is kept to the end. Gives what was done, and how it ended.
    fn run<T>(&self, plans: impl Fn(Duration) + Sync, beside: impl FnOnce() -> T) -> (Repacked, Result<()>) {
        let (turns, pool) = Turns::begin(self.names.find(&self.name).unwrap()).unwrap();
        let mut all = Repacking::new(None);
        let ended = std::thread::scope(|scope| {
            let repacking = scope.spawn(|| {
                let least = |_, recording| {
                    plans(recording);
                    Duration::ZERO
                };
                let (progress, tell) =
                    (Progress::new(output::Shown::Never), |used: &str| self.told.lock().push(used.into()));
                let how = How { progress: &progress, least: &least, tell: &tell, signal: &self.signal };
                how.run(turns, pool, &mut all, &mut self.keepers.lock())
            });
            let _kept = beside();
            repacking.join().unwrap()
        });
        (all.done, ended)
    }
}

#[test]
fn who_waits_gets_the_pool_while_it_is_repacked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(sparse(&path));
    let recorded = Mutex::new(Vec::new());
    let repacks = Repacks::new(&path);
    let plans = |recording| {
        recorded.lock().push(recording);
        repacks.wait_for_taker();
    };
    let half_way = || assert!((1..5 * 17).contains(&left(&repacks.take())), "nobody had it half-way");
    let (done, ended) = repacks.run(plans, half_way);
    drop(repacks);
    ended.unwrap();
    assert_eq!((done.mblocks, done.moved, done.left), (5, 10, 0));
    // What recording takes makes the next turn longer, too.
    assert!(recorded.lock()[0].is_zero() && recorded.lock()[1] > Duration::ZERO);
    let pool = open(&path);
    eventually(|| !pool.is_awaited());
    assert!(Catalog::open(&pool).unwrap().check(Wrong::Report).unwrap().is_empty());
}

#[test]
fn who_does_not_take_the_pool_is_passed_over_until_somebody_else_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(sparse(&path));
    let (turns, repacks) = (AtomicUsize::new(0), Repacks::new(&path));
    repacks.wait();
    let (done, ended) = repacks.run(|_| turns.store(turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed), || ());
    ended.unwrap();
    // A child that another test starts has the file, too, until it becomes another program: so
    // one more may wait.
    let once = |turns: AtomicUsize, least| (least..=least + 1).contains(&turns.into_inner());
    assert!(done.mblocks == 5 && once(turns, 2), "it was offered once");
    let path = dir.path().join("other");
    drop(sparse(&path));
    let (turns, repacks) = (AtomicUsize::new(0), Repacks::new(&path));
    repacks.wait();
    let plans = |_| {
        if turns.fetch_add(1, Ordering::Relaxed) == 1 {
            repacks.wait();
        }
    };
    repacks.run(plans, || ()).1.unwrap();
    assert!(once(turns, 3), "it was offered to both");
}

#[test]
fn what_gets_the_name_or_the_place_of_a_pool_meanwhile_is_not_repacked() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other, names) = (dir.path().join("pool"), dir.path().join("other"), dir.path().join("names"));
    drop((sparse(&path), sparse(&other)));
    std::fs::create_dir(&names).unwrap();
    let name = |of: &Path| {
        std::os::unix::fs::symlink(of, names.join("new")).unwrap();
        std::fs::rename(names.join("new"), names.join("store")).unwrap();
    };
    name(&path);
    let mut repacks = Repacks::new(Path::new("store"));
    repacks.names = Line::parse_from(["test", "--pools", names.to_str().unwrap()]).names;
    let renames = || {
        let _pool = repacks.take();
        name(&other);
    };
    let (done, ended) = repacks.run(|_| repacks.wait_for_taker(), renames);
    ended.unwrap();
    assert_eq!((done.mblocks, left(&open(&path)), left(&open(&other))), (5, 0, 5 * 17));
    // Now the other one has the name, and a third gets its place.
    let third = dir.path().join("third");
    drop(sparse(&third));
    repacks.taken.store(false, Ordering::Relaxed);
    let exchanges = || {
        let _pool = repacks.take();
        let (from, to, how) = (&other, &third, rustix::fs::RenameFlags::EXCHANGE);
        rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, how).unwrap();
    };
    let (done, ended) = repacks.run(|_| repacks.wait_for_taker(), exchanges);
    let said = ended.as_ref().unwrap_err().to_string();
    assert!(said.contains("is another pool now") && said.contains("store was removed meanwhile"), "{said}");
    assert_eq!(left(&open(&other)), 5 * 17, "nothing is done to it");
    // What was done before is reported, with the error.
    assert!(done.mblocks > 0 && done.mblocks < 5);
    let (value, text) = report(done, None, &[], &ended);
    assert_eq!((&value["error"], &value["mblocks"]), (&said.into(), &done.mblocks.into()));
    assert!(text.ends_with(&format!("{} removed", counted(done.mblocks as usize, "data mblock"))), "{text}");
}

#[test]
fn a_signal_ends_repacking_in_a_turn_and_between_two() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(sparse(&path));
    let repacks = Repacks::new(&path);
    let (done, ended) = repacks.run(|_| repacks.signal.store(15, Ordering::Relaxed), || ());
    assert_eq!((done.mblocks, done.moved, &*ended.unwrap_err().to_string()), (1, 2, "interrupted"));
    repacks.signal.store(0, Ordering::Relaxed);
    let keeps = || {
        let pool = repacks.take();
        while repacks.told.lock().is_empty() {
            std::thread::sleep(RETRY);
        }
        repacks.signal.store(2, Ordering::Relaxed);
        // It ends while this has the pool.
        pool
    };
    let (done, ended) = repacks.run(|_| repacks.wait_for_taker(), keeps);
    assert!(ended.unwrap_err().to_string() == "interrupted" && done.mblocks > 0);
    let told = repacks.told.into_inner();
    assert!(told.len() == 1 && told[0].contains(&format!("is used by process {} (", std::process::id())), "{told:?}");
}

#[test]
fn other_commands_go_through_while_a_checkpoint_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "store").unwrap();
    for i in 1..4 {
        store(&pool, &format!("all-{i}"), &(1..20).map(|page| i * 100 + page).collect::<Vec<_>>());
        store(&pool, &format!("few-{i}"), &[i * 100 + 3]);
    }
    drop(pool);
    let (name, Line { names, answer }) = (path.to_str().unwrap(), Line::parse_from(["test"]));
    let (turns, pool) = Turns::begin(names.find(name).unwrap()).unwrap();
    let (slow, turns) = (Store::new(Catalog::open(&pool).unwrap()), Storing::new(turns, Quiet { quiet: true }));
    drop(pool);
    let mut writer = slow.begin("slow").unwrap().in_turns(&turns);
    writer.set_pages(1 << 16);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            du(&names.open_soon(name, Access::Shared).unwrap(), answer).unwrap();
            remove(&names.open_soon(name, Access::Exclusive).unwrap(), "all-1", Json { json: false }).unwrap();
            Repacks::new(&path).run(|_| (), || ()).1.unwrap();
            store(&names.open_soon(name, Access::Exclusive).unwrap(), "other", &[7, 102, 103]);
        });
        // It ends when they have: each waits for less than the store goes on.
        let mut put = 0;
        while put < 100 || !others.is_finished() {
            let at = put % (1 << 16);
            let page = (100_u64 + at % 1000).to_le_bytes().repeat(BLOCK / 8);
            writer.put(&[at], &page, &[checkpoint::hash(&page, writer.seed())]).unwrap();
            let off = writer.put_off();
            off.iter().for_each(|off| writer.put_again(&[*off], &page).unwrap());
            put += 1;
            std::thread::sleep(Duration::from_micros(100));
        }
        others.join().unwrap();
    });
    writer.commit("test".into(), vec![(0, (1 << 16) * BLOCK as u64)]).unwrap();
    let mut catalog = slow.into_catalog();
    assert!(catalog.check(Wrong::Report).unwrap().is_empty() && catalog.find("all-1").is_err());
    let slow = catalog.find("slow").unwrap().clone();
    let (image, mut page) = (catalog.image(&slow).unwrap(), vec![0; BLOCK]);
    for at in 0..100 {
        image.read(at, &mut page).unwrap();
        assert!(page == (100_u64 + at).to_le_bytes().repeat(BLOCK / 8), "{at}");
    }
}

#[test]
fn who_keeps_what_would_be_freed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = sparse(&path);
    let (kept, own) = (pool.keep().unwrap(), std::process::id());
    store(&pool, "all", &[7000, 7001]);
    let blocks = pool.mblocks().len();
    remove(&pool, "all", Json { json: false }).unwrap();
    assert_eq!(pool.mblocks().len(), blocks, "all are kept");
    let (value, text) = removed("all", &keepers(&pool));
    let (text, who) = (text.unwrap(), format!("no space is freed before that ends: process {own} ("));
    assert!(text.starts_with(&who) && text.contains("the next checkpoint or `pageone pool repack` frees it"), "{text}");
    assert_eq!((&value["removed"], &value["kept_by"][0]["pid"]), (&"all".into(), &own.into()));
    drop(pool);
    let repacks = Repacks::new(&path);
    let (done, ended) = repacks.run(|_| (), || ());
    assert_eq!((done.mblocks, done.freed, done.moved), (0, 0, 0), "it takes no space meanwhile");
    let (value, text) = report(done, None, &repacks.keepers.lock(), &ended);
    assert!(value["kept_by"][0]["command"].as_str().is_some_and(|name| name.starts_with("process ")), "{value}");
    assert!(text.contains(&who), "{text}");
    drop(kept);
    eventually(|| keepers(&open(&path)).is_empty());
    let (done, ended) = repacks.run(|_| (), || ());
    let (value, text) = report(done, None, &repacks.keepers.lock(), &ended);
    assert!(value["kept_by"].as_array().is_some_and(Vec::is_empty) && !text.contains("process"), "{value} {text}");
    let pool = open(&path);
    assert_eq!((left(&pool), removed("all", &keepers(&pool)).1), (0, None));
}
