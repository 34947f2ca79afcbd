//! Recycling: pages that the guest has marked as free become untouched memory.
//!
//! Claim, zero and release all happen here, in the process that is the guest (see `ppr`): a daemon
//! that dies, or stops, in the middle leaves no page claimed, and a guest that waits for a claim
//! waits for a thread of its own process. The daemon only says when (`ToAgent::Recycle`), and how
//! much CPU time a sweep may take.
//!
//! A sweep goes over the guest's RAM, at most [`BATCH_PAGES`] pages at a time: takes the agent's
//! lock (before it claims, since the guest waits for claims, and nobody who waits for the lock is
//! waited for), claims, turns merged pages among them into anonymous memory, gives all of them back
//! to the kernel in one `process_madvise(2)`, releases, tells the daemon. The guest is not trusted:
//! what it can name is limited by [`ppr::Ram`], and that to parts of regions; the pool cannot
//! shrink.

#![allow(unsafe_code)] // Discards the guest's free pages; maps the pool.

use crate::daemon::batch::cpu_time;
use crate::runtime::log;
use crate::runtime::regions::Pages;
use crate::runtime::state::{STATE, State, wake};
use crate::window::merge::held_memory;
use kmem::range::Range;
use kmem::{PAGE_SIZE, memfd, raw};
use rustix::fs::SealFlags;
use rustix::io::{Errno, FdFlags};
use std::ffi::{c_int, c_void};
use std::ops::Range as Frames;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use wire::recycle::{Extent, MAX_EXTENTS, MAX_RUNS, Recycled, Refusal, Sweep};
use wire::{Outcome, RegionId, Run, ToDaemon};

/// Pages claimed at a time (and up to a word more): some 0.2 ms of work.
const BATCH_PAGES: u64 = 1024;
/// How often the daemon hears of a sweep that takes long.
const FLUSH_EVERY: Duration = Duration::from_millis(5);

/// A pool, and what is needed to recycle what is marked in it.
pub struct Recycler {
    /// The pool's file.
    fd: OwnedFd,
    /// Our end of a QMP socket, until the daemon has found the guest's RAM with it.
    qmp: Option<OwnedFd>,
    period_ms: u32,
    /// Never unmapped: the pool is used for as long as the process lives.
    pool: &'static ppr::Pool,
    host: ppr::Host<&'static ppr::Pool>,
    /// Ascending by frame.
    extents: Vec<Extent>,
    /// The guest has overwritten the header.
    dropped: bool,
}

impl Recycler {
    fn new(fd: OwnedFd, qmp: Option<OwnedFd>, period_ms: u32) -> Result<Recycler, String> {
        // Touching a page that the file no longer has would raise SIGBUS.
        let seals = memfd::seals(&fd).map_err(|error| format!("the pool is no memfd: {error}"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("the pool is not sealed against shrinking".into());
        }
        let size = rustix::fs::fstat(&fd).map_err(|error| error.to_string())?.st_size;
        let map = memfd::map_shared(&fd, usize::try_from(size).unwrap_or(0)).map_err(|error| error.to_string())?;
        let start = std::ptr::NonNull::new(map.as_ptr()).ok_or("the pool is mapped at 0")?;
        // SAFETY: mapped for reading and writing, and for good: the map is leaked. The file cannot shrink.
        let pool = unsafe { ppr::Pool::from_mapping(start, map.len()) }.map_err(|error| error.to_string())?;
        std::mem::forget(map);
        pool.validate().map_err(|error| error.to_string())?;
        let pool: &'static ppr::Pool = Box::leak(Box::new(pool));
        let host = ppr::Host::new(pool, ppr::Ram::default());
        Ok(Recycler { fd, qmp, period_ms, pool, host, extents: Vec::new(), dropped: false })
    }

    fn set_extents(&mut self, extents: Vec<Extent>) {
        self.host = ppr::Host::new(self.pool, ppr::Ram::new(extents.iter().map(Extent::frames)));
        self.extents = extents;
        self.qmp = None;
        self.pool.set_host_state(ppr::HostState::Active);
    }

    /// What the daemon is told of it.
    pub fn account(&self) -> ToDaemon {
        ToDaemon::Pool(wire::recycle::Pool { extents: self.extents.clone(), period_ms: self.period_ms })
    }

    /// The descriptors that go with the account.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let qmp = self.qmp.as_ref().filter(|_| self.extents.is_empty());
        std::iter::once(self.fd.as_fd()).chain(qmp.map(OwnedFd::as_fd)).collect()
    }
}

/// What `pageone run --ppr` left in the environment and among the descriptors.
pub fn from_environment() -> Option<Recycler> {
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    let fd = number(wire::recycle::ENV_POOL)?;
    let take = |number: u32| {
        // SAFETY: only duplicated, which fails if it is closed; and whatever it is, it is checked before it
        // is used.
        let fd = unsafe { BorrowedFd::borrow_raw(number as c_int) };
        let own = rustix::io::fcntl_dupfd_cloexec(fd, 3).ok();
        // Children have no business with the program's own copy.
        let _ = rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC);
        own
    };
    let qmp = number(wire::recycle::ENV_QMP).and_then(take);
    let period = number(wire::recycle::ENV_PERIOD).unwrap_or(0);
    let recycler = take(fd).ok_or("its descriptor is closed".into()).and_then(|fd| Recycler::new(fd, qmp, period));
    recycler.inspect_err(|error: &String| log::line(format_args!("free pages are not recycled: {error}"))).ok()
}

/// Gives the agent a pool in which this program marks pages of its own: frame `n` of the pool is
/// page `n` from `start` on. The memory must be marked as mergeable. Returns 0, or an errno:
/// `ENOMEM` if not all of it is one region, `EBUSY` if there is a pool, `EINVAL` if the file is no
/// pool.
///
/// # Safety
/// A page that is marked may become zeros at any time until it is cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageone_ppr_share(fd: c_int, start: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's descriptor, only duplicated.
    let Ok(own) = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 3) else {
        return libc::EBADF;
    };
    let mut state = STATE.lock();
    if state.recycler.is_some() {
        return libc::EBUSY;
    }
    let wanted = Range::new(start as usize, len);
    let [(region, pages)] = state.pieces(wanted)[..] else { return libc::ENOMEM };
    if state.bytes(region, pages) != Some(wanted) {
        return libc::ENOMEM;
    }
    match Recycler::new(own, None, 0) {
        Ok(mut recycler) => {
            recycler.set_extents(vec![Extent { frame: 0, region, run: pages.into() }]);
            state.outbox.push(recycler.account());
            state.recycler = Some(recycler);
        }
        Err(error) => {
            log::line(format_args!("free pages are not recycled: {error}"));
            return libc::EINVAL;
        }
    }
    drop(state);
    wake();
    0
}

impl State {
    /// The daemon has found out where the guest's RAM lies.
    pub fn set_ram(&mut self, extents: Vec<Extent>) {
        let Some(mut recycler) = self.recycler.take() else { return };
        let is_managed = |extent: &Extent| {
            let region = self.position(extent.region).map(|index| &self.regions[index]);
            region.is_some_and(|region| region.manages(extent.run.into()))
        };
        // Once: RAM does not move, and memory that comes later is not in it.
        if recycler.extents.is_empty() && !extents.is_empty() && extents.iter().all(is_managed) {
            let frames: u64 = extents.iter().map(|extent| u64::from(extent.run.len)).sum();
            log::line(format_args!("recycles {} MiB of guest memory", (frames * PAGE_SIZE as u64) >> 20));
            recycler.set_extents(extents);
        }
        self.recycler = Some(recycler);
    }

    /// Why nothing may be recycled now.
    fn refuses_to_recycle(&mut self) -> Option<Refusal> {
        let Some(recycler) = self.recycler.as_mut().filter(|recycler| !recycler.extents.is_empty()) else {
            return Some(Refusal::NoPool);
        };
        if !recycler.dropped && recycler.pool.validate().is_err() {
            recycler.dropped = true;
        }
        if recycler.dropped {
            return Some(Refusal::Header);
        }
        match held_memory() {
            Some(Outcome::Pinned) => Some(Refusal::Pinned),
            Some(Outcome::Locked) => Some(Refusal::Locked),
            Some(_) => Some(Refusal::Kernel),
            None => None,
        }
    }

    /// Recycles one batch of `within`, which becomes what is left of it.
    fn recycle_batch(&mut self, within: &mut Frames<u64>) -> Result<ppr::Recycled, Errno> {
        let Some(mut recycler) = self.recycler.take() else { return Err(Errno::NODEV) };
        let Recycler { host, extents, .. } = &mut recycler;
        // One batch a call: `most` is reached with the first that has anything.
        let result = host.recycle(within, BATCH_PAGES, |runs| self.take_back(extents, runs));
        self.recycler = Some(recycler);
        result
    }

    /// Turns runs of claimed frames into untouched memory.
    fn take_back(&mut self, extents: &[Extent], runs: &[Frames<u64>]) -> Result<(), Errno> {
        let mut places = Vec::with_capacity(runs.len());
        let mut recycled: Vec<(RegionId, Vec<Run>)> = Vec::new();
        let mut result = Ok(());
        for (region, pages) in runs.iter().flat_map(|run| pages_of(extents, run)) {
            let Some(index) = self.position(region).filter(|&index| self.regions[index].manages(pages)) else {
                // Unmapped, or given back since: not ours any more.
                continue;
            };
            if self.regions[index].mapped.any(pages)
                && let Err(error) = self.discard(region, pages)
            {
                result = Err(error);
                break;
            }
            places.push(self.regions[index].bytes(pages));
            match recycled.last_mut() {
                Some((last, runs)) if *last == region && runs.len() < MAX_RUNS => runs.push(pages.into()),
                _ => recycled.push((region, vec![pages.into()])),
            }
        }
        let result = result.and(discard_all(&places));
        // Told of also after an error: a part may be gone, and the ledger must not take it for merged.
        for (region, runs) in recycled {
            self.outbox.push(ToDaemon::Recycled(Recycled { region, runs }));
        }
        result
    }
}

/// The pages of regions that a run of frames lies in.
fn pages_of(extents: &[Extent], run: &Frames<u64>) -> impl Iterator<Item = (RegionId, Pages)> {
    let first = extents.partition_point(|extent| extent.frames().end <= run.start);
    let run = run.clone();
    extents[first..].iter().take_while(move |extent| extent.frame < run.end).map({
        let run = run.clone();
        move |extent| {
            let (start, end) = (run.start.max(extent.frame), run.end.min(extent.frames().end));
            let page = extent.run.page.0 + (start - extent.frame) as u32;
            (extent.region, Pages::new(page, (end - start) as u32))
        }
    })
}

/// Gives memory back to the kernel, in one call where it takes lists (Linux 6.14), so that
/// translations are dropped once.
fn discard_all(places: &[Range]) -> Result<(), Errno> {
    static LISTS: OnceLock<bool> = OnceLock::new();
    // The first call tells; an empty list is refused by older kernels too.
    let mut left = places;
    while !left.is_empty() && LISTS.get() != Some(&false) {
        let count = left.len().min(libc::UIO_MAXIOV as usize);
        let vectors: Vec<libc::iovec> =
            left[..count].iter().map(|r| libc::iovec { iov_base: r.start as *mut c_void, iov_len: r.len }).collect();
        let wanted: usize = left[..count].iter().map(|range| range.len).sum();
        // SAFETY: the guest does not need these pages until they are released.
        match unsafe { raw::madvise_many(&vectors, libc::MADV_DONTNEED) } {
            Ok(done) if done == wanted => {
                LISTS.get_or_init(|| true);
                left = &left[count..];
            }
            Ok(_) => break,
            Err(_) => {
                LISTS.get_or_init(|| false);
                break;
            }
        }
    }
    for range in left {
        // SAFETY: as above.
        unsafe { raw::madvise(range.start, range.len, libc::MADV_DONTNEED) }?;
    }
    Ok(())
}

/// Recycles what is marked, for at most `budget` of CPU time, and queues the answer. `flush` is
/// called now and then, without the lock.
pub fn sweep(budget: Duration, mut flush: impl FnMut()) {
    let begin = cpu_time();
    let mut sum = Sweep::default();
    let mut state = STATE.lock();
    sum.refused = state.refuses_to_recycle();
    let mut ranges: Vec<Frames<u64>> = Vec::with_capacity(MAX_EXTENTS);
    if let (None, Some(recycler)) = (sum.refused, &state.recycler) {
        ranges.extend(recycler.extents.iter().map(Extent::frames));
    }
    drop(state);
    let mut flushed = Instant::now();
    'sweep: for mut within in ranges {
        while !within.is_empty() {
            if Duration::from_nanos(cpu_time() - begin) > budget {
                sum.more = true;
                break 'sweep;
            }
            let mut state = STATE.lock();
            let claimed = Instant::now();
            let done = state.recycle_batch(&mut within);
            sum.longest_ns = sum.longest_ns.max(claimed.elapsed().as_nanos() as u64);
            let go_on = !state.outbox.has_overflowed();
            drop(state);
            match done {
                Ok(done) => {
                    sum.pages += done.pages;
                    sum.runs += done.runs;
                    sum.lost += done.lost;
                }
                Err(_) => sum.refused = Some(Refusal::Kernel),
            }
            if sum.refused.is_some() || !go_on {
                break 'sweep;
            }
            if flushed.elapsed() > FLUSH_EVERY {
                flush();
                flushed = Instant::now();
            }
            STATE.let_others();
        }
    }
    sum.cpu_ns = cpu_time();
    sum.sweep_ns = sum.cpu_ns - begin;
    STATE.lock().outbox.push(ToDaemon::Swept(sum));
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::PageNo;

    #[test]
    fn runs_are_cut_at_extents() {
        let extents = [
            Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(256), 100) },
            Extent { frame: 356, region: RegionId(2), run: Run::new(PageNo(7), 10) },
            Extent { frame: 1000, region: RegionId(1), run: Run::new(PageNo(400), 50) },
        ];
        let of = |run: Frames<u64>| pages_of(&extents, &run).collect::<Vec<_>>();
        assert_eq!(of(300..310), [(RegionId(1), Pages::new(300, 10))]);
        assert_eq!(of(350..360), [(RegionId(1), Pages::new(350, 6)), (RegionId(2), Pages::new(7, 4))]);
        assert_eq!(of(360..1001), [(RegionId(2), Pages::new(11, 6)), (RegionId(1), Pages::new(400, 1))]);
        assert!(of(0..256).is_empty() && of(366..1000).is_empty() && of(1050..2000).is_empty());
    }

    #[test]
    fn memory_is_given_back_in_one_call_or_in_many() {
        let pages = 3000;
        let start = kmem::mm::map_anonymous(pages * PAGE_SIZE).unwrap();
        // SAFETY: mapped above, for this test alone.
        let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, pages * PAGE_SIZE) };
        memory.fill(7);
        let places: Vec<Range> = (0..pages).step_by(2).map(|p| Range::new(start + p * PAGE_SIZE, PAGE_SIZE)).collect();
        discard_all(&places).unwrap();
        assert!(memory.chunks(PAGE_SIZE).enumerate().all(|(p, page)| page[0] == if p % 2 == 0 { 0 } else { 7 }));
        assert!(discard_all(&[Range::new(start + 1, PAGE_SIZE)]).is_err(), "an error is told");
        // SAFETY: as above.
        unsafe { raw::munmap(start, pages * PAGE_SIZE).unwrap() };
    }
}
