//! The event thread: reads the events of the tracking userfaultfd.
//!
//! A thread that forks, moves or unmaps registered memory waits until its event is read. It may
//! hold the lock: a forking thread does, and so does a guarded call on memory that could not be
//! taken from tracking. Where the lock is not free, events are read without it, stashed, and acted
//! upon later.
//!
//! The event of a fork brings a descriptor. The next child would inherit it, and could hold up the
//! first one's forks and unmappings as long as it lives. So it is closed before the lock is free,
//! or before another thread forks.
//!
//! Memory that is marked later at the same address must not be taken for that of an old event:
//! nothing is marked while events are stashed, and the other way round
//! ([`interlock`](crate::runtime::interlock)).

use std::thread;
use std::time::Duration;

use kmem::range::Range;
use kmem::uffd::{Event, Uffd};
use rustix::io::Errno;

use crate::runtime::descriptors::Descriptor;
use crate::runtime::heap;
use crate::runtime::interlock::INTERLOCK;
use crate::runtime::lock::Guard;
use crate::runtime::poll;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::waker::{STOP, WAKE};

/// Pause between two rounds, while it waits for the lock or for a fork's end.
const PAUSE: Duration = Duration::from_micros(100);

/// Pause between two rounds where `poll(2)` is refused.
const BLIND_PAUSE: Duration = Duration::from_millis(5);

/// Events that a stash holds before it grows.
const STASH: usize = 4096;
// See `Stash::new`.
const _: () = assert!(STASH * size_of::<Event>() > heap::LARGEST);

/// Events that were read, and not acted upon yet.
struct Stash {
    forks: usize,
    others: Vec<Event>,
}

impl Stash {
    /// Pieces as large as it are mappings of their own, made without the heap's lock: a forking
    /// thread holds that, and waits until this one reads its event.
    fn new() -> Self {
        let mut others = Vec::new();
        // Without memory it is tried again with the first event.
        let _ = others.try_reserve_exact(STASH);
        Self { forks: 0, others }
    }

    fn is_empty(&self) -> bool {
        self.forks == 0 && self.others.is_empty()
    }
}

/// Reads events until [`STOP`] rings, or the userfaultfd fails or is lost. `ready` is called when
/// that begins: a thread that starts allocates, and a forking thread may hold the heap.
pub(super) fn watch(uffd: &Descriptor<Uffd>, ready: impl FnOnce()) {
    let mut stash = Stash::new();
    // To read a fork's event takes a free descriptor. When the program has none left, closing this
    // one makes room.
    let mut spare = STOP.keep_spare();
    ready();
    loop {
        let mut fds = [poll::interest(uffd.number(), libc::POLLIN), poll::interest(STOP.fd(), libc::POLLIN)];
        if stash.is_empty() && !poll::wait(&mut fds, -1) {
            // Fewer descriptors are allowed than poll(2) is given (RLIMIT_NOFILE). Threads wait for
            // their events all the same.
            thread::sleep(BLIND_PAUSE);
        }
        let is_over = fds[1].fd < 0 || fds[1].revents != 0 || fds[0].revents & !libc::POLLIN != 0;
        if is_over || !uffd.is_intact() {
            STOP.close();
            STOP.forget_spare();
            // Nobody acts on what is stashed any more.
            INTERLOCK.end_stash();
            return;
        }
        let read = match STATE.try_lock() {
            Some(state) => act_on_all(state, uffd, &mut stash),
            None => match read_to_stash(uffd, &mut stash) {
                Ok(true) => continue,
                nothing => nothing.map(drop),
            },
        };
        if read.is_ok() {
            spare = spare.or_else(|| STOP.keep_spare());
        } else {
            STOP.forget_spare();
            spare = None;
        }
        thread::sleep(PAUSE);
    }
}

/// Reads one event without the lock. False if there is none, or if memory is being marked.
fn read_to_stash(uffd: &Uffd, stash: &mut Stash) -> Result<bool, Errno> {
    if !INTERLOCK.begin_reading() {
        return Ok(false);
    }
    let event = uffd.read_event();
    let event = event.map(|event| event.map(|event| without_descriptor(event, stash)));
    if stash.is_empty() {
        INTERLOCK.end_reading();
    } else {
        INTERLOCK.stash();
    }
    event.map(|event| event.is_some())
}

/// Stashes an event. The descriptor of a fork is closed, which unregisters the child's copy.
fn without_descriptor(event: Event, stash: &mut Stash) {
    match event {
        Event::Fork { child } => {
            drop(child);
            stash.forks += 1;
        }
        other => stash.others.push(other),
    }
}

/// Acts on the stashed events and on those that can be read.
fn act_on_all(mut state: Guard<State>, uffd: &Uffd, stash: &mut Stash) -> Result<(), Errno> {
    (0..std::mem::take(&mut stash.forks)).for_each(|_| count(&mut state));
    stash.others.drain(..).for_each(|event| act(&mut state, event));
    INTERLOCK.end_stash();
    let read = loop {
        match uffd.read_event() {
            Ok(Some(event)) => act(&mut state, event),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    drop(state);
    WAKE.wake();
    read
}

fn act(state: &mut State, event: Event) {
    match event {
        Event::Fork { child } => {
            // Closing it unregisters the child's copy.
            drop(child);
            count(state);
        }
        Event::Unmap(range) => lose(state, range),
        Event::Remap { from, to, len } => {
            // Fails only where nothing is mapped.
            let _ = state.uffds.untrack(Range::new(to, len));
            follow(state, Range::new(from, len), to);
        }
        Event::Remove(_) | Event::Pagefault { .. } => {}
    }
}

/// Counts a fork that the kernel has reported.
fn count(state: &mut State) {
    if state.regions.is_inherited() {
        state.uplink.control.count_fork();
    }
}

/// Mappings moved without the guards' knowledge. They map their frames at the new address.
fn follow(state: &mut State, from: Range, to: usize) {
    for (id, run) in state.regions.pieces(from) {
        let Some(bytes) = state.regions.bytes(id, run) else { continue };
        state.leave(id, run, Some(to + (bytes.start - from.start)));
    }
}

/// Mappings went away without the guards' knowledge.
fn lose(state: &mut State, range: Range) {
    for (id, run) in state.regions.pieces(range) {
        state.give_up(id, run);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::runtime::heap::HEAP;

    #[test]
    fn an_event_is_stashed_while_a_fork_holds_the_heap() {
        static READY: AtomicBool = AtomicBool::new(false);
        static HELD: AtomicBool = AtomicBool::new(false);
        static STASHED: AtomicBool = AtomicBool::new(false);
        let stashing = thread::spawn(|| {
            let mut stash = Stash::new();
            READY.store(true, Ordering::SeqCst);
            while !HELD.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // It grows in between.
            (0..=STASH).for_each(|_| without_descriptor(Event::Remove(Range::new(0, 0)), &mut stash));
            STASHED.store(true, Ordering::SeqCst);
        });
        while !READY.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        HEAP.hold();
        HELD.store(true, Ordering::SeqCst);
        for _ in 0..500 {
            if STASHED.load(Ordering::SeqCst) {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let stashed_meanwhile = STASHED.load(Ordering::SeqCst);
        HEAP.release();
        stashing.join().unwrap();
        assert!(stashed_meanwhile, "the event thread waits for the heap, and the fork for it");
    }
}
