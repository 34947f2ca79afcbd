//! A program that changes what it may do, and what it sees of the system.

use super::client::code;
use std::ffi::CString;
use std::fs::Permissions;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Mutex;

/// Becomes another user for good, with all threads.
pub fn become_user(uid: usize) -> String {
    let uid = uid as libc::uid_t;
    // SAFETY: the calls take numbers and, with a length of 0, a null list.
    code(unsafe {
        libc::setgroups(0, std::ptr::null()) | libc::setresgid(uid, uid, uid) | libc::setresuid(uid, uid, uid)
    })
}

/// What [`confine`] keeps from the program, each a bit of its argument.
pub const HIDDEN: [&str; 4] =
    ["/proc/self/smaps", "/proc/self/pagemap", "/proc/sys/vm/max_map_count", "/dev/userfaultfd"];
/// The bit for a /dev without any device.
pub const NO_DEVICES: usize = 1 << HIDDEN.len();

/// Becomes another user, as a program that this user has started: it may look at itself. Files that
/// the argument names are root's alone, and anybody may use the device for userfaultfds otherwise.
/// Others see the files as before.
pub fn confine(hidden: usize) -> String {
    let own = tempfile::tempdir().unwrap();
    let (secret, device) = (own.path().join("secret"), own.path().join("device"));
    std::fs::write(&secret, "").unwrap();
    std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let none = std::ptr::null();
    // SAFETY: takes C strings that live until the call returns, and null pointers where they are
    // allowed.
    let bind = |from: &Path, onto: &str| unsafe {
        assert_eq!(
            libc::mount(path(from).as_ptr(), path(Path::new(onto)).as_ptr(), none, libc::MS_BIND, none.cast()),
            0
        );
    };
    // SAFETY: the paths are C strings that live until their call returns, the null pointers are
    // where mount(2) allows them, and the other arguments are numbers.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast());
        if let Ok(real) = std::fs::metadata(HIDDEN[3]) {
            libc::mknod(path(&device).as_ptr(), libc::S_IFCHR, real.rdev());
            libc::chmod(path(&device).as_ptr(), 0o666);
            bind(&device, HIDDEN[3]);
        }
    }
    for (_, file) in HIDDEN.iter().enumerate().filter(|(bit, _)| hidden >> bit & 1 == 1) {
        bind(&secret, file);
    }
    if hidden & NO_DEVICES != 0 {
        bind(own.path(), "/dev");
    }
    assert_eq!(become_user(65534), "0");
    // SAFETY: takes numbers.
    code(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) })
}

/// Becomes another user, but the calling thread keeps its capabilities.
pub fn become_capable_user(uid: usize) -> String {
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut data = [0u32; 6];
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) };
    let done = become_user(uid);
    assert_eq!(done, "0");
    // SAFETY: version 3 of the header, this thread, and two sets of three words each: the effective
    // capabilities, those that may be, and the inheritable ones.
    code(unsafe {
        libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr());
        (data[0], data[3]) = (data[1], data[4]);
        libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) as i32
    })
}

/// Makes an empty directory the root, which the process sees nothing outside of.
pub fn change_root() -> String {
    let directory = tempfile::tempdir().unwrap();
    let open = std::fs::File::open(directory.path()).unwrap();
    drop(directory);
    // SAFETY: takes a number and a C string.
    let done = code(unsafe { libc::fchdir(open.as_raw_fd()) | libc::chroot(c".".as_ptr()) });
    assert!(done != "0" || !std::path::Path::new("/proc").exists());
    done
}

/// Ends the process's first thread, and no other.
pub fn end_first_thread() -> String {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: ends the thread that handles the signal, which holds nothing that others need.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    // SAFETY: the handler makes one system call. The signal goes to the first thread.
    unsafe {
        libc::signal(libc::SIGUSR2, end as extern "C" fn(libc::c_int) as usize);
        let done = libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), libc::SIGUSR2) as i32;
        while std::fs::read_to_string("/proc/self/status").unwrap().contains("VmPin") {
            std::thread::yield_now();
        }
        code(done)
    }
}

/// Chooses a tracer by the C library, as far as Yama is there.
pub fn choose_tracer(pid: usize) -> String {
    // SAFETY: takes numbers.
    code(unsafe { libc::prctl(libc::PR_SET_PTRACER, pid, 0, 0, 0) })
}

/// The tracers that were chosen since [`watch_tracers`].
static TRACERS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Lists them.
pub fn tracers() -> String {
    format!("{:?}", TRACERS.lock().unwrap())
}

/// From now on each choice of a tracer, by this thread and those that it starts, is noted, and
/// succeeds without Yama too (seccomp_unotify(2)).
pub fn watch_tracers() -> String {
    let code = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    // The number of the call is at 0, the first argument at 16 (struct seccomp_data).
    let filter = [
        code(LOAD, 0, 0, 0),
        code(EQUALS, 0, 3, libc::SYS_prctl as u32),
        code(LOAD, 0, 0, 16),
        code(EQUALS, 0, 1, libc::PR_SET_PTRACER as u32),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel reads the filter, which lives until the call returns. The new descriptor
    // is nobody else's.
    let listener = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let fd = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program);
        if fd < 0 {
            return super::client::code(-1);
        }
        OwnedFd::from_raw_fd(fd as i32)
    };
    std::thread::spawn(move || note_tracers(&listener));
    "0".into()
}

fn note_tracers(listener: &OwnedFd) {
    const _: () = assert!(size_of::<libc::seccomp_notif>() == 80 && size_of::<libc::seccomp_notif_resp>() == 24);
    loop {
        // id, pid and flags, number and architecture, instruction, six arguments.
        let mut note = [0u64; 10];
        // SAFETY: the kernel writes as many bytes as the array has.
        if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, note.as_mut_ptr()) } == 0 {
            TRACERS.lock().unwrap().push(note[5]);
            // id, value, error and flags: the call returns 0.
            let answer = [note[0], 0, 0];
            // SAFETY: the kernel reads as many bytes as the array has.
            unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, answer.as_ptr()) };
        }
    }
}
