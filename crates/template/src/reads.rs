//! A file that each copy reads into its heap is there once (fread(3)).
//!
//! QEMU reads the guest's kernel (`-kernel`) so, for the next reboot: half of what a clone takes.
//! Here the pages of such a buffer are mapped, private, from a file in memory that the template
//! makes for the first copy that asks. The buffer seldom begins where a page of the file does, so
//! the template's file leaves out as many bytes of the beginning (the *shift*) as let the pages
//! agree. What is left of the buffer before its first page and behind its last one is read.
//!
//! Only large buffers of malloc(3) are taken: a mapping of its own, in which the buffer begins
//! behind two words. Everything else is the C library's to do.

#![allow(unsafe_code)] // Defines a symbol of the C library, and maps memory.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use kmem::memfd;
use kmem::range::Range;
use kmem::seqpacket::Conn;
use kmem::{PAGE_SIZE, mm};
use rustix::event::{PollFd, PollFlags, poll};

/// Smaller reads are the C library's, in bytes.
const SMALLEST: usize = 1 << 20;
/// Longer files are not kept in memory, in bytes.
const LARGEST: u64 = 256 << 20;
/// Bytes that the template reads at once: malloc(3) would map a larger buffer, and fewer later.
const PIECE: usize = 64 << 10;
/// Bytes of malloc's words before a buffer.
const HEAD: usize = 16;
/// In the second of them: the buffer has a mapping of its own. The lower bits are no length.
const IS_MAPPED: usize = 2;
const BITS: usize = 7;

/// Where a copy asks its template. Unset: this process is no copy.
static TEMPLATE: OnceLock<Conn> = OnceLock::new();
/// The C library's function.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// From now on this process, a copy, asks here.
pub(crate) fn ask_at(template: Conn) {
    let _ = TEMPLATE.set(template);
}

/// fread(3).
///
/// # Safety
///
/// The buffer has room for `size * count` bytes, and the file is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fread(buffer: *mut c_void, size: usize, count: usize, file: *mut libc::FILE) -> usize {
    // SAFETY: the program makes this very call.
    unsafe {
        if let Some(template) = TEMPLATE.get()
            && let Some(bytes) = size.checked_mul(count).filter(|&bytes| bytes >= SMALLEST)
            && is_buffer(buffer as usize, bytes)
            && let Some(done) = read(template, buffer as usize, bytes, file)
        {
            return if done { count } else { 0 };
        }
        real(buffer, size, count, file)
    }
}

/// Calls the C library's fread(3).
///
/// # Safety
///
/// As fread(3): the buffer has room for `size * count` bytes, and the file is open.
unsafe fn real(buffer: *mut c_void, size: usize, count: usize, file: *mut libc::FILE) -> usize {
    let mut real = REAL.load(Ordering::Relaxed);
    if real.is_null() {
        // SAFETY: the name is a C string.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"fread".as_ptr()) };
        REAL.store(real, Ordering::Relaxed);
    }
    if real.is_null() {
        return 0;
    }
    type Fread = unsafe extern "C" fn(*mut c_void, usize, usize, *mut libc::FILE) -> usize;
    // SAFETY: the C library's function of that name has this type. The caller makes this very call.
    unsafe { std::mem::transmute::<*mut c_void, Fread>(real)(buffer, size, count, file) }
}

/// Whether a buffer has a mapping of malloc's for itself.
///
/// # Safety
///
/// The buffer can be read.
unsafe fn is_buffer(buffer: usize, bytes: usize) -> bool {
    if buffer % PAGE_SIZE != HEAD {
        return false;
    }
    // SAFETY: the words lie in the buffer's first page, which can be read.
    let [before, len] = unsafe { *((buffer - HEAD) as *const [usize; 2]) };
    let end = (buffer - HEAD).wrapping_add(len & !BITS);
    before == 0 && len & BITS == IS_MAPPED && end.is_multiple_of(PAGE_SIZE) && buffer + bytes <= end
}

/// Reads this number of bytes, by mapping whole pages, and says whether all could be read. `None`:
/// it cannot, and has read nothing.
///
/// # Safety
///
/// As fread(3), and the buffer is one of malloc's mappings ([`is_buffer`]).
unsafe fn read(template: &Conn, buffer: usize, bytes: usize, file: *mut libc::FILE) -> Option<bool> {
    let start = buffer.next_multiple_of(PAGE_SIZE);
    let pages = Range::new(start, (buffer + bytes) / PAGE_SIZE * PAGE_SIZE - start);
    let (head, tail) = (pages.start - buffer, buffer + bytes - pages.end());
    // SAFETY: the program has passed an open file.
    let (fd, begin) = unsafe { (libc::fileno(file), libc::ftell(file)) };
    let first = usize::try_from(begin).ok()? + head;
    let shift = first % PAGE_SIZE;
    let kept = ask(template, fd, shift as u16, (first - head + bytes) as u64)?;
    // SAFETY: the pages lie in a buffer that the program wants filled. They are malloc's mapping,
    // which malloc unmaps whole, whatever is mapped there. The file is sealed.
    unsafe { mm::map_fixed_private(kept.as_fd(), pages, (first - shift) as u64) }.ok()?;
    // SAFETY: the program has passed an open file and a buffer of this length.
    let is_read = unsafe {
        real(buffer as *mut c_void, 1, head, file) == head
            && libc::fseek(file, pages.len as libc::c_long, libc::SEEK_CUR) == 0
            && real(pages.end() as *mut c_void, 1, tail, file) == tail
    };
    // SAFETY: the program has passed an open file.
    let can_be_read = is_read || unsafe { libc::fseek(file, begin, libc::SEEK_SET) } != 0;
    can_be_read.then_some(is_read)
}

/// Asks for the file in memory, which has all bytes before `end`.
fn ask(template: &Conn, fd: c_int, shift: u16, end: u64) -> Option<OwnedFd> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the program has passed the file, and it stays open during the call. It is not closed
    // here.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let meta = file.metadata().ok().filter(|meta| meta.is_file() && (end..=LARGEST).contains(&meta.len()))?;
    let (ours, theirs) = Conn::pair().ok()?;
    template.send(&shift.to_le_bytes(), &[file.as_fd(), theirs.as_fd()]).ok()?;
    drop(theirs);
    let (mut byte, mut kept) = ([0], Vec::new());
    loop {
        match ours.recv(&mut byte, &mut kept) {
            Ok(None) => wait(&[ours.as_fd()]),
            // The template is gone, or cannot make one.
            Ok(Some(0)) | Err(_) => return None,
            Ok(Some(_)) => break,
        }
    }
    let kept = kept.pop()?;
    let has = rustix::fs::fstat(&kept).ok()?.st_size as u64;
    (has >= meta.len() - u64::from(shift)).then_some(kept)
}

/// Waits until there is something to receive from one of them.
pub(crate) fn wait(all: &[BorrowedFd<'_>]) {
    let mut all: Vec<_> = all.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let _ = poll(&mut all, None);
}

/// What a file in memory is of: device, inode, length, time of the last change; and the shift.
type Key = (u64, u64, u64, i64, i64, u16);

/// The files in memory, on the template's side.
#[derive(Default)]
pub(crate) struct Files(Vec<(Key, OwnedFd)>);

impl Files {
    /// Answers a copy that asks for one.
    pub(crate) fn answer(&mut self, shift: u16, file: OwnedFd, answer: OwnedFd) {
        if let Ok(kept) = self.get(shift, &File::from(file)) {
            let _ = Conn::from_fd(answer).send(&[1], &[kept]);
        }
    }

    fn get(&mut self, shift: u16, file: &File) -> io::Result<BorrowedFd<'_>> {
        let meta = file.metadata()?;
        let key = (meta.dev(), meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec(), shift);
        let at = match self.0.iter().position(|(of, _)| *of == key) {
            Some(at) => at,
            None => {
                self.0.push((key, keep(file, u64::from(shift), meta.len())?));
                self.0.len() - 1
            }
        };
        Ok(self.0[at].1.as_fd())
    }
}

/// A file in memory with the bytes from `shift` on, and zeros up to a page's end.
fn keep(file: &File, shift: u64, end: u64) -> io::Result<OwnedFd> {
    let len = end.checked_sub(shift).filter(|_| end <= LARGEST).ok_or(io::ErrorKind::InvalidInput)?;
    let fill = |kept: &OwnedFd| {
        let (kept, mut at) = (File::from(kept.try_clone()?), 0);
        let mut bytes = vec![0; PIECE];
        while at < len {
            let some = (len - at).min(PIECE as u64) as usize;
            file.read_exact_at(&mut bytes[..some], shift + at)?;
            kept.write_all_at(&bytes[..some], at)?;
            at += some as u64;
        }
        Ok(())
    };
    memfd::create_written("pageone-read", len.next_multiple_of(PAGE_SIZE as u64) as usize, fill)
}
