//! `io_uring(7)`: many reads at once, and work while a read or write is under way.
//!
//! Each thread has a ring of its own, made when it is first needed. Where the kernel or a filter
//! refuses it, and with [`disable`], the callers fall back to `pread(2)` and `pwrite(2)`.
//!
//! Every call waits for all of its own requests before it returns, also when a closure panics, so
//! no request outlives the memory it was given.

#![allow(unsafe_code)] // Requests hold pointers to the caller's memory.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, squeue, types};

use crate::disk::medium::ReadPiece;

/// Requests in flight on one ring.
const DEPTH: usize = 32;

static DISABLED: AtomicBool = AtomicBool::new(false);

/// Does without `io_uring` from now on, in the whole process.
pub fn disable() {
    DISABLED.store(true, Ordering::Relaxed);
}

enum State {
    Untried,
    Refused,
    Ready(Box<IoUring>),
}

thread_local! {
    static RING: RefCell<State> = const { RefCell::new(State::Untried) };
}

/// Runs `f` on this thread's ring; `None` when there is none.
fn with_ring<R>(f: impl FnOnce(&mut IoUring) -> R) -> Option<R> {
    if DISABLED.load(Ordering::Relaxed) {
        return None;
    }
    RING.with(|cell| {
        let mut state = cell.try_borrow_mut().ok()?;
        if matches!(*state, State::Untried) {
            *state = IoUring::new(DEPTH as u32).map_or(State::Refused, |ring| State::Ready(Box::new(ring)));
        }
        match &mut *state {
            State::Ready(ring) => Some(f(ring)),
            _ => None,
        }
    })
}

/// Requests under way. Dropping it waits for them.
struct Flight<'a> {
    ring: &'a mut IoUring,
    flying: usize,
}

impl Flight<'_> {
    /// Queues a request.
    ///
    /// # Safety
    /// The memory that it names must stay valid, and for reads untouched, until this `Flight` is
    /// gone.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory outlives the flight, as promised by the caller. The queue has room:
        // never more than DEPTH fly.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            self.flying += 1;
        }
    }

    /// Waits until at least one request, if any, is complete; gives each its number and result.
    fn land(&mut self, mut each: impl FnMut(u64, i32)) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(self.flying.min(1)) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(_) => break,
            }
        }
        let done: Vec<_> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
        self.flying -= done.len();
        done.into_iter().for_each(|(number, result)| each(number, result));
        Ok(())
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        while self.flying > 0 {
            if self.land(|_, _| {}).is_err() {
                // The kernel may still write to the caller's memory: there is no safe way on.
                std::process::abort();
            }
        }
    }
}

fn check(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// Whether an error only says that this ring cannot do it, so that the plain call should be tried.
fn unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EAGAIN | libc::EINTR))
}

/// Reads every piece; false when it could not be done this way and nothing is known of any piece.
pub(crate) fn read_many(fd: BorrowedFd<'_>, pieces: &mut [ReadPiece<'_>]) -> io::Result<bool> {
    let fd = types::Fd(fd.as_raw_fd());
    let run = |ring: &mut IoUring| -> io::Result<bool> {
        let mut flight = Flight { ring, flying: 0 };
        let (mut next, mut whole, mut failed) = (0, true, None);
        let lengths: Vec<usize> = pieces.iter().map(|piece| piece.into.len()).collect();
        while next < pieces.len() || flight.flying > 0 {
            while next < pieces.len() && flight.flying < DEPTH {
                let piece = &mut pieces[next];
                let read = opcode::Read::new(fd, piece.into.as_mut_ptr(), piece.into.len() as u32)
                    .offset(piece.offset)
                    .build()
                    .user_data(next as u64);
                // SAFETY: the piece is borrowed exclusively for longer than the flight lives.
                unsafe { flight.push(&read) };
                next += 1;
            }
            flight.land(|number, result| match check(result) {
                Ok(read) => whole &= read == lengths[number as usize],
                Err(e) if unsupported(&e) => whole = false,
                Err(e) => failed = Some(e),
            })?;
        }
        failed.map_or(Ok(whole), Err)
    };
    with_ring(run).unwrap_or(Ok(false))
}

/// Syncs two files at the same time, as `fdatasync(2)` does. `None`: nothing is known of either.
pub(crate) fn sync_both(fds: [BorrowedFd<'_>; 2]) -> Option<io::Result<()>> {
    let result = with_ring(|ring| {
        let mut flight = Flight { ring, flying: 0 };
        for fd in fds {
            let sync = opcode::Fsync::new(types::Fd(fd.as_raw_fd())).flags(types::FsyncFlags::DATASYNC).build();
            // SAFETY: the request names no memory.
            unsafe { flight.push(&sync) };
        }
        let mut results = Vec::new();
        while flight.flying > 0 {
            flight.land(|_, code| results.push(check(code).map(drop)))?;
        }
        // An error of the medium is reported once: it counts more than that the ring cannot do it.
        let (refused, failed): (Vec<_>, Vec<_>) = results.into_iter().filter_map(Result::err).partition(unsupported);
        match (failed.into_iter().next(), refused.is_empty()) {
            (Some(error), _) => Err(error),
            (None, whole) => Ok(whole),
        }
    })?;
    match result {
        Ok(true) => Some(Ok(())),
        Ok(false) => None,
        Err(e) => Some(Err(e)),
    }
}

/// Bytes of one request of [`read_while`], and the most of one of [`write_while`].
pub(crate) const REQUEST: usize = 1 << 20;

/// Requests of [`write_while`] in flight.
const WRITES: usize = 4;

/// Writes the parts, one behind the other, several at a time, and gives each, in order, to
/// `meanwhile` while it is being written. `None`: nothing was done. `Some(false)`: not all was
/// written, and where not is not known.
pub(crate) fn write_while(
    fd: BorrowedFd<'_>,
    parts: &[&[u8]],
    mut offset: u64,
    meanwhile: &mut dyn FnMut(&[u8]),
) -> Option<io::Result<bool>> {
    let fd = types::Fd(fd.as_raw_fd());
    if parts.iter().any(|part| part.len() > REQUEST) {
        return None;
    }
    with_ring(|ring| {
        let mut flight = Flight { ring, flying: 0 };
        let (mut next, mut given) = (0, 0);
        let (mut whole, mut failed) = (true, None);
        while given < parts.len() || flight.flying > 0 {
            while next < parts.len() && flight.flying < WRITES && failed.is_none() {
                let write = opcode::Write::new(fd, parts[next].as_ptr(), parts[next].len() as u32);
                let write = write.offset(offset).build().user_data(next as u64);
                // SAFETY: the parts are borrowed for longer than the flight lives.
                unsafe { flight.push(&write) };
                offset += parts[next].len() as u64;
                next += 1;
            }
            if given < next {
                flight.ring.submit()?;
                parts[given..next].iter().for_each(|part| meanwhile(part));
                given = next;
            }
            flight.land(|number, code| match check(code) {
                Ok(done) => whole &= done == parts[number as usize].len(),
                Err(e) if unsupported(&e) => whole = false,
                Err(e) => failed = Some(e),
            })?;
            if failed.is_some() {
                break;
            }
        }
        drop(flight);
        failed.map_or(Ok(whole), Err)
    })
}

/// Requests of [`read_while`] in flight.
const READS: usize = 4;

/// Fills `into`, in several requests at a time, and gives each part, with its place, to `landed`
/// when it is there, while others are still under way. `None`: nothing was done.
pub(crate) fn read_while(
    file: &File,
    into: &mut [u8],
    offset: u64,
    landed: &mut dyn FnMut(usize, &mut [u8]),
) -> Option<io::Result<()>> {
    let fd = types::Fd(file.as_raw_fd());
    with_ring(|ring| {
        let mut parts: Vec<&mut [u8]> = into.chunks_mut(REQUEST).collect();
        let mut flight = Flight { ring, flying: 0 };
        let (mut next, mut failed) = (0, None);
        while (next < parts.len() && failed.is_none()) || flight.flying > 0 {
            while next < parts.len() && failed.is_none() && flight.flying < READS {
                let part = &mut *parts[next];
                let read = opcode::Read::new(fd, part.as_mut_ptr(), part.len() as u32);
                let read = read.offset(offset + (next * REQUEST) as u64).build().user_data(next as u64);
                // SAFETY: the part is borrowed exclusively for longer than the flight lives, and
                // not looked at before it has landed.
                unsafe { flight.push(&read) };
                next += 1;
            }
            flight.land(|number, code| {
                let at = number as usize * REQUEST;
                let part = &mut *parts[number as usize];
                let result = match check(code) {
                    Ok(done) if done == part.len() => Ok(()),
                    Err(e) if !unsupported(&e) => Err(e),
                    // In part, or not this way.
                    _ => file.read_exact_at(part, offset + at as u64),
                };
                match result {
                    Ok(()) => landed(at, part),
                    Err(e) => failed = failed.take().or(Some(e)),
                }
            })?;
        }
        failed.map_or(Ok(()), Err)
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn more_parts_than_fly_at_a_time_land_in_their_places() {
        let file = tempfile::tempfile().unwrap();
        // Of several lengths, so that a wrong offset shows.
        let parts: Vec<Vec<u8>> = (1..40u8).map(|i| vec![i; usize::from(i) * 1000]).collect();
        let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        let mut seen = Vec::new();
        let done = write_while(file.as_fd(), &parts, 5, &mut |part| seen.push(part[0]));
        let Some(done) = done else { return eprintln!("SKIPPED: the kernel refuses io_uring") };
        assert!(done.unwrap());
        assert_eq!(seen, (1..40).collect::<Vec<u8>>());
        let mut bytes = vec![0; parts.concat().len()];
        file.read_exact_at(&mut bytes, 5).unwrap();
        assert_eq!(bytes, parts.concat());
    }

    #[test]
    fn every_part_that_is_read_is_given_once() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..REQUEST * 20 + 4096).map(|at| (at / 4096) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let (mut into, mut parts) = (vec![0; bytes.len()], Vec::new());
        let done = read_while(&file, &mut into, 0, &mut |at, part| {
            assert_eq!(part, &bytes[at..at + part.len()]);
            parts.push((at, part.len()));
        });
        let Some(done) = done else { return eprintln!("SKIPPED: the kernel refuses io_uring") };
        done.unwrap();
        parts.sort_unstable();
        assert_eq!(parts.iter().map(|part| part.1).sum::<usize>(), bytes.len());
        assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0) && into == bytes);
    }
}
