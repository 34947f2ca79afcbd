//! Reading the program's memory so that nothing there ends the program.
//!
//! A dereference could: memory may be gone (glibc unmaps inside `free`, past every guard),
//! protected, or poisoned. The agent's threads block SIGBUS, so the kernel would kill the program
//! instead of letting it handle the error.
//!
//! What is read in bulk is asked for first ([`readable`], by a system call that reads a byte of
//! each page). What is copied is read as another process would ([`Buffer`]).

#![allow(unsafe_code)] // Advises on the program's memory.

use kmem::procmem::{OWN_PARTS, read_own, read_own_parts};
use kmem::range::Range;
use kmem::{PAGE_SIZE, raw};
use rustix::io::Errno;

/// How many pages can be read from the front.
pub(crate) fn readable(place: Range) -> usize {
    let mut done = 0;
    while done < place.pages() {
        let pages = (done..place.pages()).take(OWN_PARTS);
        let count = pages.len();
        // A byte of each shows it.
        match read_own_parts(pages.map(|page| place.start + page * PAGE_SIZE), 1, &mut [0; OWN_PARTS]) {
            Ok(read) if read == count => done += read,
            Ok(read) => return done + read,
            Err(_) => {
                let rest = Range::new(place.start + done * PAGE_SIZE, place.len - done * PAGE_SIZE);
                return done + readable_by_advice(rest);
            }
        }
    }
    done
}

/// The same, where the call is not to be had: five times as slow.
fn readable_by_advice(place: Range) -> usize {
    // SAFETY: the advice changes no bytes and no access.
    let can_read = |part: Range| unsafe { raw::madvise(part.start, part.len, libc::MADV_POPULATE_READ) }.is_ok();
    if can_read(place) {
        return place.pages();
    }
    let page = |i: usize| Range::new(place.start + i * PAGE_SIZE, PAGE_SIZE);
    (0..place.pages()).position(|i| !can_read(page(i))).unwrap_or(place.pages())
}

/// Which pages of a place are in memory, so that reading them neither waits nor fails.
pub(crate) struct Presence(Vec<u8>);

impl Presence {
    /// Asks the kernel (`mincore(2)`). Where it does not say, none is. The place is private memory.
    pub(crate) fn of(place: Range) -> Self {
        let mut pages = vec![0; place.pages()];
        // SAFETY: the kernel writes one byte for each page of the place, for which there is room.
        let said = unsafe { libc::mincore(place.start as *mut _, place.len, pages.as_mut_ptr()) };
        if said != 0 {
            pages.fill(0);
        }
        Self(pages)
    }

    /// Whether all of these pages are.
    pub(crate) fn all(&self, first: usize, count: usize) -> bool {
        self.0[first..first + count].iter().all(|page| page & 1 == 1)
    }
}

/// An empty vector with room. The program, which may have limited itself, is not ended for it.
pub(crate) fn reserve(len: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| Errno::NOMEM)?;
    Ok(bytes)
}

/// Room for pages that are read.
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    /// Room for `pages` pages. `ENOMEM`: the program may map no more (`RLIMIT_AS`).
    pub(crate) fn new(pages: usize) -> Result<Self, Errno> {
        let mut bytes = reserve(pages * PAGE_SIZE)?;
        bytes.resize(pages * PAGE_SIZE, 0);
        Ok(Self(bytes))
    }

    /// Reads pages; returns those that could be read from the front, one behind the other.
    pub(crate) fn read(&mut self, place: Range) -> &[u8] {
        let pages = read_own(place, &mut self.0);
        &self.0[..pages * PAGE_SIZE]
    }
}
