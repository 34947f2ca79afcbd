//! Helpers of tests: memory, child processes, a userfaultfd or the reason why there is none, and a
//! kernel that refuses a call.

#![allow(clippy::print_stdout)] // Tests print why they skip.
#![allow(unsafe_code)] // Tests of unsafe interfaces.
#![allow(clippy::unwrap_used)] // For tests only.

mod keys;

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::uffd::{CreateError, Features, Uffd};
use crate::{PAGE_SIZE, Range, mm};

pub use keys::{KernelKey, in_own_session, join_session};

/// Private anonymous memory, reached through pointers only.
pub struct Memory(pub Range);

impl Memory {
    pub fn new(pages: usize) -> Memory {
        let len = pages * PAGE_SIZE;
        let start = mm::map_anonymous(len).unwrap();
        let range = Range::new(start, len);
        // No huge pages: tests look at single pages. Kernels without huge pages refuse the advice.
        // SAFETY: this advice changes no byte.
        let _ = unsafe { mm::advise(range, libc::MADV_NOHUGEPAGE) };
        Memory(range)
    }

    pub fn pages(&self, first: usize, count: usize) -> Range {
        assert!(first + count <= self.0.pages());
        Range::new(self.0.start + first * PAGE_SIZE, count * PAGE_SIZE)
    }

    /// Unmaps one page.
    pub fn unmap(&self, page: usize) -> Result<(), rustix::io::Errno> {
        // SAFETY: the memory is reached through pointers only, and the test does not touch this
        // page again.
        unsafe { mm::unmap(self.pages(page, 1)) }
    }

    fn word(&self, page: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.pages(page, 1).start)
    }

    /// Writes a page's first word.
    pub fn write(&self, page: usize, value: u64) {
        // SAFETY: the word is mapped, writable and aligned; no reference to it exists.
        unsafe { self.word(page).write_volatile(value) }
    }

    /// Reads a page's first word.
    pub fn read(&self, page: usize) -> u64 {
        // SAFETY: the word is mapped, readable and aligned; no reference to it exists.
        unsafe { self.word(page).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory is reached through pointers only, by way of this value.
        let _ = unsafe { mm::unmap(self.0) };
    }
}

/// A userfaultfd. `None`: this machine permits none, which is printed.
pub fn uffd(features: Features) -> Option<Uffd> {
    match Uffd::new(features) {
        Ok(uffd) => Some(uffd),
        Err(CreateError::Os(errno)) => panic!("userfaultfd: {errno}"),
        Err(why) => {
            println!("SKIPPED: {why}");
            None
        }
    }
}

/// Held by every test that forks: a fork waits until a test with fork events has read its event.
pub fn forking() -> MutexGuard<'static, ()> {
    static FORKING: Mutex<()> = Mutex::new(());
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forked child; killed and waited for when dropped.
pub struct Child(pub i32);

impl Child {
    /// Forks. The child runs `body` and exits with its result. The parent's other threads do not
    /// exist there, so `body` must not panic, print, or take locks.
    pub fn fork(body: impl FnOnce() -> u8) -> Child {
        // SAFETY: the child runs only `body`, which takes no lock, and leaves by _exit.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let code = body();
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { libc::_exit(code.into()) }
            }
            pid => Child(pid),
        }
    }

    /// A child that does nothing.
    pub fn idle() -> Child {
        Child::fork(|| pause_for_ever())
    }

    /// Waits for the child's end and returns its exit code.
    pub fn code(self) -> u8 {
        let mut status = 0;
        // SAFETY: a child of this process that was not waited for; `status` outlives the call.
        let pid = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert_eq!(pid, self.0);
        std::mem::forget(self);
        assert!(libc::WIFEXITED(status), "the child was killed: status {status:#x}");
        libc::WEXITSTATUS(status) as u8
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: a child of this process that was not waited for, so the number is still its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// The body of a forked child that only has to exist.
pub fn pause_for_ever() -> ! {
    loop {
        // SAFETY: the call takes no argument; it waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Makes a forked child run as the user nobody from now on.
pub fn become_nobody() {
    // SAFETY: the calls take numbers and null pointers. They are made by number, so that they
    // change the one thread of this child only.
    unsafe {
        libc::syscall(libc::SYS_setgroups, 0usize, 0usize);
        libc::syscall(libc::SYS_setresgid, 65534usize, 65534usize, 65534usize);
        libc::syscall(libc::SYS_setresuid, 65534usize, 65534usize, 65534usize);
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The call by which `rustix::fs::open` opens a file; the standard library uses openat(2).
#[cfg(target_arch = "x86_64")]
pub const OPEN: libc::c_long = libc::SYS_open;
/// The call by which `rustix::fs::open` opens a file.
#[cfg(not(target_arch = "x86_64"))]
pub const OPEN: libc::c_long = libc::SYS_openat;

/// From now on the kernel refuses a system call of this thread with an error (0: the call does
/// nothing and returns 0), as an older kernel, a filter or a limit would. `argument`: only calls
/// whose second argument is this number, such as the request of an ioctl. Nothing takes this back.
pub fn refuse(call: libc::c_long, argument: Option<u32>, errno: i32) {
    // SAFETY: the call takes numbers.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_usize, 0_usize, 0_usize, 0_usize) };
    crate::seccomp::answer(call, argument.map(|argument| (1, argument)), errno).unwrap();
}

/// Runs `body` in a thread that the kernel refuses a system call: see [`refuse`].
pub fn refusing<T: Send>(call: libc::c_long, argument: Option<u32>, errno: i32, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            refuse(call, argument, errno);
            body()
        });
        thread.join().unwrap()
    })
}
