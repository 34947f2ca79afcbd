//! `kill -9` at random points of a workload of all operations; then everything that was promised is
//! there, and no more.
//!
//! The test starts itself as a child that works on a pool and writes down what was promised to it,
//! before (`want`) and after (`done`) each operation, in a file beside the pool. 20 rounds;
//! `MPOOL_KILLS` says how many else.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{IoSlice, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mpool::{Allocation, MblockWriter, Mcache, Mdc, MediaClass, OpenOptions, Pool, ROOT_MDC, Settings, Temperature};

const CHILD: &str = "MPOOL_KILL_CHILD";

fn content(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (seed.wrapping_mul(0x9E37_79B9) ^ i.wrapping_mul(seed | 1) >> 7) as u8).collect()
}

fn length(seed: u64) -> usize {
    (seed.wrapping_mul(7919) % 300_000) as usize
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

fn commit_some(pool: &Pool, random: &mut Random, live: &mut Vec<u64>, say: &mut impl FnMut(String)) {
    let class = if random.below(2) == 0 { MediaClass::Capacity } else { MediaClass::Staging };
    let mut writers = Vec::new();
    for _ in 0..=random.below(2) {
        let capacity = 400 << 10;
        let mut writer = pool.mblock_alloc(Allocation { class, capacity, ..Allocation::default() }).unwrap();
        let bytes = content(writer.id(), length(writer.id()));
        let cut = bytes.len() / 3;
        writer.write(&[IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])]).unwrap();
        say(format!("want commit {}", writer.id()));
        writers.push(writer);
    }
    if random.below(4) > 0 {
        for id in MblockWriter::commit_all(writers).unwrap() {
            say(format!("done commit {id}"));
            live.push(id);
        }
    }
}

fn compact(mdc: &mut Mdc, number: u64, say: &mut impl FnMut(String)) {
    // What is kept: one number that all records of the MDC are above of.
    if mdc.usage() > 4096 {
        say(format!("want compact {number}"));
        mdc.start_compaction().unwrap();
        mdc.append(&[&number.to_le_bytes()], false).unwrap();
        mdc.end_compaction().unwrap();
        say(format!("done compact {number}"));
    }
}

/// Works until it is killed.
fn child(dir: &Path, seed: u64) {
    let pool = Pool::open(&dir.join("pool"), OpenOptions::default()).unwrap();
    let mut journal = File::options().append(true).open(dir.join("journal")).unwrap();
    let mut say = |line: String| journal.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut random = Random(seed);
    let cache = Mcache::new(Settings::default()).ok();
    let mut live: Vec<u64> = pool.mblocks().iter().map(|m| m.id).collect();
    let log = pool.mlogs()[0].id;
    let mut mlog = pool.mlog_open(log).unwrap();
    let mut mdc = pool.mdc_open(ROOT_MDC).unwrap();
    let mut number = seed << 20;
    say("ready".into());
    loop {
        number += 1;
        if live.len() > 100 {
            let gone = live.split_off(40);
            gone.iter().for_each(|id| say(format!("want delete {id}")));
            pool.mblock_delete(&gone).unwrap();
            gone.iter().for_each(|id| say(format!("done delete {id}")));
        }
        match random.below(12) {
            0..4 => commit_some(&pool, &mut random, &mut live, &mut say),
            4..6 if live.len() > 6 => {
                let id = live.swap_remove(random.below(live.len() as u64) as usize);
                say(format!("want delete {id}"));
                pool.mblock_delete(&[id]).unwrap();
                say(format!("done delete {id}"));
            }
            6 if live.len() > 2 => {
                if let Some(cache) = &cache {
                    let map = cache.map(&pool, &live[..2], Temperature::Cold).unwrap();
                    let len = length(live[1]).min(5000);
                    assert_eq!(map.get(1, 0, len).unwrap(), &content(live[1], len)[..]);
                }
            }
            7 => {
                if mlog.len() > 1 << 20 {
                    say("want erase".into());
                    mlog.erase(0).unwrap();
                    say("done erase".into());
                }
            }
            8 => compact(&mut mdc, number, &mut say),
            9 => {
                say(format!("want mdc {number}"));
                mdc.append(&[&number.to_le_bytes()], true).unwrap();
                say(format!("done mdc {number}"));
            }
            _ => {
                say(format!("want log {number}"));
                let mut record = number.to_le_bytes().to_vec();
                record.extend(content(number, random.below(3000) as usize));
                mlog.append(&record, random.below(2) == 0).unwrap();
                say(format!("done log {number}"));
            }
        }
    }
}

/// What the journal promises.
#[derive(Default)]
struct Promise {
    /// Surely there (true) or perhaps (false).
    mblocks: BTreeMap<u64, bool>,
    /// Records of the log, surely there or perhaps, in order.
    log: Vec<(u64, bool)>,
    log_may_be_empty: bool,
    mdc: Vec<(u64, bool)>,
    mdc_may_be: Option<u64>,
}

fn read_journal(text: &str) -> Promise {
    let mut promise = Promise::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number: u64 = words.get(2).map_or(0, |w| w.parse().unwrap());
        match words[..] {
            ["want", "commit", _] => drop(promise.mblocks.insert(number, false)),
            ["done", "commit", _] => drop(promise.mblocks.insert(number, true)),
            ["want", "delete", _] => drop(promise.mblocks.insert(number, false)),
            ["done", "delete", _] => drop(promise.mblocks.remove(&number)),
            ["want", "log", _] => promise.log.push((number, false)),
            // A killed process loses nothing that it had written.
            ["done", "log", _] => promise.log.last_mut().unwrap().1 = true,
            ["want", "erase"] => promise.log_may_be_empty = true,
            ["done", "erase"] => (promise.log, promise.log_may_be_empty) = (Vec::new(), false),
            ["want", "mdc", _] => promise.mdc.push((number, false)),
            ["done", "mdc", _] => promise.mdc.last_mut().unwrap().1 = true,
            ["want", "compact", _] => promise.mdc_may_be = Some(number),
            ["done", "compact", _] => (promise.mdc, promise.mdc_may_be) = (vec![(number, true)], None),
            _ => assert_eq!(line, "ready"),
        }
    }
    promise
}

fn check_records(what: &str, found: &[u64], promised: &[(u64, bool)]) {
    let all: Vec<u64> = promised.iter().map(|(number, _)| *number).collect();
    let sure = promised.iter().filter(|(_, sure)| *sure).count();
    assert!(found.len() >= sure && found == &all[..found.len()], "{what}: {} of {sure} records", found.len());
}

/// Compares the pool with what was promised; the new journal says what is there.
fn check(dir: &Path) -> String {
    let promise = read_journal(&std::fs::read_to_string(dir.join("journal")).unwrap());
    let pool = Pool::open(&dir.join("pool"), OpenOptions::default()).unwrap();
    let report = pool.check(mpool::Depth::Data).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let there: BTreeSet<u64> = pool.mblocks().iter().map(|m| m.id).collect();
    for (id, sure) in &promise.mblocks {
        assert!(!sure || there.contains(id), "mblock {id} is gone");
    }
    let mut journal = String::new();
    for &id in &there {
        assert!(promise.mblocks.contains_key(&id), "mblock {id} was never committed, or was deleted");
        let mut bytes = vec![0; length(id)];
        pool.mblock(id).unwrap().read(0, &mut bytes).unwrap();
        assert!(bytes == content(id, length(id)), "mblock {id}");
        journal += &format!("done commit {id}\n");
    }
    for usage in pool.usage().unwrap().classes {
        let stored: u64 = pool.mblocks().iter().filter(|m| m.class == usage.class).map(|m| m.stored).sum();
        // The file system counts its own tree of extents too: a block for every 340 of them at
        // best, half of that when its blocks were split.
        let own = (64 << 10) + usage.mblocks / 100 * 4096;
        assert!(usage.used_bytes <= stored + own, "space was lost: {usage:?}, {stored} needed");
    }
    let number = |record: Vec<u8>| u64::from_le_bytes(*record.first_chunk().unwrap());
    let mut mlog = pool.mlog_open(pool.mlogs()[0].id).unwrap();
    let found: Vec<u64> = std::iter::from_fn(|| mlog.read().unwrap()).map(number).collect();
    if !(promise.log_may_be_empty && found.is_empty()) {
        check_records("mlog", &found, &promise.log);
    }
    journal.extend(found.iter().map(|n| format!("want log {n}\ndone log {n}\n")));
    let mut mdc = pool.mdc_open(ROOT_MDC).unwrap();
    let found: Vec<u64> = std::iter::from_fn(|| mdc.read().unwrap()).map(number).collect();
    if promise.mdc_may_be.is_none_or(|number| found != [number]) {
        check_records("mdc", &found, &promise.mdc);
    }
    journal.extend(found.iter().map(|n| format!("want mdc {n}\ndone mdc {n}\n")));
    journal
}

#[test]
fn killed_at_any_moment() {
    if let Ok(job) = std::env::var(CHILD) {
        let (seed, dir) = job.split_once(' ').unwrap();
        return child(Path::new(dir), seed.parse().unwrap());
    }
    let rounds: u64 = std::env::var("MPOOL_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "kill").unwrap();
    pool.add_class(MediaClass::Staging, &dir.path().join("staging")).unwrap();
    pool.mlog_create(MediaClass::Capacity, 1 << 30).unwrap();
    drop(pool);
    std::fs::write(dir.path().join("journal"), "").unwrap();
    let mut random = Random(std::process::id().into());
    // Signed: a kill between an operation and its note leaves more done than noted.
    let mut operations = 0i64;
    for round in 1..=rounds {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "killed_at_any_moment", "--nocapture"]).stdout(Stdio::null());
        command.env(CHILD, format!("{} {}", round + random.below(1 << 20), dir.path().display()));
        let mut child = command.spawn().unwrap();
        while !std::fs::read_to_string(dir.path().join("journal")).unwrap().contains("ready") {
            std::thread::sleep(Duration::from_millis(5));
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        }
        std::thread::sleep(Duration::from_micros(random.below(400_000)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child ended by itself");
        operations += std::fs::read_to_string(dir.path().join("journal")).unwrap().matches("done").count() as i64;
        let journal = check(dir.path());
        operations -= journal.matches("done").count() as i64;
        std::fs::write(dir.path().join("journal"), journal).unwrap();
    }
    println!("{rounds} kills, {operations} operations");
    assert!(operations > rounds as i64);
}
