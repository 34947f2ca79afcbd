//! Memory of the attacker's own: reserved, tracked, missing when it is read.

use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use kmem::range::Range;
use kmem::uffd::{Features, Uffd};
use wire::ToAgent;

use super::peer::Peer;
use super::processes::{fork, wait_for};
use super::{Host, Random};

pub(super) const PAGE: usize = kmem::PAGE_SIZE;
/// Processes that make their memory go missing at a time.
const BLOCKERS: usize = 4;
/// Clients of one process that keeps the daemon busy.
const BUSY: usize = 12;

fn mmap(len: usize, prot: i32, flags: i32) -> Option<usize> {
    // SAFETY: a new mapping at an address that the kernel chooses; no other code knows it.
    let start = unsafe { libc::mmap(null_mut(), len, prot, flags | libc::MAP_ANONYMOUS, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.addr())
}

/// A mapping of `len` bytes that is never touched. `None`: there is no room for it.
pub(super) fn reserve(len: usize) -> Option<usize> {
    mmap(len, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_NORESERVE)
}

/// Ordinary memory.
pub(super) fn map(len: usize) -> usize {
    mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE).unwrap()
}

/// A number that this process shares with those that it will fork.
pub(super) fn shared_counter() -> &'static AtomicU64 {
    let start = mmap(PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED).unwrap();
    // SAFETY: the mapping is zeroed, aligned, long enough, and is never unmapped.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(start) }
}

/// Memory that is registered as an agent's is, so that the daemon scans it.
pub(super) struct Tracked {
    start: usize,
    pages: usize,
    uffd: Option<Uffd>,
}

impl Tracked {
    /// Where no userfaultfd is to be had, the memory is not registered.
    pub(super) fn new(pages: usize) -> Self {
        let start = map(pages * PAGE);
        let uffd = Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED).ok();
        let tracked = Self { start, pages, uffd };
        tracked.register(false);
        tracked
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    fn range(&self) -> Range {
        Range::new(self.start, self.pages * PAGE)
    }

    fn register(&self, missing: bool) {
        if let Some(uffd) = &self.uffd {
            let _ = if missing { uffd.register_missing_wp(self.range()) } else { uffd.register_wp(self.range()) };
        }
    }

    fn unregister(&self) {
        if let Some(uffd) = &self.uffd {
            let _ = uffd.unregister(self.range());
        }
    }

    /// Gives each page content: pages with the same number are alike.
    pub(super) fn fill(&self, number: impl Fn(usize) -> u64) {
        for page in 0..self.pages {
            let at = std::ptr::with_exposed_provenance_mut::<u64>(self.start + page * PAGE);
            // SAFETY: the page lies in this mapping, which lives as long as the process; no
            // reference to it exists.
            unsafe { at.write_volatile(number(page)) };
        }
    }

    /// From now on reads of these pages never return.
    fn vanish(&self) {
        self.register(true);
        // SAFETY: this mapping; nothing refers to its bytes.
        unsafe {
            libc::madvise(std::ptr::with_exposed_provenance_mut(self.start), self.pages * PAGE, libc::MADV_DONTNEED)
        };
    }
}

/// Several processes at once whose memory vanishes as soon as the daemon asks for its digests.
pub(super) fn missing_on_digest(host: &Host, random: Random) {
    block(host, random, |peer, _| {
        for _ in 0..40 {
            if matches!(peer.hear(Duration::from_millis(50)), Ok(Some(ToAgent::Digest(_))) | Err(_)) {
                break;
            }
        }
    });
}

/// The same, at a random moment after a scan may have seen the pages.
pub(super) fn missing_at_random(host: &Host, random: Random) {
    block(host, random, |_, random| std::thread::sleep(Duration::from_millis(random.below(400))));
}

fn block(host: &Host, mut random: Random, wait: fn(&Peer, &mut Random)) {
    for _ in 1..BLOCKERS {
        random.below(2);
        let random = random.clone();
        fork(|| {
            block_alone(host, random, wait);
        });
    }
    block_alone(host, random, wait);
}

fn block_alone(host: &Host, mut random: Random, wait: fn(&Peer, &mut Random)) {
    loop {
        let next = random.below(u64::MAX);
        let child = fork(|| {
            let mut random = Random::new(next);
            let memory = Tracked::new(2048);
            memory.fill(|page| next.wrapping_add(page as u64));
            let Ok(peer) = Peer::client(host, &[(memory.start(), 2048 * PAGE)]) else { return };
            wait(&peer, &mut random);
            memory.unregister();
            memory.vanish();
            std::thread::sleep(Duration::from_millis(1500));
        });
        wait_for(child);
        host.step();
    }
}

/// Honest clients with content of their own that changes all the time, each a process.
pub(super) fn busy(host: &Host, mut random: Random) {
    for _ in 0..BUSY {
        let seed = random.below(u64::MAX);
        fork(|| {
            let memory = Tracked::new(8192);
            let Ok(peer) = Peer::client(host, &[(memory.start(), 8192 * PAGE)]) else { return };
            for round in 0u64.. {
                memory.fill(|page| seed.wrapping_add(round << 32).wrapping_add(page as u64));
                host.step();
                for _ in 0..10 {
                    std::thread::sleep(Duration::from_millis(30));
                    let _ = peer.is_kept();
                }
            }
        });
    }
    super::processes::reap_all();
}

/// Maps a segment of the store very often, and introduces itself again and again: the daemon looks
/// at all that a client maps.
pub(super) fn mappers(host: &Host, _: Random) {
    const LEN: usize = wire::SEGMENT_PAGES as usize * PAGE;
    const TIMES: usize = 30_000;
    for _ in 1..2 {
        fork(|| map_again(host, TIMES, LEN));
    }
    map_again(host, TIMES, LEN);
}

fn map_again(host: &Host, times: usize, len: usize) {
    let memory = Tracked::new(256);
    memory.fill(|page| 1 + page as u64 / 2);
    let introduce = || Peer::client(host, &[(memory.start(), 256 * PAGE)]);
    let mut fds = Vec::new();
    while fds.is_empty() {
        let Ok(peer) = introduce() else { continue };
        while fds.is_empty() && matches!(peer.hear_all(Duration::from_secs(1), &mut fds), Ok(Some(_))) {}
    }
    for _ in 0..times {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses; no other code knows it.
        unsafe { libc::mmap(null_mut(), len, libc::PROT_READ, flags, std::os::fd::AsRawFd::as_raw_fd(&fds[0]), 0) };
    }
    loop {
        let _ = introduce();
        host.step();
    }
}
