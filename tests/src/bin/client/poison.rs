//! `poison PAGES BASE`: a program some of whose pages cannot be read any more.
//!
//! It fills its memory and marks it when told `mark`. `lose PAGE` makes the kernel answer as if the
//! memory of that page were broken, for this process only (`UFFDIO_POISON`). `break PAGE` breaks
//! the page's memory itself, as the machine does when it finds an error (`MADV_HWPOISON`). `swap
//! PAGE` writes to the page and has it swapped out at once. `go`
//! checks all pages and says how many cannot be read: a page that can be read must hold what was
//! written last. `protect` protects all memory and lifts that again, `fork` checks all in a child,
//! `renew PAGE` discards a page and fills it anew.
//!
//! Pages are read by the kernel, which says `EFAULT` where a plain read would end the process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as sys;
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Updater, opcode};

use e2e::pattern;

use crate::region::{PAGE, Region, WORDS};
use crate::{hear, say};

/// `UFFDIO_POISON`.
const POISON: Opcode = opcode::read_write::<sys::uffdio_poison>(0xaa, 8);

/// Serves the test until it lets go.
pub(crate) fn poison(pages: usize, base: u64) {
    let region = Region::unmarked(pages);
    let seed = |page: usize| (base << 32) + 1 + page as u64;
    (0..pages).for_each(|page| region.fill(page, seed(page)));
    let mut marked = false;
    say("ready");
    while let Some(line) = hear() {
        let (word, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let page: usize = number.parse().unwrap();
        let answer = match word {
            "mark" => {
                marked = true;
                done(region.advise(0..pages, libc::MADV_MERGEABLE))
            }
            "lose" => done(lose(&region, page, marked)),
            "swap" => {
                // A copy, which is swapped out before a scan sees it.
                region.fill(page, seed(page));
                done(raw_advise(&region, page, libc::MADV_PAGEOUT))
            }
            "break" => done(raw_advise(&region, page, libc::MADV_HWPOISON)),
            "renew" => {
                let discarded = region.advise(page..page + 1, libc::MADV_DONTNEED);
                let zeros = read(&region, page).is_some_and(|bytes| bytes.iter().all(|&word| word == 0));
                region.fill(page, seed(page));
                if discarded == Ok(()) && !zeros { "no zeros after DONTNEED".into() } else { done(discarded) }
            }
            "protect" => done(protect(&region)),
            "fork" => in_child(|| check(&region, seed)),
            "go" => check(&region, seed),
            other => panic!("no step {other}"),
        };
        say(&answer);
    }
    std::process::exit(0);
}

fn done(result: Result<(), i32>) -> String {
    match result {
        Ok(()) => "ok".into(),
        Err(code) => format!("SKIPPED: {}", std::io::Error::from_raw_os_error(code)),
    }
}

/// How many pages cannot be read, if all others are right.
fn check(region: &Region, seed: impl Fn(usize) -> u64) -> String {
    let (mut lost, mut wrong) = (0, Vec::new());
    for page in 0..region.pages {
        match read(region, page) {
            None => lost += 1,
            Some(words) if (0..WORDS).any(|word| words[word] != pattern(seed(page), word)) => wrong.push(page),
            Some(_) => {}
        }
    }
    if wrong.is_empty() { format!("ok, {lost} lost") } else { format!("{} pages are wrong: {wrong:?}", wrong.len()) }
}

/// A page's words; none if the kernel cannot read it either.
fn read(region: &Region, page: usize) -> Option<Vec<u64>> {
    let mut words = vec![0u64; WORDS];
    let to = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: PAGE };
    let from = libc::iovec { iov_base: region.address(page), iov_len: PAGE };
    // SAFETY: the kernel writes one page into the vector, which has as many bytes.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    (read == PAGE as isize).then_some(words)
}

/// `madvise` without libc: no guard of the agent sees it, as none sees a machine check.
fn raw_advise(region: &Region, page: usize, advice: i32) -> Result<(), i32> {
    // SAFETY: a page of this program's own; the scenario is about what happens to it.
    match unsafe { libc::syscall(libc::SYS_madvise, region.address(page), PAGE, advice) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

/// Makes a page unreadable for this process.
fn lose(region: &Region, page: usize, marked: bool) -> Result<(), i32> {
    let lost = |uffd: BorrowedFd<'_>| {
        let range = sys::uffdio_range { start: region.address(page) as u64, len: PAGE as u64 };
        let mut poison = sys::uffdio_poison { range, mode: 0, updated: 0 };
        // SAFETY: `uffdio_poison` is UFFDIO_POISON's argument, a local that outlives the call.
        unsafe { ioctl::ioctl(uffd, Updater::<POISON, _>::new(&mut poison)) }
    };
    if !marked {
        let code = |errno: Errno| errno.raw_os_error();
        let uffd = kmem::uffd::Uffd::new(kmem::uffd::Features::empty()).map_err(|_| libc::EPERM)?;
        let range = kmem::range::Range::new(region.address(page) as usize, PAGE);
        uffd.register_missing_wp(range).map_err(code)?;
        raw_advise(region, page, libc::MADV_DONTNEED)?;
        let result = lost(uffd.as_fd()).map_err(code);
        uffd.unregister(range).map_err(code)?;
        return result;
    }
    raw_advise(region, page, libc::MADV_DONTNEED)?;
    // The memory belongs to one of the agent's.
    let mut last = libc::ENOENT;
    for fd in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if std::fs::read_link(fd.path()).is_ok_and(|link| link.to_string_lossy().contains("userfaultfd")) {
            let fd: i32 = fd.file_name().to_string_lossy().parse().unwrap();
            // SAFETY: an open descriptor of this process, which stays open during the call.
            let copy: OwnedFd = rustix::io::dup(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap();
            match lost(copy.as_fd()) {
                Ok(()) => return Ok(()),
                Err(errno) => last = errno.raw_os_error(),
            }
        }
    }
    Err(last)
}

/// Protects all memory against writing, and lifts that again.
fn protect(region: &Region) -> Result<(), i32> {
    for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        // SAFETY: memory of this program's own, to which nothing writes meanwhile.
        if unsafe { libc::mprotect(region.address(0), region.pages * PAGE, protection) } != 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
    }
    Ok(())
}

/// The answer of a child, which has the same memory.
fn in_child(answer: impl Fn() -> String) -> String {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the program has one thread of its own; the child allocates as libc allows after a
    // fork, writes and ends.
    match unsafe { libc::fork() } {
        0 => {
            let _ = std::io::Write::write_all(&mut writer, answer().as_bytes());
            // SAFETY: ends the child without running exit handlers.
            unsafe { libc::_exit(0) }
        }
        child => {
            drop(writer);
            let mut text = String::new();
            let _ = std::io::Read::read_to_string(&mut reader, &mut text);
            let mut status = 0;
            // SAFETY: the child that was just made.
            unsafe { libc::waitpid(child, &mut status, 0) };
            if status == 0 { text } else { format!("the child ended: {status:#x}") }
        }
    }
}
