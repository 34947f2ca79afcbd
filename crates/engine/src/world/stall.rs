//! Workers that a client's memory holds up, and users whose memory is left alone for that.
//!
//! A worker sleeps in a client's memory while a page comes from swap, or from a mapped file that
//! does not answer, or while the client keeps its address space locked. No call can be told to
//! give up. So a worker notes when it enters ([`touch`]), and a watch looks at the notes every few
//! milliseconds while there is work:
//!
//! ```text
//!   worker:  enter ──▶ read, scan ──▶ leave              a note each, no lock
//!                          │ asleep for too long; waiting for a CPU does not count
//!   watch:                 ▼
//!            replaced: another worker takes its place    the user is left alone until
//!                          │                             it returns, and for a while
//!   worker:                ▼
//!            leave ──▶ touches nothing more, ends its pass, ends
//! ```
//!
//! A worker that sleeps there holds no lock. It holds its client, which has one worker at a time,
//! and at most a few hundred reserved slots of its domain's store.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use claims::Owner;

use crate::sync::Mutex;

/// A worker that has slept in a client's memory for longer than this, in all since it entered, is
/// replaced. Reads from memory take microseconds, from a fast swap device less than a millisecond.
const LIMIT: Duration = Duration::from_millis(20);
/// The same for a worker that waits for another thread to leave a client's memory: `pageone dirty`
/// may scan a large client for as long as tens of milliseconds.
const LIMIT_OF_WAITS: Duration = Duration::from_millis(500);
/// How often the watch looks: held up for [`LIMIT`] and twice this at most.
pub(crate) const TICK: Duration = Duration::from_millis(10);
/// A user that held up a worker is left alone for this multiple of that time: it may cost one
/// worker a twentieth of its time. Where the worker waited for the lock of the address space, it is
/// left alone for that time once: on a busy machine the agent is preempted while it maps frames. A
/// user that keeps the lock on purpose has one worker at a time wait, and that one is replaced.
const REST: u32 = 20;

thread_local! {
    static MINE: RefCell<Option<Arc<Slot>>> = const { RefCell::new(None) };
}

pub(crate) struct Slot {
    tid: i32,
    base: Instant,
    /// When it entered a client's memory, in nanoseconds after `base`; 0: it is in none.
    since: AtomicU64,
    /// The user whose memory that is.
    user: AtomicU32,
    /// How long it may sleep there, in milliseconds.
    limit_ms: AtomicU64,
    /// When the watch first saw it in this memory.
    seen: Mutex<Option<Sight>>,
    /// Another worker has its place, and the memory of this user is why.
    replaced: AtomicBool,
    blamed: AtomicU32,
}

/// What the watch remembers of a worker in a client's memory.
#[derive(Clone, Copy)]
struct Sight {
    /// `Slot::since`: which visit it is.
    since: u64,
    at: Instant,
    /// How long the thread had run or waited for a CPU by then.
    active: Duration,
}

impl Slot {
    /// How long it slept since the watch first saw it in this memory, if that is too long.
    fn overslept(&self) -> Option<Duration> {
        let since = self.since.load(Acquire);
        let now = Instant::now();
        let mut seen = self.seen.lock();
        let Some(sight) = seen.filter(|sight| since > 0 && sight.since == since) else {
            *seen = (since > 0).then(|| Sight { since, at: now, active: active(self.tid) });
            return None;
        };
        self.held_up().filter(|_| is_asleep(self.tid))?;
        let slept = (now - sight.at).saturating_sub(active(self.tid).saturating_sub(sight.active));
        Some(slept).filter(|&slept| slept > self.limit())
    }

    /// How long it has been in a client's memory, if that is too long.
    fn held_up(&self) -> Option<Duration> {
        let since = Some(self.since.load(Acquire)).filter(|&since| since > 0)?;
        let time = self.base.elapsed().saturating_sub(Duration::from_nanos(since));
        Some(time).filter(|&time| time > self.limit())
    }

    fn limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Relaxed))
    }

    fn note<R>(&self, user: Owner, limit: Duration, act: impl FnOnce() -> R) -> R {
        self.user.store(user.number(), Relaxed);
        self.limit_ms.store(limit.as_millis() as u64, Relaxed);
        self.since.store((self.base.elapsed().as_nanos() as u64).max(1), Release);
        let result = act();
        self.since.store(0, Release);
        result
    }

    pub(crate) fn is_replaced(&self) -> bool {
        self.replaced.load(Acquire)
    }

    /// Whether its thread will hardly end soon.
    pub(crate) fn is_held_up(&self) -> bool {
        self.is_replaced() || self.held_up().is_some()
    }
}

/// Does something in the memory of a user's client, which may take for ever. `None`: this worker
/// was held up, and touches no memory any more. Other threads are not watched.
pub(crate) fn touch<R>(user: Owner, act: impl FnOnce() -> R) -> Option<R> {
    MINE.with_borrow(|mine| {
        let Some(mine) = mine else { return Some(act()) };
        if mine.is_replaced() {
            return None;
        }
        let result = mine.note(user, LIMIT, act);
        (!mine.is_replaced()).then_some(result)
    })
}

/// Waits until another thread has left a client's memory, which may take for ever.
pub(crate) fn wait<R>(user: Owner, act: impl FnOnce() -> R) -> R {
    MINE.with_borrow(|mine| match mine {
        Some(mine) => mine.note(user, LIMIT_OF_WAITS, act),
        None => act(),
    })
}

/// A user whose memory is left alone.
#[derive(Clone, Copy)]
struct Blocked {
    /// Workers that are held up now.
    workers: u32,
    /// When the last one was found, or came back.
    since: Instant,
    /// The user is left alone for so long after the last worker came back.
    rest: Duration,
}

/// The workers, and the users that are left alone.
#[derive(Default)]
pub(crate) struct Stalls {
    slots: Mutex<Vec<Arc<Slot>>>,
    blocked: Mutex<HashMap<Owner, Blocked>>,
}

impl Stalls {
    /// This thread is a worker from now on.
    pub(crate) fn enter(&self) -> Arc<Slot> {
        let slot = Arc::new(Slot {
            tid: rustix::thread::gettid().as_raw_nonzero().get(),
            base: Instant::now(),
            since: AtomicU64::new(0),
            user: AtomicU32::new(0),
            limit_ms: AtomicU64::new(0),
            seen: Mutex::new(None),
            replaced: AtomicBool::new(false),
            blamed: AtomicU32::new(0),
        });
        MINE.set(Some(slot.clone()));
        self.slots.lock().push(slot.clone());
        slot
    }

    /// This worker ends. If it was replaced, its user may be read again some time from now.
    pub(crate) fn leave(&self, slot: &Arc<Slot>) {
        MINE.set(None);
        self.slots.lock().retain(|other| !Arc::ptr_eq(other, slot));
        if slot.is_replaced()
            && let Some(blocked) = self.blocked.lock().get_mut(&Owner::numbered(slot.blamed.load(Relaxed)))
        {
            blocked.workers -= 1;
            blocked.since = Instant::now();
        }
    }

    /// Looks for workers that are held up. Calls `replace` for each that is, once.
    pub(crate) fn look(&self, mut replace: impl FnMut(Owner, Duration)) {
        let slots: Vec<_> = self.slots.lock().iter().filter(|slot| !slot.is_replaced()).cloned().collect();
        for slot in slots {
            let Some(time) = slot.overslept() else { continue };
            let user = Owner::numbered(slot.user.load(Relaxed));
            let mut blocked = self.blocked.lock();
            let rest = if waits_for_lock(slot.tid) { time } else { time * REST };
            let entry = blocked.entry(user).or_insert(Blocked { workers: 0, since: Instant::now(), rest });
            *entry = Blocked { workers: entry.workers + 1, since: Instant::now(), rest };
            slot.blamed.store(user.number(), Relaxed);
            slot.replaced.store(true, Release);
            drop(blocked);
            replace(user, time);
        }
        self.blocked.lock().retain(|_, blocked| blocked.workers > 0 || blocked.since.elapsed() < blocked.rest);
    }

    /// Why the memory of this user's clients is not touched now, if so.
    pub(crate) fn why(&self, user: Owner) -> Option<String> {
        let blocked = *self.blocked.lock().get(&user)?;
        if blocked.workers == 0 && blocked.since.elapsed() >= blocked.rest {
            return None;
        }
        Some(format!(
            "reading the memory of a client of user {user} does not end: it waits for a file that is mapped there and does \
             not answer, or for slow swap; clients of this user are left alone until it has ended, and for a while"
        ))
    }
}

/// Whether a thread of this process sleeps. One that is ready and only waits for a CPU does not.
fn is_asleep(tid: i32) -> bool {
    kmem::procfs::Stat::of_thread(None, tid).is_ok_and(|stat| stat.state() != Some('R'))
}

/// How long a thread has run, or waited for a CPU (schedstat, in the kernel's
/// Documentation/scheduler/sched-stats.rst); where that is not counted, all time is sleep.
fn active(tid: i32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).unwrap_or_default();
    stat.split(' ').take(2).filter_map(|ns| ns.parse().ok()).map(Duration::from_nanos).sum()
}

/// Whether a thread of this process waits for the lock of an address space. Only root may know
/// (proc_pid_stack(5)); for others it waits for memory.
fn waits_for_lock(tid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/self/task/{tid}/stack")).is_ok_and(|stack| is_in_lock(&stack))
}

/// Whether a thread with this stack of kernel functions waits for a lock that readers share.
fn is_in_lock(stack: &str) -> bool {
    stack.lines().any(|line| line.contains("rwsem_down_read") || line.contains("rwsem_down_write"))
}

#[cfg(test)]
mod tests;
