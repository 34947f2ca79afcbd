//! Descriptors: segments that are none, and pools that are none.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use wire::recycle::{Extent, Pool};
use wire::{PageNo, RegionId, Run, ToDaemon};

use super::memory::{PAGE, map};
use super::peer::Peer;
use super::{Host, Random};

/// Connections that keep descriptors at a time.
const KEPT: usize = 16;
/// Segments that a client can hold.
const MOST: u64 = 4096;
/// Pages of the region that a pool is for.
const PAGES: usize = 1024;

fn memfd(len: usize) -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    fd
}

/// Descriptors of many kinds.
fn some() -> Vec<OwnedFd> {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (one, _) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    vec![memfd(PAGE), reader, writer, one]
}

/// Thousands of descriptors that are said to be segments, before `Ready`.
pub(super) fn segments(host: &Host, mut random: Random) {
    let (own, mut kept) = (some(), Vec::new());
    loop {
        let peer = Peer::hello(host);
        for segment in 0..MOST {
            let fds =
                vec![own[random.below(own.len() as u64) as usize].as_fd(); if segment % 8 == 0 { 253 } else { 1 }];
            let held = wire::encode(&ToDaemon::SegmentHeld { segment: segment + random.below(2) });
            if peer.send_bytes(&held, &fds).is_err() {
                break;
            }
            host.step();
        }
        if random.below(2) == 0 {
            let _ = peer.send(&ToDaemon::Ready);
        }
        kept.push(peer);
        if kept.len() >= KEPT {
            kept.remove(0);
        }
    }
}

/// Messages that need no descriptor, with 253.
pub(super) fn stray(host: &Host, _: Random) {
    let own = some();
    let fds: Vec<_> = own.iter().cycle().take(253).map(AsFd::as_fd).collect();
    let start = map(PAGE);
    loop {
        let Ok(peer) = Peer::client(host, &[(start, PAGE)]) else { continue };
        let discarded = ToDaemon::Discarded { region: RegionId(0), run: Run::new(PageNo(0), 1) };
        while peer.send_bytes(&wire::encode(&discarded), &fds).is_ok() && peer.is_kept() {
            host.step();
        }
    }
}

/// A pool for so many pages whose header is right, so that the daemon asks its monitor, or sweeps.
pub(super) fn good_pool(pages: usize) -> OwnedFd {
    let bytes = ppr::Layout::for_frames(pages as u64).unwrap().pool_bytes();
    let fd = memfd(bytes);
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let mapped = kmem::memfd::map_shared(&fd, bytes).unwrap();
    let start = std::ptr::NonNull::new(mapped.as_ptr()).unwrap();
    // SAFETY: `mapped` lives until the end of this function, and the file cannot shrink.
    let pool = unsafe { ppr::Pool::from_mapping(start, mapped.len()) }.unwrap();
    pool.initialise();
    ppr::Guest::new(&pool).mark(0..pages as u64 / 2);
    drop(pool);
    fd
}

/// Pools that are none, and pools whose monitors never answer, or never stop.
pub(super) fn pools(host: &Host, mut random: Random) {
    let (good, bad, start) = (good_pool(PAGES), some(), map(PAGES * PAGE));
    let mut kept = Vec::new();
    loop {
        host.step();
        let Ok(peer) = Peer::client(host, &[(start, PAGES * PAGE)]) else { continue };
        let (monitor, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let extents = match random.below(3) {
            0 => vec![Extent { frame: 0, region: RegionId(0), run: Run::new(PageNo(0), PAGES as u32) }],
            1 => vec![Extent { frame: 1 << 40, region: RegionId(7), run: Run::new(PageNo(1 << 30), 1 << 30) }],
            _ => Vec::new(),
        };
        let pool = wire::encode(&ToDaemon::Pool(Pool { extents, period_ms: random.below(2) as u32 }));
        let first = if random.below(3) == 0 { &bad[random.below(4) as usize] } else { &good };
        let _ = peer.send_bytes(&pool, &[first.as_fd(), theirs.as_fd()]);
        drop(theirs);
        kept.push((peer, monitor));
        babble(&mut kept, &mut random);
        if kept.len() > 200 {
            kept.drain(..100);
        }
    }
}

/// Some of the monitors talk without end.
fn babble(kept: &mut [(Peer, std::os::unix::net::UnixStream)], random: &mut Random) {
    use std::io::Write;
    let line = [b'x'; 32 << 10];
    for (_, monitor) in kept.iter_mut().filter(|_| random.below(4) == 0) {
        let _ = monitor.set_nonblocking(true);
        let _ = monitor.write_all(&line);
    }
    std::thread::sleep(Duration::from_millis(10));
}
