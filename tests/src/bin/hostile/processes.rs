//! Processes: those that the attacks are made of, and attacks that consist in making them.

use std::time::Duration;

use super::memory::{PAGE, Tracked, map};
use super::peer::Peer;
use super::{Host, Random};

/// Runs `body` in a child process, which then ends. Returns its number. The child is killed when
/// this process ends.
pub(super) fn fork(body: impl FnOnce()) -> i32 {
    // SAFETY: the call takes nothing.
    let parent = unsafe { libc::getpid() };
    // SAFETY: this program has one thread, so the child may do whatever its parent may.
    match unsafe { libc::fork() } {
        0 => {
            die_with_parent();
            // SAFETY: the call takes nothing.
            if unsafe { libc::getppid() } == parent {
                body();
            }
            // SAFETY: ends this process at once; what is left in buffers belongs to the parent.
            unsafe { libc::_exit(0) }
        }
        // No room for another process: the attack goes on a little later.
        -1 => {
            std::thread::sleep(Duration::from_millis(10));
            0
        }
        child => child,
    }
}

/// Waits for the end of one child.
pub(super) fn wait_for(child: i32) {
    if child > 0 {
        // SAFETY: a null status is allowed.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
}

/// Whether a child process can do this.
pub(super) fn succeeds(body: impl FnOnce()) -> bool {
    let (child, mut status) = (fork(body), -1);
    // SAFETY: the status is written before the call returns.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status == 0
}

/// Waits until no child is left.
pub(super) fn reap_all() {
    // SAFETY: a null status is allowed.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } > 0 {}
}

/// The calling process becomes the first of a new process group.
pub(super) fn new_group() {
    // SAFETY: the call takes two numbers.
    unsafe { libc::setpgid(0, 0) };
}

/// Kills a process group, and what may still be made in it.
pub(super) fn kill_group(group: i32) {
    if group > 1 {
        // SAFETY: the calls take two numbers. The group's first process was not waited for yet, so
        // its number is no other group's.
        unsafe {
            libc::setpgid(group, group);
            libc::kill(-group, libc::SIGKILL);
        }
    }
}

/// The calling process is killed when its parent ends.
pub(super) fn die_with_parent() {
    // SAFETY: the call takes two numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// The calling process becomes this user, and is still killed when its parent ends.
pub(super) fn become_user(uid: u32) {
    e2e::user::become_user(uid).unwrap();
    die_with_parent();
}

/// Processes whose parents end become children of this one, and count as such.
pub(super) fn adopt_orphans() {
    // SAFETY: the call takes two numbers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// CPU time of all children that have ended.
pub(super) fn cpu_of_children() -> Duration {
    // SAFETY: the structure is plain numbers, for which zeros are valid; the kernel fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let time = |at: libc::timeval| Duration::new(at.tv_sec as u64, at.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Becomes another program right after the handshake.
pub(super) fn exec(host: &Host, _: Random) {
    loop {
        let child = fork(|| {
            let memory = Tracked::new(256);
            memory.fill(|page| page as u64);
            let peer = Peer::client(host, &[(memory.start(), 256 * PAGE)]);
            // The connection stays open over the exec, in a process that can be anything.
            let _child = fork(|| {
                std::thread::sleep(Duration::from_millis(300));
                drop(peer);
            });
            let args = [c"sleep".as_ptr(), c"0.3".as_ptr(), std::ptr::null()];
            // SAFETY: a path and a list of arguments that ends with a null pointer.
            unsafe { libc::execv(c"/bin/sleep".as_ptr(), args.as_ptr()) };
        });
        std::thread::sleep(Duration::from_millis(5));
        host.step();
        // Those that have ended; most still sleep.
        let _ = child;
        // SAFETY: a null status is allowed.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }
}

/// A storm of processes, each with a connection or with one that it inherited.
pub(super) fn forks(host: &Host, mut random: Random) {
    loop {
        let shared = Peer::client(host, &[(map(16 * PAGE), 16 * PAGE)]);
        for _ in 0..64 {
            let own = random.below(2) == 0;
            fork(|| {
                let peer = own.then(|| Peer::client(host, &[(map(16 * PAGE), 16 * PAGE)]));
                std::thread::sleep(Duration::from_millis(50));
                drop(peer);
            });
            host.step();
        }
        drop(shared);
        reap_all();
    }
}

extern "C" fn linger(_: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the call takes a structure that lives here, and a null pointer.
    unsafe { libc::nanosleep(&libc::timespec { tv_sec: 0, tv_nsec: 200_000_000 }, std::ptr::null_mut()) }
}

/// Processes that end while another one has their memory (`CLONE_VM`).
pub(super) fn siblings(host: &Host, _: Random) {
    loop {
        let child = fork(|| {
            let memory = Tracked::new(256);
            memory.fill(|page| page as u64 / 4);
            let _peer = Peer::client(host, &[(memory.start(), 256 * PAGE)]);
            let stack = map(16 * PAGE) + 16 * PAGE;
            let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::SIGCHLD;
            // SAFETY: the stack is fresh memory that nothing else uses, and `linger` returns to the
            // kernel's exit. It touches nothing of this process but its stack.
            unsafe {
                libc::clone(linger, std::ptr::with_exposed_provenance_mut(stack), flags, std::ptr::null_mut());
            }
            std::thread::sleep(Duration::from_millis(20));
        });
        wait_for(child);
        host.step();
    }
}
