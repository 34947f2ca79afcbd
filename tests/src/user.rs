//! Becoming another user, as an ordinary program of that user would run.
#![allow(unsafe_code, reason = "namespaces, credentials and CPU masks have no safe wrappers here")]

use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Name of the variable with the user that a test client becomes before it does anything.
pub const ENV_UID: &str = "PAGEONE_TEST_UID";

/// The first of the subordinate uids that [`crate::assault::ATTACKER`] has; see
/// [`crate::Daemon::restart_with_subuid`].
pub const FIRST_SUBORDINATE: u32 = 200_000;

/// Where agents of ordinary users get their userfaultfds.
const DEVICE: &str = "/dev/userfaultfd";

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The calling process becomes this user for good. Only for a program of one thread.
///
/// `/dev/userfaultfd` is open to it, as an operator would arrange for the users that run guests;
/// that is so in its own mount namespace only.
///
/// # Errors
///
/// When the caller is not root, or the kernel refuses.
pub fn become_user(uid: u32) -> io::Result<()> {
    open_userfaultfd()?;
    // SAFETY: the calls take numbers and, with a length of 0, a null list.
    unsafe {
        done(libc::setgroups(0, std::ptr::null()))?;
        done(libc::setresgid(uid, uid, uid))?;
        done(libc::setresuid(uid, uid, uid))?;
        // As in a program that this user has started: it may look at itself in /proc.
        done(libc::prctl(libc::PR_SET_DUMPABLE, 1))
    }
}

/// Runs `act` as this user, on a thread of its own: connections that it makes are that user's.
///
/// # Panics
///
/// When the caller is not root.
pub fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    let act = move || {
        // SAFETY: the call takes numbers. Past the C library, it changes this thread only, which
        // ends.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
        assert_eq!(changed, 0, "{}", io::Error::last_os_error());
        act()
    };
    std::thread::scope(|scope| scope.spawn(act).join().unwrap())
}

/// All threads of the calling process become this user for good, as a program does that has opened
/// what it needs. From then on the process may not look at itself in `/proc`.
///
/// # Errors
///
/// When the caller is not root.
pub fn give_up_privileges(uid: u32) -> io::Result<()> {
    // SAFETY: the calls take numbers and, with a length of 0, a null list.
    unsafe {
        done(libc::setgroups(0, std::ptr::null()))?;
        done(libc::setresgid(uid, uid, uid))?;
        done(libc::setresuid(uid, uid, uid))
    }
}

/// The calling process sees an empty directory, and no other file, from now on.
///
/// # Errors
///
/// When the caller is not root.
pub fn enter_empty_directory() -> io::Result<()> {
    let open = std::fs::File::open(tempfile::tempdir()?.path())?;
    // SAFETY: takes a descriptor and a C string.
    unsafe {
        done(libc::fchdir(open.as_raw_fd()))?;
        done(libc::chroot(c".".as_ptr()))
    }
}

/// Puts a device node that everyone may open over [`DEVICE`], in a new mount namespace.
fn open_userfaultfd() -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(device) = std::fs::metadata(DEVICE) else { return Ok(()) };
    let own = tempfile::tempdir()?;
    let node = own.path().join("userfaultfd");
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let (node, target) = (path(&node)?, path(Path::new(DEVICE))?);
    let (none, flags) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: the paths are C strings that outlive the calls; null pointers are allowed where they
    // are given.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        done(libc::mount(none, c"/".as_ptr(), none, flags, none.cast()))?;
        done(libc::mknod(node.as_ptr(), libc::S_IFCHR, device.rdev()))?;
        done(libc::chmod(node.as_ptr(), 0o666))?;
        done(libc::mount(node.as_ptr(), target.as_ptr(), none, libc::MS_BIND, none.cast()))
    }
}

/// From now on the calling process and its children use only the last CPU of those that they may
/// use, and yield to others there.
pub fn last_cpu_only() {
    // SAFETY: the sets are plain bits, for which zeros are valid, and have the length that is told.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&all), &mut all);
        if let Some(last) = (0..libc::CPU_SETSIZE as usize).rev().find(|&cpu| libc::CPU_ISSET(cpu, &all)) {
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(last, &mut one);
            libc::sched_setaffinity(0, size_of_val(&one), &one);
        }
        libc::setpriority(libc::PRIO_PROCESS, 0, 5);
    }
}

/// The calling thread alone acts as this user from now on, and cannot go back: other processes see
/// it so when it connects to them.
///
/// # Errors
///
/// When the caller is not root.
pub fn this_thread_is(uid: u32) -> io::Result<()> {
    // SAFETY: the call takes three numbers. Without the C library's wrapper it is for one thread.
    done(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) } as libc::c_int)
}
