//! The ways in which the program forks.

use super::PAGE;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

unsafe extern "C" {
    /// `fork` without the handlers (fork(2), glibc 2.34).
    fn _Fork() -> libc::pid_t;
}

/// A fork that the C library does not see.
pub fn raw() -> i32 {
    // SAFETY: without flags and a stack this is a fork.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 }
}

/// A fork without handlers.
pub fn without_handlers() -> i32 {
    // SAFETY: the child uses what its copy of the memory holds, and ends.
    unsafe { _Fork() }
}

/// Forks in a way; the child answers by its exit status.
pub fn then(fork: impl FnOnce() -> i32, child: impl FnOnce() -> i32) -> String {
    match fork() {
        -1 => "cannot fork".into(),
        // SAFETY: ends the child; no destructor runs.
        0 => unsafe {
            libc::alarm(20);
            libc::_exit(child().min(255))
        },
        child => wait(child),
    }
}

/// Waits for a child; the answer is its exit status.
pub fn wait(child: i32) -> String {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    unsafe { libc::waitpid(child, &mut status, 0) };
    format!("{}", if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -status })
}

/// A raw fork, and another one a moment later, which lives for some seconds. The answer is what the
/// first says, and whether it had ended before the second.
pub fn twice(child: impl FnOnce() -> i32) -> String {
    // SAFETY: ends the child, and no destructor runs; a number; a child of this process.
    unsafe {
        let first = raw();
        if first == 0 {
            libc::alarm(20);
            libc::_exit(child().min(255));
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        let second = raw();
        if second == 0 {
            libc::sleep(8);
            libc::_exit(0);
        }
        let answer = wait(first);
        let lives = libc::waitpid(second, std::ptr::null_mut(), libc::WNOHANG) == 0;
        libc::kill(second, libc::SIGKILL);
        wait(second);
        format!("{answer} {}", if lives { "before" } else { "after" })
    }
}

/// Forks by the C library's `clone`, with a stack.
pub fn cloned(child: impl FnOnce() -> i32) -> String {
    extern "C" fn body<F: FnOnce() -> i32>(child: *mut libc::c_void) -> i32 {
        // SAFETY: the parent's closure, of which this process has a copy.
        let child: F = unsafe { std::ptr::read(child.cast()) };
        // SAFETY: takes a number.
        unsafe { libc::alarm(20) };
        child().min(255)
    }
    fn call<F: FnOnce() -> i32>(mut child: std::mem::ManuallyDrop<F>) -> i32 {
        let mut stack = vec![0u8; 1 << 20];
        let top = stack.as_mut_ptr_range().end;
        // SAFETY: the child runs on its copy of the stack, and uses its copy of the closure.
        unsafe { libc::clone(body::<F>, top.cast(), libc::SIGCHLD, (&raw mut child).cast()) }
    }
    match call(std::mem::ManuallyDrop::new(child)) {
        -1 => "cannot clone".into(),
        child => wait(child),
    }
}

/// Forks that many times, one after the other.
pub fn many(count: usize) -> String {
    // SAFETY: the child ends at once.
    let bad = (0..count).filter(|_| then(|| unsafe { libc::fork() }, || 0) != "0").count();
    bad.to_string()
}

/// Descriptors of the agent that a child has.
pub fn inherited_descriptors() -> i32 {
    let targets = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| std::fs::read_link(entry.path()));
    let inherited: Vec<_> = targets
        .filter_map(Result::ok)
        .filter(|target| {
            let target = target.to_string_lossy();
            ["socket:", "userfaultfd", "eventfd", "memfd:"].iter().any(|kind| target.contains(kind))
        })
        .collect();
    if !inherited.is_empty() {
        eprintln!("the child inherited {inherited:?}");
    }
    inherited.len() as i32
}

static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
/// A fork waits for the lock: such a lock is fair to nobody by itself.
static FORKS: AtomicBool = AtomicBool::new(false);
/// How often the allocator's thread has used the memory.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// An allocator as there are many: it holds its lock across a fork, and discards and unmaps memory
/// with the lock held.
pub fn start_allocator() -> String {
    static mut HELD: Option<std::sync::MutexGuard<'static, ()>> = None;
    extern "C" fn prepare() {
        FORKS.store(true, Ordering::Relaxed);
        let held = LOCK.lock().unwrap();
        FORKS.store(false, Ordering::Relaxed);
        // Other threads get to where they wait for the agent.
        std::thread::sleep(std::time::Duration::from_millis(5));
        // SAFETY: guarded by the lock.
        unsafe { HELD = Some(held) };
    }
    extern "C" fn release() {
        // SAFETY: this thread, or the one that it is a copy of, holds the lock.
        unsafe { HELD = None };
    }
    // SAFETY: the handlers are functions that live as long as the program.
    assert_eq!(unsafe { libc::pthread_atfork(Some(prepare), Some(release), Some(release)) }, 0);
    std::thread::spawn(|| {
        let len = 512 * PAGE;
        loop {
            while FORKS.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let _held = LOCK.lock().unwrap();
            // SAFETY: new memory, which nobody else knows.
            unsafe {
                let place = libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
                assert_eq!(libc::madvise(place, len, libc::MADV_MERGEABLE), 0);
                assert_eq!(libc::madvise(place, PAGE, libc::MADV_DONTNEED), 0);
                assert_eq!(libc::munmap(place, len), 0);
            }
            CALLS.fetch_add(1, Ordering::Relaxed);
        }
    });
    "0".into()
}

/// Gives up CAP_SYS_PTRACE, without which no fork is reported.
pub fn drop_ptrace() -> String {
    const PTRACE: u32 = 19;
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut data = [0u32; 6];
    // SAFETY: version 3 of the header, this thread, and two sets of three words each.
    let result = unsafe {
        libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr());
        data[0] &= !(1 << PTRACE);
        libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr())
    };
    result.to_string()
}
