//! The agent's lock, and blocked signals.
//!
//! A `pthread` mutex in a static: a fork handler takes it before the fork, and parent and child
//! release it, which a lock of the standard library does not offer. While it is held all signals
//! are blocked: a handler that calls `madvise` or `munmap` on a region would wait for its own
//! thread.

#![allow(unsafe_code)] // A lock hands out references to shared data.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Restores this thread's signal mask when it is dropped.
pub(crate) struct Blocked(libc::sigset_t);

impl Blocked {
    pub(crate) fn all() -> Self {
        let mut every = MaybeUninit::uninit();
        // SAFETY: `sigfillset` initialises the whole set behind the pointer, before it is read.
        Self::set(unsafe {
            libc::sigfillset(every.as_mut_ptr());
            every.assume_init()
        })
    }

    pub(crate) fn none() -> Self {
        let mut none = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the whole set behind the pointer, before it is read.
        Self::set(unsafe {
            libc::sigemptyset(none.as_mut_ptr());
            none.assume_init()
        })
    }

    fn set(signals: libc::sigset_t) -> Self {
        let mut before = MaybeUninit::uninit();
        // SAFETY: both pointers are to sets that live until the call returns. With SIG_SETMASK and
        // valid pointers the call cannot fail, so `before` is initialised when it is read.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &signals, before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set was initialised by `pthread_sigmask`; a null pointer means that the mask
        // before is not wanted.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// A mutex that can stay locked across a fork. It lives in a static.
pub(crate) struct Lock<T> {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    waiting: AtomicUsize,
    data: UnsafeCell<T>,
    /// The signal mask to restore when a guard that was kept across a fork ends.
    across_fork: UnsafeCell<Option<Blocked>>,
}

// SAFETY: `data` and `across_fork` are only reached by the thread that holds the mutex, so sharing
// the lock moves `T` between threads at most, for which `T: Send` suffices. `mutex` and `waiting`
// may be used by any thread.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(data: T) -> Self {
        Self {
            mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
            waiting: AtomicUsize::new(0),
            data: UnsafeCell::new(data),
            across_fork: UnsafeCell::new(None),
        }
    }

    /// Waits for the lock. The thread must not hold it already.
    pub(crate) fn lock(&'static self) -> Guard<T> {
        let signals = Blocked::all();
        // SAFETY: the mutex is initialised, and a static never moves. No guard is kept while code
        // of the program runs, signal handlers included, so this thread does not hold the mutex.
        unsafe {
            if libc::pthread_mutex_trylock(self.mutex.get()) != 0 {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                libc::pthread_mutex_lock(self.mutex.get());
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
        Guard { lock: self, signals: Some(signals) }
    }

    pub(crate) fn try_lock(&'static self) -> Option<Guard<T>> {
        let signals = Blocked::all();
        // SAFETY: the mutex is initialised, and a static never moves.
        let free = unsafe { libc::pthread_mutex_trylock(self.mutex.get()) } == 0;
        // Made only if the mutex was taken: dropping a guard releases it.
        free.then(|| Guard { lock: self, signals: Some(signals) })
    }

    fn is_contended(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Lets waiting threads take the lock first, for 1 ms at most: the mutex is not fair.
    pub(crate) fn yield_to_waiting(&self) {
        for _ in 0..50 {
            if !self.is_contended() {
                break;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Takes the lock back after [`Guard::keep_across_fork`], in the parent or in the child.
    ///
    /// # Safety
    ///
    /// - This thread called `keep_across_fork`, or is the copy in the child of the thread that did.
    /// - It has not called this function since.
    pub(crate) unsafe fn after_fork(&'static self) -> Guard<T> {
        // SAFETY: by the contract this thread holds the mutex, so nobody else reaches
        // `across_fork`.
        let signals = unsafe { (*self.across_fork.get()).take() };
        Guard { lock: self, signals }
    }

    /// Unlocks the lock in a child, whoever held it; returns whether nobody did.
    ///
    /// The caller is the only thread that uses the lock: the others are the parent's.
    pub(crate) fn reset(&self) -> bool {
        self.forget_waiting();
        // SAFETY: the mutex is initialised. A thread that held it at the fork does not exist in
        // this process, and no thread waits for it, so it may be made anew.
        unsafe {
            let was_free = libc::pthread_mutex_trylock(self.mutex.get()) == 0;
            if was_free {
                libc::pthread_mutex_unlock(self.mutex.get());
            } else {
                self.mutex.get().write(libc::PTHREAD_MUTEX_INITIALIZER);
                *self.across_fork.get() = None;
            }
            was_free
        }
    }

    /// Forgets the waiting threads: a forked child does not have them.
    pub(crate) fn forget_waiting(&self) {
        self.waiting.store(0, Ordering::Relaxed);
    }
}

/// The lock is held until this is dropped.
pub(crate) struct Guard<T: 'static> {
    lock: &'static Lock<T>,
    signals: Option<Blocked>,
}

impl<T> Guard<T> {
    /// Keeps the lock held until [`Lock::after_fork`].
    pub(crate) fn keep_across_fork(mut self) {
        // SAFETY: the guard proves that this thread holds the mutex, so nobody else reaches
        // `across_fork`.
        unsafe { *self.lock.across_fork.get() = self.signals.take() };
        std::mem::forget(self);
    }
}

impl<T> Deref for Guard<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard proves that the mutex is held. The reference borrows the guard, so it
        // ends before the mutex is released and before a mutable one begins.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard proves that the mutex is held. The reference borrows the guard mutably,
        // so no other reference into the data exists.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the mutex. The fields are dropped after this, so signals stay
        // blocked until the mutex is free.
        unsafe { libc::pthread_mutex_unlock(self.lock.mutex.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static COUNTER: Lock<u64> = Lock::new(0);
    static KEPT: Lock<u64> = Lock::new(7);
    static TRIED: Lock<u64> = Lock::new(0);

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
    fn a_failed_try_leaves_the_lock_held() {
        let guard = TRIED.lock();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                assert!(scope.spawn(|| TRIED.try_lock().is_none()).join().unwrap());
            }
        });
        drop(guard);
    }

    #[test]
    fn a_child_resets_what_a_thread_of_its_parent_held() {
        static HELD: Lock<u64> = Lock::new(0);
        assert!(HELD.reset(), "nobody holds it");
        std::mem::forget(HELD.lock());
        assert!(!HELD.reset());
        assert!(HELD.try_lock().is_some());
    }

    #[test]
    fn is_held_across_a_fork() {
        KEPT.lock().keep_across_fork();
        std::thread::scope(|scope| assert!(scope.spawn(|| KEPT.try_lock().is_none()).join().unwrap()));
        // SAFETY: this thread kept the lock above, and takes it back once.
        let guard = unsafe { KEPT.after_fork() };
        assert_eq!(*guard, 7);
        drop(guard);
        assert!(KEPT.try_lock().is_some());
    }
}
