//! Regions that are too large, too many, or taken back again and again.

use std::time::Duration;

use wire::{PageNo, RegionId, Run, ToDaemon};

use super::memory::{PAGE, reserve};
use super::peer::Peer;
use super::processes::{fork, wait_for};
use super::{Host, Random};

/// The largest region that a message can name: 16 TiB less a page.
const HUGE: u64 = u32::MAX as u64 * PAGE as u64;
/// Regions that a client can name.
const MOST: u32 = 1 << 12;
/// Connections that a flood keeps at a time.
const KEPT: usize = 32;
/// The largest mapping that is asked for: 8 TiB.
const REAL: usize = 8 << 40;

/// Regions of 16 TiB that do not exist, and no `Ready`.
pub(super) fn before_ready(host: &Host, _: Random) {
    let mut kept = Vec::new();
    loop {
        let peer = Peer::hello(host);
        flood(host, &peer);
        kept.push(peer);
        if kept.len() >= KEPT {
            kept.clear();
        }
    }
}

/// The same, after `Ready`.
pub(super) fn after_ready(host: &Host, _: Random) {
    let mut kept = Vec::new();
    loop {
        if let Ok(peer) = Peer::client(host, &[]) {
            flood(host, &peer);
            kept.push(peer);
        }
        if kept.len() >= KEPT {
            kept.clear();
        }
    }
}

fn flood(host: &Host, peer: &Peer) {
    for id in 0..MOST {
        host.step();
        if peer.region(id, 1 << 16, HUGE).is_err() {
            break;
        }
    }
}

/// Mapped memory of many TiB, of which no page is touched, as one region and as many.
pub(super) fn real(host: &Host, mut random: Random) {
    let maps: Vec<usize> = (0..8).map_while(|_| reserve(REAL)).collect();
    loop {
        let whole = maps.iter().map(|&start| (start, REAL));
        let parts = maps.iter().flat_map(|&start| (0..256).map(move |n| (start + n * (REAL / 256), REAL / 256)));
        let regions: Vec<_> = if random.below(2) == 0 { whole.collect() } else { parts.collect() };
        if let Ok(peer) = Peer::client(host, &regions) {
            for _ in 0..20 {
                host.step();
                std::thread::sleep(Duration::from_millis(50));
                if !peer.is_kept() {
                    break;
                }
            }
        }
    }
}

/// As many regions as there can be, of one page each, which exist.
pub(super) fn small(host: &Host, _: Random) {
    let start = super::memory::map(2 * MOST as usize * PAGE);
    let regions: Vec<_> = (0..MOST as usize).map(|n| (start + 2 * n * PAGE, PAGE)).collect();
    let mut kept = Vec::new();
    loop {
        host.step();
        kept.extend(Peer::client(host, &regions));
        std::thread::sleep(Duration::from_millis(20));
        if kept.len() >= KEPT {
            kept.clear();
        }
    }
}

/// Tells that the largest region was discarded, over and over.
pub(super) fn discards(host: &Host, random: Random) {
    repeat(host, random, |run| ToDaemon::Discarded { region: RegionId(0), run });
}

/// Takes the same half of a region back, over and over.
pub(super) fn shrinks(host: &Host, random: Random) {
    repeat(host, random, |run| ToDaemon::RegionShrunk { region: RegionId(0), run });
}

/// Tells that the same pages are the program's for good, over and over.
pub(super) fn retained(host: &Host, random: Random) {
    repeat(host, random, |run| ToDaemon::Retained { region: RegionId(0), run });
}

fn repeat(host: &Host, mut random: Random, message: impl Fn(Run) -> ToDaemon) {
    let real = reserve(REAL).unwrap_or(1 << 16);
    loop {
        // A claim of 16 TiB, or memory that is really mapped.
        let (start, len) = if random.below(2) == 0 { (1 << 16, HUGE as usize) } else { (real, REAL) };
        let Ok(peer) = Peer::client(host, &[(start, len)]) else { continue };
        let half = Run::new(PageNo(0), (len / PAGE / 2) as u32);
        while peer.send(&message(half)).is_ok() && peer.is_kept() {
            host.step();
        }
    }
}

/// Clients with 200 huge regions each, that leave.
pub(super) fn leaving(host: &Host, _: Random) {
    let real = reserve(REAL).unwrap_or(1 << 16);
    loop {
        let child = fork(|| {
            let part = REAL / 200 / PAGE * PAGE;
            let _one = Peer::client(host, &Vec::from_iter((0..200).map(|n| (real + n * part, part))));
            let _other = Peer::client(host, &[(1 << 16, HUGE as usize); 200]);
            std::thread::sleep(Duration::from_millis(20));
        });
        wait_for(child);
        host.step();
    }
}
