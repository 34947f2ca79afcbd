//! Locks that note how long they are held, by the place in the sources that took them.
//!
//! The clock is read when a lock is taken and before it is let go; the cost of one reading, some
//! 20 ns, is in each time. A time of [`LONG`] or more is summed apart: on a busy machine most are
//! those of threads that were not running. Where threads may share a lock for reading, only their
//! number is noted. [`tell`] writes the sums to the log.

#![allow(unsafe_code)] // lock_api's traits are unsafe; all calls go to parking_lot's locks.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::panic::Location;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::lock_api::{self, GuardSend, RawMutexTimed};

pub(crate) type Mutex<T> = lock_api::Mutex<RawMutex, T>;
pub(crate) type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
pub(crate) type RwLock<T> = lock_api::RwLock<RawRwLock, T>;

/// In nanoseconds: as long as a thread may have to wait for a CPU.
const LONG: u64 = 200_000;

/// A place that takes a lock: how often, for how long in all, and how often for reading.
struct Site {
    at: &'static Location<'static>,
    taken: AtomicU64,
    held_ns: AtomicU64,
    read: AtomicU64,
    long_ns: AtomicU64,
}

static SITES: parking_lot::Mutex<Vec<&'static Site>> = parking_lot::Mutex::new(Vec::new());
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

thread_local! {
    static KNOWN: RefCell<HashMap<*const Location<'static>, &'static Site>> = RefCell::default();
}

/// `None`: the thread ends.
fn site(at: &'static Location<'static>) -> Option<&'static Site> {
    let find = |known: &RefCell<HashMap<_, _>>| {
        *known.borrow_mut().entry(ptr::from_ref(at)).or_insert_with(|| {
            let site = Site { at, taken: 0.into(), held_ns: 0.into(), read: 0.into(), long_ns: 0.into() };
            let site: &'static Site = Box::leak(Box::new(site));
            SITES.lock().push(site);
            site
        })
    };
    KNOWN.try_with(find).ok()
}

fn now() -> u64 {
    START.elapsed().as_nanos() as u64
}

/// Writes to the log, for each place: `lock FILE:LINE TAKEN HELD_NS READ LONG_NS`.
pub(crate) fn tell() {
    let mut all = BTreeMap::<(&str, u32), [u64; 4]>::new();
    for site in SITES.lock().iter() {
        let sums = all.entry((site.at.file(), site.at.line())).or_default();
        let more = [&site.taken, &site.held_ns, &site.read, &site.long_ns].map(|count| count.load(Relaxed));
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    for ((file, line), [taken, held, read, long]) in all {
        tracing::info!("lock {file}:{line} {taken} {held} {read} {long}");
    }
}

/// Since when a lock is held, and by which place.
struct Held {
    since: AtomicU64,
    by: AtomicPtr<Site>,
}

impl Held {
    const NOBODY: Self = Self { since: AtomicU64::new(0), by: AtomicPtr::new(ptr::null_mut()) };

    fn begin(&self, at: &'static Location<'static>) {
        // Where lock_api takes a lock again for who let it go for a while, that one has it.
        if !at.file().contains("lock_api") {
            self.by.store(site(at).map_or(ptr::null_mut(), |site| ptr::from_ref(site).cast_mut()), Relaxed);
        }
        self.since.store(now(), Relaxed);
    }

    fn end(&self) {
        // SAFETY: null, or a site, which is never freed.
        if let Some(site) = unsafe { self.by.load(Relaxed).as_ref() } {
            let time = now() - self.since.load(Relaxed);
            site.taken.fetch_add(1, Relaxed);
            if time < LONG { &site.held_ns } else { &site.long_ns }.fetch_add(time, Relaxed);
        }
    }
}

pub(crate) struct RawMutex {
    lock: parking_lot::RawMutex,
    held: Held,
}

// SAFETY: the lock within excludes.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const, reason = "lock_api wants it")]
    const INIT: Self = Self { lock: parking_lot::RawMutex::INIT, held: Held::NOBODY };
    type GuardMarker = GuardSend;

    #[track_caller]
    fn lock(&self) {
        self.lock.lock();
        self.held.begin(Location::caller());
    }

    #[track_caller]
    fn try_lock(&self) -> bool {
        let done = self.lock.try_lock();
        if done {
            self.held.begin(Location::caller());
        }
        done
    }

    unsafe fn unlock(&self) {
        self.held.end();
        // SAFETY: the caller holds it.
        unsafe { self.lock.unlock() };
    }
}

// SAFETY: as above.
unsafe impl RawMutexTimed for RawMutex {
    type Duration = Duration;
    type Instant = Instant;

    #[track_caller]
    fn try_lock_for(&self, timeout: Duration) -> bool {
        self.try_lock_until(Instant::now() + timeout)
    }

    #[track_caller]
    fn try_lock_until(&self, timeout: Instant) -> bool {
        let done = self.lock.try_lock_until(timeout);
        if done {
            self.held.begin(Location::caller());
        }
        done
    }
}

pub(crate) struct RawRwLock {
    lock: parking_lot::RawRwLock,
    held: Held,
}

// SAFETY: the lock within excludes.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "lock_api wants it")]
    const INIT: Self = Self { lock: parking_lot::RawRwLock::INIT, held: Held::NOBODY };
    type GuardMarker = GuardSend;

    #[track_caller]
    fn lock_shared(&self) {
        if let Some(site) = site(Location::caller()) {
            site.read.fetch_add(1, Relaxed);
        }
        self.lock.lock_shared();
    }

    #[track_caller]
    fn try_lock_shared(&self) -> bool {
        let done = self.lock.try_lock_shared();
        if done && let Some(site) = site(Location::caller()) {
            site.read.fetch_add(1, Relaxed);
        }
        done
    }

    unsafe fn unlock_shared(&self) {
        debug_assert!(self.lock.is_locked());
        // SAFETY: the caller holds it.
        unsafe { self.lock.unlock_shared() };
    }

    #[track_caller]
    fn lock_exclusive(&self) {
        self.lock.lock_exclusive();
        self.held.begin(Location::caller());
    }

    #[track_caller]
    fn try_lock_exclusive(&self) -> bool {
        let done = self.lock.try_lock_exclusive();
        if done {
            self.held.begin(Location::caller());
        }
        done
    }

    unsafe fn unlock_exclusive(&self) {
        self.held.end();
        // SAFETY: the caller holds it.
        unsafe { self.lock.unlock_exclusive() };
    }
}

/// As `parking_lot`'s, which takes guards of its own locks only: the count is of notifications.
#[derive(Default)]
pub(crate) struct Condvar {
    count: parking_lot::Mutex<u64>,
    changed: parking_lot::Condvar,
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notify_one(&self) {
        *self.count.lock() += 1;
        self.changed.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_until(guard, Instant::now() + Duration::from_secs(3600));
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        self.wait_until(guard, Instant::now() + time);
    }

    pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) {
        let mut count = self.count.lock();
        let before = *count;
        MutexGuard::unlocked(guard, || {
            while *count == before && !self.changed.wait_until(&mut count, end).timed_out() {}
            // Before the other lock: who notifies has that one, and waits for this.
            drop(count);
        });
    }
}
