//! Many threads on one pool: what each was told is true, also after a crash.

use std::io::IoSlice;
use std::path::Path;

use super::model::content;
use crate::sim::{Fault, Random, Sim};
use crate::{Allocation, Finding, OpenOptions, Pool};

const PATH: &str = "/pool";

/// Commits and deletes until an operation fails; gives what it was told: mblocks that are there,
/// and those that are not.
fn work(pool: &Pool, thread: u64, times: u64) -> (Vec<(u64, u64)>, Vec<u64>) {
    let (mut there, mut gone, mut random) = (Vec::new(), Vec::new(), Random::new(thread + 1));
    for i in 0..times {
        let seed = thread << 32 | i;
        let Ok(mut writer) = pool.mblock_alloc(Allocation { capacity: 3000, ..Allocation::default() }) else { break };
        if writer.write(&[IoSlice::new(&content(seed, 3000))]).is_err() {
            break;
        }
        let Ok(id) = writer.commit() else { break };
        there.push((id, seed));
        if random.below(3) == 0 {
            let (id, _) = there.swap_remove(random.below(there.len() as u64) as usize);
            if pool.mblock_delete(&[id]).is_err() {
                break;
            }
            gone.push(id);
        }
    }
    (there, gone)
}

fn run(seed: u64, fault: Option<u64>) {
    let sim = Sim::default();
    let pool = Pool::create_on(sim.storage(), Path::new(PATH), "threads").unwrap();
    let begin = sim.operations();
    if let Some(at) = fault {
        let faults = [Fault::Error, Fault::Torn, Fault::Full, Fault::PowerLoss];
        (0..=seed % 3).for_each(|i| sim.plan(begin + at + i * 40, faults[(seed + i) as usize % 4]));
    }
    let told = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                scope.spawn({
                    let pool = &pool;
                    move || work(pool, thread, 15)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let crashed = sim.crash(&mut Random::new(seed));
    drop(pool);
    let pool = Pool::open_on(crashed.storage(), Path::new(PATH), OpenOptions::default()).unwrap();
    let report = pool.check(crate::Depth::Data).unwrap();
    let bad = report.findings.iter().find(|finding| !matches!(finding, Finding::TornTail { .. }));
    assert_eq!(bad, None, "seed {seed}, {fault:?}");
    for (there, gone) in told {
        for (id, seed) in there {
            let mut bytes = vec![0; 3000];
            pool.mblock(id).and_then(|mblock| mblock.read(0, &mut bytes)).unwrap();
            assert!(bytes == content(seed, 3000), "mblock {id}");
        }
        assert!(gone.iter().all(|&id| pool.mblock(id).is_err()), "a deleted mblock is back");
    }
}

#[test]
fn what_many_threads_were_told_is_true_after_a_crash() {
    run(1, None);
    (0..150).for_each(|seed| run(seed, Some(seed * 7)));
}
