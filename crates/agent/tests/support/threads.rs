//! Signals, threads and children at any moment.

use super::PAGE;
use super::forks::{self, wait};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// Runs `/bin/true` by `vfork`. The child discards pages (`start`, `len`) of the memory that it
/// shares, and closes and replaces every descriptor of its own.
pub fn vfork(start: *mut u8, len: usize) -> String {
    let program = c"/bin/true";
    let args = [program.as_ptr(), std::ptr::null()];
    // SAFETY: the child shares this stack until it executes; it makes system calls only.
    unsafe {
        #[allow(deprecated)]
        let child = libc::vfork();
        if child == 0 {
            libc::madvise(start.cast(), len, libc::MADV_DONTNEED);
            for number in 3..64 {
                libc::dup2(0, number);
            }
            libc::close_range(3, u32::MAX, 0);
            libc::execv(program.as_ptr(), args.as_ptr());
            libc::_exit(99);
        }
        wait(child)
    }
}

/// Starts a process that shares this one's memory (`CLONE_VM`) and outlives it: then it answers how
/// many pages are not what they must be.
pub fn leave_process(start: usize, pages: usize) -> String {
    extern "C" fn body(of: *mut libc::c_void) -> i32 {
        // SAFETY: the parent leaked it.
        let &(start, pages, parent) = unsafe { &*of.cast::<(usize, usize, i32)>() };
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        // SAFETY: system calls, which take a number, or a pause that lives as long as the call.
        unsafe {
            libc::alarm(8);
            while libc::getppid() == parent {
                libc::nanosleep(&pause, std::ptr::null_mut());
            }
        }
        let bad = (0..pages).filter(|page| {
            let wanted = super::pattern(super::pattern_of(*page));
            let words = (start + page * PAGE) as *const u64;
            // SAFETY: reads a mapped page.
            (0..PAGE / 8 - 1).any(|i| unsafe { words.add(i).read_volatile() } != wanted[i])
        });
        let answer = [b'>', b' ', b'0' + bad.count().min(9) as u8, b'\n'];
        // SAFETY: writes these bytes.
        unsafe { libc::write(1, answer.as_ptr().cast(), answer.len()) };
        0
    }
    let stack = Box::leak(vec![0u8; 1 << 20].into_boxed_slice());
    let of = Box::leak(Box::new((start, pages, std::process::id() as i32)));
    let top = stack.as_mut_ptr_range().end;
    // SAFETY: the stack and what it is given are never freed.
    let child = unsafe { libc::clone(body, top.cast(), libc::CLONE_VM | libc::SIGCHLD, std::ptr::from_mut(of).cast()) };
    i32::from(child < 0).to_string()
}

/// Runs a shell by `posix_spawn`.
pub fn spawn() -> String {
    let system = std::process::Command::new("/bin/sh").args(["-c", "/bin/true | /bin/cat"]).status().unwrap();
    system.code().unwrap_or(255).to_string()
}

static NESTED: AtomicI32 = AtomicI32::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

/// Registers handlers for `fork` that fork themselves, once in each step.
pub fn register_forking_handlers() -> String {
    extern "C" fn nested() {
        if NESTED.swap(1, Ordering::SeqCst) == 0 {
            // SAFETY: the child ends at once.
            if forks::then(|| unsafe { libc::fork() }, || 0) != "0" {
                WRONG.fetch_add(1, Ordering::SeqCst);
            }
            NESTED.store(0, Ordering::SeqCst);
        }
    }
    // SAFETY: the handlers are functions that live as long as the program.
    unsafe { libc::pthread_atfork(Some(nested), Some(nested), Some(nested)) }.to_string()
}

/// What went wrong in handlers.
pub fn wrong() -> String {
    WRONG.load(Ordering::SeqCst).to_string()
}

static STOP: AtomicBool = AtomicBool::new(false);

/// Starts and joins threads for that long, in milliseconds, on stacks of 16 pages each from `start`
/// on. Answers how many there were.
pub fn exiting(start: *mut u8, stacks: usize, milliseconds: usize) -> String {
    const STACK: usize = 16 * PAGE;
    extern "C" fn body(_: *mut libc::c_void) -> *mut libc::c_void {
        std::ptr::null_mut()
    }
    let end = std::time::Instant::now() + std::time::Duration::from_millis(milliseconds as u64);
    let mut count = 0;
    while std::time::Instant::now() < end {
        let mut threads = Vec::new();
        for stack in 0..stacks {
            // SAFETY: each stack is one thread's, which has ended when the stack is used again.
            unsafe {
                let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
                libc::pthread_attr_init(&mut attributes);
                libc::pthread_attr_setstack(&mut attributes, start.add(stack * STACK).cast(), STACK);
                assert_eq!(libc::pthread_create(&mut thread, &attributes, body, std::ptr::null_mut()), 0);
                threads.push(thread);
            }
            count += 1;
        }
        // SAFETY: each thread is joined once.
        threads.into_iter().for_each(|thread| _ = unsafe { libc::pthread_join(thread, std::ptr::null_mut()) });
    }
    count.to_string()
}

/// Starts a thread on a stack of 16 pages, which sleeps until the program ends.
pub fn parked(start: *mut u8) -> String {
    extern "C" fn body(_: *mut libc::c_void) -> *mut libc::c_void {
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the stack is this thread's alone.
    unsafe {
        let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstack(&mut attributes, start.cast(), 16 * PAGE);
        libc::pthread_create(&mut thread, &attributes, body, std::ptr::null_mut()).to_string()
    }
}

/// What the handler and the loop that it interrupts use.
static PLACE: AtomicUsize = AtomicUsize::new(0);
static ROUNDS: AtomicU64 = AtomicU64::new(0);
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static JUMPS: AtomicU64 = AtomicU64::new(0);
static IN_FORK: AtomicBool = AtomicBool::new(false);

/// Pages that the loop and its handler discard, each its own.
const SPAN: usize = 8 * PAGE;

/// For that long, in milliseconds, a thread makes guarded calls and forks, and a signal handler
/// that interrupts it does so too, or jumps out of what it interrupted. The memory from `start` on
/// is theirs. Answers rounds, signals and jumps.
pub fn storm(start: *mut u8, milliseconds: usize) -> String {
    extern "C" fn handler(_: libc::c_int) {
        let count = SIGNALS.fetch_add(1, Ordering::SeqCst);
        discard(1);
        // The C library's `fork` may not be interrupted by either of these.
        let may = !IN_FORK.load(Ordering::SeqCst) && !STOP.load(Ordering::SeqCst);
        if may && count.is_multiple_of(8) {
            check_child(forks::without_handlers());
        }
        if may && count.is_multiple_of(3) {
            JUMPS.fetch_add(1, Ordering::SeqCst);
            jump();
        }
    }
    PLACE.store(start as usize, Ordering::SeqCst);
    STOP.store(false, Ordering::SeqCst);
    // SAFETY: the handler uses atomics and system calls only.
    let thread = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
        let mut thread = std::mem::zeroed();
        assert_eq!(libc::pthread_create(&mut thread, std::ptr::null(), stormed, std::ptr::null_mut()), 0);
        thread
    };
    let end = std::time::Instant::now() + std::time::Duration::from_millis(milliseconds as u64);
    while std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_micros(300));
        // SAFETY: the thread runs until it is told to stop.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
    }
    STOP.store(true, Ordering::SeqCst);
    // SAFETY: the thread is joined once.
    unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
    let [rounds, signals, jumps] = [&ROUNDS, &SIGNALS, &JUMPS].map(|count| count.load(Ordering::SeqCst));
    format!("{rounds} {signals} {jumps}")
}

extern "C" fn stormed(_: *mut libc::c_void) -> *mut libc::c_void {
    while !STOP.load(Ordering::SeqCst) {
        discard(0);
        check_child(match ROUNDS.fetch_add(1, Ordering::SeqCst) % 16 {
            0 => {
                IN_FORK.store(true, Ordering::SeqCst);
                // SAFETY: the child makes system calls only.
                let child = unsafe { libc::fork() };
                IN_FORK.store(false, Ordering::SeqCst);
                child
            }
            8 => forks::raw(),
            4 => forks::without_handlers(),
            _ => continue,
        });
    }
    std::ptr::null_mut()
}

/// Runs the loop anew on a stack of its own, and never returns.
fn jump() {
    extern "C" fn again() {
        stormed(std::ptr::null_mut());
        // SAFETY: ends the thread.
        unsafe { libc::pthread_exit(std::ptr::null_mut()) };
    }
    /// Two stacks in turn: the thread is on the other one.
    static mut STACKS: [[u8; 256 << 10]; 2] = [[0; 256 << 10]; 2];
    // SAFETY: only one thread jumps. It leaves one stack for the other for good, and nothing on it
    // is used again.
    unsafe {
        let which = (JUMPS.load(Ordering::SeqCst) % 2) as usize;
        let mut context: libc::ucontext_t = std::mem::zeroed();
        libc::getcontext(&mut context);
        libc::sigemptyset(&mut context.uc_sigmask);
        context.uc_stack.ss_sp = (&raw mut STACKS[which]).cast();
        context.uc_stack.ss_size = 256 << 10;
        context.uc_link = std::ptr::null_mut();
        libc::makecontext(&mut context, again, 0);
        libc::setcontext(&context);
    }
}

/// Discards and fills pages; what is read in between must be zeros.
fn discard(whose: usize) {
    let place = PLACE.load(Ordering::SeqCst) + whose * SPAN;
    // SAFETY: pages of the program, which only this thread uses.
    unsafe {
        let word = place as *mut u64;
        word.write_volatile(7);
        if libc::madvise(place as *mut _, SPAN, libc::MADV_DONTNEED) != 0 {
            WRONG.fetch_add(1, Ordering::SeqCst);
        }
        // A handler may have interrupted this, and never have returned; it uses other pages.
        if word.read_volatile() != 0 {
            WRONG.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The child discards pages too; the parent waits for it.
fn check_child(child: i32) {
    // SAFETY: system calls on the program's memory, and on a child of this process.
    unsafe {
        if child == 0 {
            libc::alarm(20);
            let before = WRONG.load(Ordering::SeqCst);
            (0..2).for_each(discard);
            libc::_exit(i32::from(WRONG.load(Ordering::SeqCst) != before));
        }
        let mut status = 0;
        while child > 0 && libc::waitpid(child, &mut status, 0) == -1 && kmem::raw::errno() == libc::EINTR {}
        if child < 0 || status != 0 {
            WRONG.fetch_add(1, Ordering::SeqCst);
        }
    }
}
