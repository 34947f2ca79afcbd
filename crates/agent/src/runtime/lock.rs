//! The agent's lock, and signals.
//!
//! A `pthread` mutex in a static, since it must be taken before a fork and released on both sides
//! of it, which a lock of the standard library does not offer. While it is held all signals are
//! blocked: a handler that calls `madvise` or `munmap` on a region would otherwise wait for its own
//! thread.

#![allow(unsafe_code)] // A lock hands out references to shared data.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// All signals are blocked on this thread until this is dropped.
pub struct Blocked(libc::sigset_t);

impl Blocked {
    /// Blocks them.
    pub fn all() -> Blocked {
        let mut every = MaybeUninit::uninit();
        // SAFETY: fills the set.
        Blocked::set(unsafe {
            libc::sigfillset(every.as_mut_ptr());
            every.assume_init()
        })
    }

    /// Unblocks them instead.
    pub fn none() -> Blocked {
        let mut none = MaybeUninit::uninit();
        // SAFETY: empties the set.
        Blocked::set(unsafe {
            libc::sigemptyset(none.as_mut_ptr());
            none.assume_init()
        })
    }

    fn set(signals: libc::sigset_t) -> Blocked {
        let mut before = MaybeUninit::uninit();
        // SAFETY: `before` is written before it is read; the call does not fail with valid arguments.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &signals, before.as_mut_ptr());
            Blocked(before.assume_init())
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set came from `pthread_sigmask`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// A mutex that survives fork; lives in a static.
pub struct Lock<T> {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    waiting: AtomicUsize,
    data: UnsafeCell<T>,
    /// The signals to restore when a guard that was held across a fork ends.
    across_fork: UnsafeCell<Option<Blocked>>,
}

// SAFETY: the data is only reached with the mutex held.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// An unlocked lock. It must not be moved any more once it is used.
    pub const fn new(data: T) -> Lock<T> {
        Lock {
            mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
            waiting: AtomicUsize::new(0),
            data: UnsafeCell::new(data),
            across_fork: UnsafeCell::new(None),
        }
    }

    /// Waits for the lock.
    pub fn lock(&'static self) -> Guard<T> {
        let signals = Blocked::all();
        // SAFETY: the mutex is initialised and never moves, being in a static; this thread does not hold
        // it, since guards are not kept while program code runs, signal handlers included.
        unsafe {
            if libc::pthread_mutex_trylock(self.mutex.get()) != 0 {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                libc::pthread_mutex_lock(self.mutex.get());
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
        Guard { lock: self, signals: Some(signals) }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&'static self) -> Option<Guard<T>> {
        let signals = Blocked::all();
        // SAFETY: as in `lock`.
        let free = unsafe { libc::pthread_mutex_trylock(self.mutex.get()) } == 0;
        free.then_some(Guard { lock: self, signals: Some(signals) })
    }

    /// Whether somebody waits for it. The mutex is not fair, so whoever takes it again and again
    /// must make way.
    fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Makes way, for a millisecond at most.
    pub fn let_others(&self) {
        for _ in 0..50 {
            if !self.is_wanted() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }

    /// Takes the lock back after [`Guard::keep_across_fork`], in the parent or in the child.
    ///
    /// # Safety
    /// This thread (or the one that it is a copy of) called `keep_across_fork` and has not called
    /// this since.
    pub unsafe fn after_fork(&'static self) -> Guard<T> {
        // SAFETY: the mutex is held by this thread.
        let signals = unsafe { (*self.across_fork.get()).take() };
        Guard { lock: self, signals }
    }

    /// Forgets the waiting threads, which a forked child has not.
    pub fn forget_waiting(&self) {
        self.waiting.store(0, Ordering::Relaxed);
    }
}

/// The lock is held until this is dropped.
pub struct Guard<T: 'static> {
    lock: &'static Lock<T>,
    signals: Option<Blocked>,
}

impl<T> Guard<T> {
    /// Keeps the lock held until [`Lock::after_fork`].
    pub fn keep_across_fork(mut self) {
        // SAFETY: the mutex is held.
        unsafe { *self.lock.across_fork.get() = self.signals.take() };
        std::mem::forget(self);
    }
}

impl<T> Deref for Guard<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the mutex is held, and borrows follow the guard's.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed for writing.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        // SAFETY: held by this thread. The signals are restored after it, when the fields are dropped.
        unsafe { libc::pthread_mutex_unlock(self.lock.mutex.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static COUNTER: Lock<u64> = Lock::new(0);
    static KEPT: Lock<u64> = Lock::new(7);

    #[test]
    fn excludes() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut counter = COUNTER.lock();
                        let read = *counter;
                        std::hint::black_box(&read);
                        *counter = read + 1;
                    }
                });
            }
        });
        assert_eq!(*COUNTER.lock(), 80_000);
    }

    #[test]
    fn is_held_across_a_fork() {
        KEPT.lock().keep_across_fork();
        std::thread::scope(|scope| assert!(scope.spawn(|| KEPT.try_lock().is_none()).join().unwrap()));
        // SAFETY: kept above, on this thread.
        let guard = unsafe { KEPT.after_fork() };
        assert_eq!(*guard, 7);
        drop(guard);
        assert!(KEPT.try_lock().is_some());
    }
}
