//! Clients with real memory whose agents lie, or say nothing.

use std::os::fd::AsFd;
use std::time::Duration;

use wire::recycle::{Extent, Pool, Recycled, Sweep};
use wire::{Digests, Merge, Outcome, PageNo, RegionId, Report, Run, RunOutcome, ToAgent, ToDaemon};

use super::descriptors::good_pool;
use super::memory::{PAGE, Tracked, map, reserve};
use super::peer::Peer;
use super::processes::fork;
use super::{Host, Random};

/// Pages of a liar.
const PAGES: usize = 4096;
/// Bytes that a liar about free pages reserves and never touches: 16 GiB.
const RESERVED: usize = 16 << 30;
/// Clients at a time. A process is one client: a second connection takes the place of the first.
const CLIENTS: usize = 4;
/// How long a client stays to which the daemon says nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// Speaks for clients that have equal pages; `answer` says what to tell the daemon.
fn speak(host: &Host, mut answer: impl FnMut(ToAgent) -> Vec<ToDaemon>) {
    for _ in 1..CLIENTS {
        fork(|| speak_alone(host, &mut answer));
    }
    speak_alone(host, &mut answer);
}

fn speak_alone(host: &Host, answer: &mut dyn FnMut(ToAgent) -> Vec<ToDaemon>) {
    let memory = Tracked::new(PAGES);
    loop {
        memory.fill(|page| 1 + page as u64 / 2);
        let Ok(peer) = Peer::client(host, &[(memory.start(), PAGES * PAGE)]) else { continue };
        while let Ok(Some(message)) = peer.hear(PATIENCE) {
            host.step();
            answer(message).iter().for_each(|said| drop(peer.send(said)));
        }
    }
}

/// True answers, so that merging goes on.
fn digests_of(asked: &wire::Digest, cpu_ns: u64) -> ToDaemon {
    let count = asked.runs.iter().map(|run| run.len as usize).sum();
    ToDaemon::Digests(Digests { request: asked.request, digests: vec![asked.seed; count], cpu_ns })
}

fn report(batch: u64, outcomes: Vec<RunOutcome>, last: bool, cpu_ns: u64) -> ToDaemon {
    ToDaemon::Report(Report { batch, last, outcomes, cpu_ns, window_ns: u64::MAX, maps: u32::MAX })
}

fn merged(merge: &Merge) -> Vec<RunOutcome> {
    merge.runs.iter().map(|merge| RunOutcome { run: merge.run, outcome: Outcome::Merged }).collect()
}

/// Reports of merges that were none, of pages that are in no batch, twice, of batches that are
/// none; pages that are discarded although they are said to be merged.
pub(super) fn reports(host: &Host, mut random: Random) {
    speak(host, move |message| match message {
        ToAgent::Digest(asked) => vec![digests_of(&asked, 0)],
        ToAgent::Merge(merge) => {
            let any = RunOutcome { run: Run::new(PageNo(0), wire::MAX_BATCH_PAGES), outcome: Outcome::Merged };
            let region = merge.region;
            match random.below(6) {
                0 => vec![report(merge.batch, merged(&merge), true, 0)],
                1 => vec![report(merge.batch, vec![any], false, 0), report(merge.batch, vec![any], true, 0)],
                2 => vec![report(merge.batch, merged(&merge), true, 0), report(merge.batch, vec![any], true, 0)],
                3 => vec![report(u64::MAX, vec![any], true, 0)],
                4 => {
                    let half = Run::new(PageNo(0), PAGES as u32 / 2);
                    let shrunk = ToDaemon::RegionShrunk { region, run: half };
                    vec![shrunk.clone(), report(merge.batch, merged(&merge), true, 0), shrunk]
                }
                _ => {
                    let discarded = ToDaemon::Discarded { region, run: Run::new(PageNo(0), PAGES as u32) };
                    vec![report(merge.batch, merged(&merge), true, 0), discarded]
                }
            }
        }
        _ => Vec::new(),
    });
}

/// Agents that say to have used 36 years of CPU time.
pub(super) fn cpu(host: &Host, mut random: Random) {
    let mut used = 1u64 << 60;
    speak(host, move |message| {
        used = used.saturating_add(random.below(1 << 40));
        match message {
            ToAgent::Digest(asked) => vec![digests_of(&asked, used)],
            ToAgent::Merge(merge) => vec![report(merge.batch, Vec::new(), true, used)],
            _ => vec![ToDaemon::Digests(Digests { request: 0, digests: Vec::new(), cpu_ns: used })],
        }
    });
}

/// Digests that belong to no page: all alike, all different, of other requests.
pub(super) fn digests(host: &Host, mut random: Random) {
    speak(host, move |message| match message {
        ToAgent::Digest(asked) => {
            let kind = random.below(3);
            let digest = |_| if kind == 0 { 7 } else { random.below(u64::MAX) };
            let digests = (0..wire::MAX_DIGESTS).map(digest).collect();
            let request = if kind == 2 { asked.request.wrapping_sub(1) } else { asked.request };
            vec![ToDaemon::Digests(Digests { request, digests, cpu_ns: 0 })]
        }
        ToAgent::Merge(merge) => {
            let differs = |run| RunOutcome { run, outcome: Outcome::Differs };
            vec![report(merge.batch, merge.runs.iter().map(|merge| differs(merge.run)).collect(), true, 0)]
        }
        _ => Vec::new(),
    });
}

/// Agents that take every request and answer none; regions come and go meanwhile.
pub(super) fn unanswered(host: &Host, mut random: Random) {
    let mut known = 1;
    speak(host, move |message| match message {
        ToAgent::Merge(merge) if random.below(8) == 0 => {
            known += 1;
            vec![
                ToDaemon::RegionAdded { region: RegionId(known % 4000), start: 1 << 40, len: PAGE as u64 },
                ToDaemon::Discarded { region: merge.region, run: Run::new(PageNo(0), 1) },
            ]
        }
        _ => Vec::new(),
    });
}

/// Clients that recycle what they never had, again and again, and have given back all that there
/// is.
pub(super) fn free_pages(host: &Host, mut random: Random) {
    let pool = good_pool(PAGES);
    let (memory, real) = (Tracked::new(PAGES), reserve(RESERVED).unwrap_or(1 << 16));
    let far = (RESERVED / PAGE) as u32;
    loop {
        memory.fill(|page| 1 + page as u64 / 2);
        let Ok(peer) = Peer::client(host, &[(memory.start(), PAGES * PAGE), (real, RESERVED)]) else { continue };
        let extents = vec![Extent { frame: 0, region: RegionId(0), run: Run::new(PageNo(0), PAGES as u32) }];
        let said = ToDaemon::Pool(Pool { extents, period_ms: 100 });
        let _ = peer.send_bytes(&wire::encode(&said), &[pool.as_fd()]);
        for _ in 0..100 {
            let region = RegionId(random.below(2) as u32);
            let all = if region == RegionId(0) { PAGES as u32 } else { far };
            let from = random.below(u64::from(all)) as u32;
            let runs = vec![Run::new(PageNo(from), all - from); 1 + random.below(8) as usize];
            let claim = Recycled { region, runs };
            let claim = if random.below(2) == 0 { ToDaemon::Recycled(claim) } else { ToDaemon::Zeros(claim) };
            let most = u64::MAX;
            let swept = Sweep { pages: most, runs: most, lost: most, sweep_ns: most, more: true, ..Sweep::default() };
            host.step();
            if peer.send(&claim).and_then(|()| peer.send(&ToDaemon::Swept(swept))).is_err() || !peer.is_kept() {
                break;
            }
        }
    }
}

/// Control pages that are somewhere else, or nowhere, or never mapped.
pub(super) fn proofs(host: &Host, mut random: Random) {
    let other = map(PAGE) as u64;
    let mut kept = Vec::new();
    loop {
        let mut peer = Peer::hello(host);
        let right = peer.ready().map_or(0, |control| control.range().start as u64);
        let address = match random.below(5) {
            0 => random.below(u64::MAX),
            1 => other,
            2 => right + 8,
            3 => u64::MAX - 8,
            _ => {
                kept.push(peer);
                if kept.len() > 100 {
                    kept.clear();
                }
                continue;
            }
        };
        let _ = peer.send(&ToDaemon::Mapped { address });
        host.step();
    }
}

/// Clients that write whatever they like into their control pages.
pub(super) fn control_page(host: &Host, mut random: Random) {
    let memory = Tracked::new(PAGES);
    loop {
        memory.fill(|page| 1 + page as u64 / 2);
        let Ok(peer) = Peer::client(host, &[(memory.start(), PAGES * PAGE)]) else { continue };
        let Some(control) = peer.control() else { continue };
        for round in 0..200_000 {
            let word = random.below(wire::control::LEN as u64 / 8) as usize * 8;
            let value = random.below(u64::MAX) >> (random.below(8) * 8);
            control.atomic_u64(word).store(value, std::sync::atomic::Ordering::Relaxed);
            if round % 1000 == 0 {
                host.step();
                std::thread::sleep(Duration::from_millis(2));
                if !peer.is_kept() {
                    break;
                }
            }
        }
    }
}
