//! What the kernel and devices read and write by references of their own: pinned buffers, pipes,
//! direct I/O.

#![allow(unsafe_code)] // Hands buffers to io_uring.

use std::ops::Range;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};

use crate::arena::{ALPHABET, PAGE, content};
use crate::client::{Client, Pending, bytes};
use crate::ops::{readable, writable};
use crate::{finding, sys};

/// A buffer that is registered, which pins its pages.
pub(crate) struct Pin {
    ring: IoUring,
    /// Where it was when it was registered: the ring goes on calling it so.
    start: usize,
    /// Where its pages are now.
    pages: Vec<Option<(usize, usize)>>,
}

impl Pin {
    fn new(start: usize, arena: usize, pages: Range<usize>) -> Result<Self, i32> {
        let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(0);
        let ring = IoUring::new(4).map_err(errno)?;
        let buffer = libc::iovec { iov_base: start as *mut _, iov_len: bytes(&pages) };
        // SAFETY: a range of an arena, used by raw pointers only. It stays mapped while it is
        // pinned, and the pin holds its pages in any case.
        unsafe { ring.submitter().register_buffers(&[buffer]) }.map_err(errno)?;
        Ok(Self { ring, start, pages: pages.map(|page| Some((arena, page))).collect() })
    }

    pub(crate) fn release(self) {
        let _ = self.ring.submitter().unregister_buffers();
    }

    /// A page of it was moved.
    pub(crate) fn moved(&mut self, from: (usize, usize), to: (usize, usize)) {
        self.pages.iter_mut().filter(|page| **page == Some(from)).for_each(|page| *page = Some(to));
    }

    /// A page of it is gone.
    pub(crate) fn forget(&mut self, gone: (usize, usize)) {
        self.pages.iter_mut().filter(|page| **page == Some(gone)).for_each(|page| *page = None);
    }

    /// Reads a page of a file into a page of the buffer, or writes it; the result as read(2) has
    /// it.
    fn transfer(&mut self, fd: i32, at: usize, offset: usize, write: bool) -> i32 {
        let (place, fd) = ((self.start + at * PAGE) as *mut u8, types::Fd(fd));
        let entry = match write {
            true => opcode::WriteFixed::new(fd, place, PAGE as u32, 0).offset(offset as u64).build(),
            false => opcode::ReadFixed::new(fd, place, PAGE as u32, 0).offset(offset as u64).build(),
        };
        // SAFETY: the buffer is registered, and the entry within it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return -libc::EBUSY;
        }
        while let Err(error) = self.ring.submit_and_wait(1) {
            if error.raw_os_error() != Some(libc::EINTR) {
                return -error.raw_os_error().unwrap_or(0);
            }
        }
        self.ring.completion().next().map_or(-libc::EIO, |done| done.result())
    }
}

pub(crate) fn pin(client: &mut Client) {
    let holds = |meta: &crate::arena::Meta, now| readable(meta, now) && !meta.no_write;
    let Some((arena, pages)) = client.choose(holds) else { return };
    let start = client.arenas[arena].at(pages.start);
    match Pin::new(start, arena, pages.clone()) {
        Ok(pin) => {
            let due = client.later(30, 150);
            client.arenas[arena].set(pages.clone(), |meta| meta.pinned = meta.pinned.max(due));
            client.add(due, Pending::Pin(Box::new(pin)));
            client.check(arena, pages, "pinned memory");
        }
        // io_uring may be forbidden, and the pins of a user are limited.
        Err(errno) => finding::about(&[errno as usize]),
    }
}

pub(crate) fn pin_io(client: &mut Client) {
    let (choice, at, first) = (client.random.next(), client.random.next(), client.random.below(ALPHABET));
    let write = client.random.once_in(3);
    let pins = client.pending.iter().filter(|(_, pending)| matches!(pending, Pending::Pin(_))).count();
    if pins == 0 {
        return;
    }
    let (fd, scratch) = (client.contents[0].as_raw_fd(), client.scratch.as_raw_fd());
    let direct = client.contents[1].as_raw_fd();
    let Client { pending, arenas, now, plain, .. } = client;
    let mut found = pending.iter_mut().filter_map(|(_, pending)| match pending {
        Pending::Pin(pin) => Some(pin.as_mut()),
        _ => None,
    });
    let Some(pin) = found.nth(choice as usize % pins) else { return };
    let count = pin.pages.len();
    for n in 0..count.min(8) {
        let at = (at as usize + n) % count;
        let Some((arena, page)) = pin.pages[at] else { continue };
        let arena = &mut arenas[arena];
        let meta = *arena.meta(page);
        let may_write = !meta.gone && !meta.marked && !meta.guard && meta.busy.max(meta.held).max(meta.kept) <= *now;
        if !may_write || meta.either {
            continue;
        }
        finding::about(&[at, page, usize::from(write)]);
        let number = (first + n as u64) % ALPHABET;
        let (fd, offset) = if write { (scratch, 0) } else { ([fd, direct][n % 2], number as usize * PAGE) };
        let done = pin.transfer(fd, at, offset, write);
        if done != PAGE as i32 {
            finding::report(format_args!("a registered buffer's transfer gives {done}"), arena.at(page));
        }
        if write {
            let _ = sys::pread(scratch, plain.at(0), PAGE, 0);
            arena.compare(page, plain.at(0), "what a device read from pinned memory");
        } else {
            arena.note(page, 0, content(number));
            arena.check(page..page + 1, *now, "what a device wrote to pinned memory");
        }
    }
}

/// Reads contents by read(2), buffered or direct.
pub(crate) fn read_file(client: &mut Client) {
    let (file, first) = (client.random.below(2) as usize, client.random.below(ALPHABET - 64));
    let Some((arena, pages)) = client.choose_most(64, writable) else { return };
    let (start, offset) = (client.arenas[arena].at(pages.start), first as usize * PAGE);
    let done = sys::pread(client.contents[file].as_raw_fd(), start, bytes(&pages), offset);
    if done != Ok(bytes(&pages)) {
        finding::report(format_args!("read of {} bytes gives {done:?}", bytes(&pages)), start);
    }
    for (n, page) in pages.clone().enumerate() {
        client.arenas[arena].note(page, 0, content(first + n as u64));
    }
    client.check(arena, pages, "what was read from a file");
}

/// Writes pages to a file past the page cache, and reads what came there.
pub(crate) fn write_file(client: &mut Client) {
    let holds = |meta: &crate::arena::Meta, now| readable(meta, now) && !meta.either;
    let Some((arena, pages)) = client.choose_most(32, holds) else { return };
    let start = client.arenas[arena].at(pages.start);
    let done = sys::pwrite(client.scratch.as_raw_fd(), start, bytes(&pages), 0);
    if done != Ok(bytes(&pages)) {
        finding::report(format_args!("write of {} bytes gives {done:?}", bytes(&pages)), start);
    }
    let _ = sys::pread(client.scratch.as_raw_fd(), client.plain.at(0), bytes(&pages), 0);
    for (n, page) in pages.enumerate() {
        client.arenas[arena].compare(page, client.plain.at(n), "what was written to a file");
    }
}

/// Leaves references to pages in a pipe, also by way of another pipe.
pub(crate) fn splice(client: &mut Client) {
    let holds = |meta: &crate::arena::Meta, now| readable(meta, now) && !meta.either;
    let Some((arena, pages)) = client.choose_most(32, holds) else { return };
    let Ok((reader, writer)) = sys::pipe(32) else { return };
    let done = sys::vmsplice(writer, client.arenas[arena].at(pages.start), bytes(&pages));
    if done != Ok(bytes(&pages)) {
        finding::report(format_args!("vmsplice of {pages:?} gives {done:?}"), client.arenas[arena].at(pages.start));
    }
    let mut pipe = reader;
    if client.random.once_in(2)
        && let Ok((second, other)) = sys::pipe(32)
    {
        if sys::splice(reader, other, bytes(&pages)) == Ok(bytes(&pages)) {
            sys::close(reader);
            pipe = second;
        } else {
            sys::close(second);
        }
        sys::close(other);
    }
    sys::close(writer);
    let due = client.later(20, 1500);
    let wanted = pages.clone().flat_map(|page| client.arenas[arena].wanted(page)).collect();
    client.arenas[arena].set(pages, |meta| meta.kept = meta.kept.max(due));
    client.add(due, Pending::Splice { pipe, wanted });
}

/// The first page that is not as wanted.
fn differing(wanted: &[u8], found: &[u8]) -> Option<usize> {
    wanted.chunks(PAGE).zip(found.chunks(PAGE)).position(|(wanted, found)| wanted != found)
}

impl Client {
    pub(crate) fn splice_done(&mut self, pipe: i32, wanted: &[u8]) {
        let mut found = vec![0; wanted.len()];
        let mut have = 0;
        while have < found.len() {
            match sys::read(pipe, &mut found[have..]) {
                Ok(count @ 1..) => have += count,
                other => finding::report(format_args!("a pipe gives {other:?} after {have} bytes"), 0),
            }
        }
        sys::close(pipe);
        if let Some(page) = differing(wanted, &found) {
            let (wanted, found) = (&wanted[page * PAGE..], &found[page * PAGE..]);
            let at = wanted.iter().zip(found).position(|(a, b)| a != b).unwrap_or(0) & !7;
            let (wanted, found) = (&wanted[at..at + 8], &found[at..at + 8]);
            let what = format_args!("page {page} in a pipe: byte {at}: want {wanted:x?}, found {found:x?}");
            finding::report(what, 0);
        }
    }

    pub(crate) fn read_done(
        &mut self,
        thread: std::thread::JoinHandle<sys::Answer>,
        arena: usize,
        pages: Range<usize>,
        first: usize,
    ) {
        let done = thread.join().unwrap_or(Err(0));
        if done != Ok(bytes(&pages)) {
            finding::report(format_args!("a slow read gives {done:?}"), self.arenas[arena].at(pages.start));
        }
        for (n, page) in pages.clone().enumerate() {
            self.arenas[arena].note(page, 0, content((first + n) as u64));
        }
        self.arenas[arena].set(pages.clone(), |meta| meta.busy = 0);
        self.check(arena, pages, "what a slow device wrote");
    }

    pub(crate) fn write_done(&mut self, thread: std::thread::JoinHandle<sys::Answer>, wanted: &[u8], first: usize) {
        let done = thread.join().unwrap_or(Err(0));
        if done != Ok(wanted.len()) {
            finding::report(format_args!("a slow write gives {done:?}"), 0);
        }
        let Some(slow) = &self.slow else { return };
        let _ = sys::pread(slow.as_raw_fd(), self.plain.at(0), wanted.len(), first * PAGE);
        for (n, wanted) in wanted.chunks(PAGE).enumerate() {
            self.plain.note(n, 0, wanted);
        }
        self.plain.check(0..wanted.len() / PAGE, self.now, "what a slow device read");
    }
}

/// Starts reading the slow file into pages.
pub(crate) fn slow_read(client: &mut Client) {
    let first = client.random.below(ALPHABET) as usize;
    let Some((arena, pages)) = client.choose_most(8, |meta, now| writable(meta, now) && meta.pinned <= now) else {
        return;
    };
    let Some(fd) = client.slow.as_ref().map(AsRawFd::as_raw_fd) else { return };
    let (start, len) = (client.arenas[arena].at(pages.start), bytes(&pages));
    let thread = std::thread::spawn(move || sys::pread(fd, start, len, first * PAGE));
    let due = client.later(5, 60);
    client.arenas[arena].set(pages.clone(), |meta| meta.busy = due);
    client.add(due, Pending::Read { thread, arena, pages, first });
}

/// Starts writing pages to the slow file.
pub(crate) fn slow_write(client: &mut Client) {
    let holds = |meta: &crate::arena::Meta, now| readable(meta, now) && !meta.either;
    let Some((arena, pages)) = client.choose_most(8, holds) else { return };
    let Some(fd) = client.slow.as_ref().map(AsRawFd::as_raw_fd) else { return };
    let (start, len, first) = (client.arenas[arena].at(pages.start), bytes(&pages), client.slow_next);
    client.slow_next += pages.len();
    let wanted = pages.clone().flat_map(|page| client.arenas[arena].wanted(page)).collect();
    let thread = std::thread::spawn(move || sys::pwrite(fd, start, len, first * PAGE));
    let due = client.later(5, 60);
    client.arenas[arena].set(pages, |meta| meta.held = meta.held.max(due));
    client.add(due, Pending::Write { thread, wanted, first });
}
