//! Why a process is not attached: real processes, each of which brings [`attach()`] to its reason.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, unsafe_code, reason = "a test fails by panicking, and makes odd processes")]

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use attach::{AttachError, Attached, Request, attach};
use kmem::procfs;

/// The number of ppoll(2).
const PPOLL: &str = "271 ";
/// A copy of this process is not made while a thread of it is another user's: it would be as closed
/// to a look from outside.
static COPIES: Mutex<()> = Mutex::new(());

fn try_attach(pid: i32, library: &Path, timeout: Duration) -> Result<Attached, AttachError> {
    let guard = &guard::Guard::thread();
    attach(&Request { pid, library, socket: Path::new("/"), timeout, guard, stands: false })
}

/// The reason why a process is refused at once.
fn refusal(pid: i32) -> AttachError {
    try_attach(pid, Path::new("/"), Duration::ZERO).unwrap_err()
}

/// A process that is killed at the end.
struct Killed(Child);

impl Killed {
    fn start(program: impl AsRef<Path>, words: &[&str]) -> io::Result<Self> {
        loop {
            match Command::new(program.as_ref()).args(words).spawn() {
                // Another test was just forking while the file was open for writing.
                Err(e) if e.kind() == io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                started => return started.map(Self),
            }
        }
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A copy of this process whose first thread waits for events on the first stack, as QEMU's does.
struct Waiting(i32);

impl Waiting {
    /// `prepare` is called in the copy, where only system calls may be made.
    fn start(prepare: impl FnOnce()) -> Self {
        /// What the copy's environment takes at the top of its stack.
        const TOP: usize = 32 << 10;
        let mut stack = kmem::Range::new(0, 0);
        procfs::for_each_map(None, |line| {
            if line.path == "[stack]" {
                stack = line.range;
            }
        })
        .unwrap();
        let copies = COPIES.lock().unwrap();
        // SAFETY: the copy makes system calls only, and has no other thread whose stack it takes.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            // SAFETY: all fields are numbers and pointers, and the stack is mapped and unused.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong);
                prepare();
                let mut context: libc::ucontext_t = std::mem::zeroed();
                libc::getcontext(&mut context);
                context.uc_stack.ss_sp = std::ptr::with_exposed_provenance_mut(stack.start);
                context.uc_stack.ss_size = stack.len - TOP;
                libc::makecontext(&mut context, wait_for_events, 0);
                libc::setcontext(&context);
                libc::_exit(1);
            }
        }
        drop(copies);
        let copy = Self(pid);
        copy.expect_waiting();
        copy
    }

    fn expect_waiting(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fs::read_to_string(format!("/proc/{}/syscall", self.0)).unwrap().starts_with(PPOLL) {
            assert!(Instant::now() < deadline, "it does not wait for events");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // SAFETY: a child of this process, which is waited for here if it was not before.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

extern "C" fn wait_for_events() {
    loop {
        // SAFETY: no descriptors, no time limit, no mask.
        unsafe { libc::ppoll(std::ptr::null_mut(), 0, std::ptr::null(), std::ptr::null()) };
    }
}

/// A program that waits for signals and needs no library; `interpreter`: its loader.
fn tiny(path: &Path, is_64: bool, interpreter: Option<&Path>) {
    let name = interpreter.map(|path| [path.to_str().unwrap().as_bytes(), &[0]].concat()).unwrap_or_default();
    let segments = 1 + u16::from(interpreter.is_some());
    let (header, entry_size) = if is_64 { (64u64, 56u64) } else { (52, 32) };
    // A loader lies elsewhere than its program.
    let base = if interpreter.is_some() { 0x40_0000u64 } else { 0x80_0000 };
    let code = header + entry_size * u64::from(segments);
    // pause(2), again and again.
    let text: &[u8] = match is_64 {
        true => &[0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7],
        false => &[0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7],
    };
    let len = code + (text.len() + name.len()) as u64;
    let mut bytes = vec![0x7f, b'E', b'L', b'F', 1 + u8::from(is_64), 1, 1];
    bytes.resize(16, 0);
    let half = |bytes: &mut Vec<u8>, value: u16| bytes.extend(value.to_le_bytes());
    let number = |bytes: &mut Vec<u8>, value: u32| bytes.extend(value.to_le_bytes());
    let word = |bytes: &mut Vec<u8>, value: u64| match is_64 {
        true => bytes.extend(value.to_le_bytes()),
        false => bytes.extend((value as u32).to_le_bytes()),
    };
    // A program, for x86-64 or i386.
    half(&mut bytes, 2);
    half(&mut bytes, if is_64 { 62 } else { 3 });
    number(&mut bytes, 1);
    [base + code, header, 0].into_iter().for_each(|value| word(&mut bytes, value));
    number(&mut bytes, 0);
    [header as u16, entry_size as u16, segments, 0, 0, 0].into_iter().for_each(|value| half(&mut bytes, value));
    let mut segment = |kind: u32, offset: u64, size: u64| {
        const READ_AND_EXECUTE: u32 = 5;
        number(&mut bytes, kind);
        if is_64 {
            number(&mut bytes, READ_AND_EXECUTE);
        }
        [offset, base + offset, base + offset, size, size].into_iter().for_each(|value| word(&mut bytes, value));
        if !is_64 {
            number(&mut bytes, READ_AND_EXECUTE);
        }
        word(&mut bytes, 4096);
    };
    if interpreter.is_some() {
        segment(3, code + text.len() as u64, name.len() as u64);
    }
    segment(1, 0, len);
    bytes.extend(text);
    bytes.extend(name);
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn programs_that_cannot_load_the_agent_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let [alone, loader, loaded, old] = ["alone", "loader", "loaded", "old"].map(|name| dir.path().join(name));
    // A copy of this process that had one open would keep it from being run.
    let copies = COPIES.lock().unwrap();
    tiny(&alone, true, None);
    tiny(&loader, true, None);
    tiny(&loaded, true, Some(&loader));
    tiny(&old, false, None);
    drop(copies);
    let process = Killed::start(&alone, &[]).unwrap();
    assert!(matches!(refusal(process.pid()), AttachError::Static(pid) if pid == process.pid()));
    let process = Killed::start(&loaded, &[]).unwrap();
    assert!(matches!(refusal(process.pid()), AttachError::OtherLibrary(pid) if pid == process.pid()));
    match Killed::start(&old, &[]) {
        Ok(process) => assert!(matches!(refusal(process.pid()), AttachError::Architecture(_))),
        Err(why) => println!("SKIPPED: this kernel runs no program of 32 bits: {why}"),
    }
    let process = Killed::start("sleep", &["60"]).unwrap();
    // Before that it may not have loaded its libraries.
    let is_asleep = || fs::read_to_string(format!("/proc/{}/syscall", process.pid())).unwrap().starts_with("230 ");
    while !is_asleep() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(refusal(process.pid()), AttachError::NoSafePoint { seconds: 0, .. }));
}

#[test]
fn a_process_that_is_traced_already_or_that_belongs_to_another_is_refused() {
    let process = Killed::start("sleep", &["60"]).unwrap();
    let pid = process.pid();
    // Others see whose it is, and no more.
    let copies = COPIES.lock().unwrap();
    let refused = std::thread::spawn(move || {
        // SAFETY: the calls take numbers. The first changes this thread only, which ends.
        let is_root = unsafe { libc::geteuid() == 0 && libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) == 0 };
        let refused = refusal(if is_root { pid } else { 1 });
        // SAFETY: numbers; what the kernel took from this whole process is given back.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1 as libc::c_ulong) };
        refused
    });
    let refused = refused.join().unwrap();
    drop(copies);
    assert!(matches!(&refused, AttachError::NoPermission { remedy, .. } if !remedy.is_empty()), "{refused}");
    // SAFETY: numbers; the child runs on.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0usize, 0usize) }, 0);
    let refused = refusal(pid);
    assert!(matches!(&refused, AttachError::Traced { name, .. } if !name.is_empty()), "{refused}");
}

#[test]
fn what_lies_in_a_program_that_waits_is_told_from_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("libpageone_agent.so");
    let waiting = Waiting::start(|| {});
    let try_it = || try_attach(waiting.0, &library, Duration::from_secs(30)).unwrap_err();
    assert!(matches!(try_it(), AttachError::NotSeen { .. }));
    fs::write(&library, "no library").unwrap();
    let refused = try_it();
    assert!(matches!(&refused, AttachError::Load { reason, .. } if reason.contains("file too short")), "{refused}");
    // A library, and none of ours.
    let mut libc = PathBuf::new();
    procfs::for_each_map(None, |line| {
        if line.path.ends_with("/libc.so.6") {
            libc = line.path.clone().into();
        }
    })
    .unwrap();
    fs::copy(libc.with_file_name("libm.so.6"), &library).unwrap();
    let refused = try_it();
    assert!(matches!(refused, AttachError::OldAgent(pid) if pid == waiting.0), "{refused}");
    waiting.expect_waiting();
    // Longer than what is passed to a process.
    let mut deep = dir.path().to_path_buf();
    deep.extend(std::iter::repeat_n("d".repeat(200), 6));
    fs::create_dir_all(&deep).unwrap();
    let other = Waiting::start(|| {});
    let refused = try_attach(other.0, &deep, Duration::from_secs(30)).unwrap_err();
    assert!(matches!(&refused, AttachError::Path(path) if *path == deep), "{refused}");
}

#[test]
fn a_process_with_a_false_c_library_is_not_understood() {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("libc.so.6");
    fs::write(&library, [0; 4096]).unwrap();
    let file = fs::File::open(&library).unwrap();
    let descriptor = file.as_raw_fd();
    let waiting = Waiting::start(move || {
        // Below all that a program maps by itself, so that it is found first.
        let low = std::ptr::without_provenance_mut(1 << 20);
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: nothing lies there, or the call fails.
        unsafe { libc::mmap(low, 4096, libc::PROT_READ, flags, descriptor, 0) };
    });
    let refused = try_attach(waiting.0, &library, Duration::from_secs(30)).unwrap_err();
    assert!(matches!(refused, AttachError::Strange { what: "its C library has no dlopen", .. }), "{refused}");
}

/// A pipe in place of the library: the loader waits for somebody who writes it.
fn pipe(dir: &Path) -> PathBuf {
    let path = dir.join("libpageone_agent.so");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// Opens the other end, once the loader waits for it.
fn other_end(pipe: &Path) -> fs::File {
    loop {
        match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(pipe) {
            Ok(file) => return file,
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => std::thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_call_that_does_not_return_is_left_to_end_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let library = pipe(dir.path());
    let waiting = Waiting::start(|| {});
    let refused = try_attach(waiting.0, &library, Duration::from_secs(6)).unwrap_err();
    assert!(matches!(refused, AttachError::Waits { what: "dlopen", .. }), "{refused}");
    drop(other_end(&library));
    waiting.expect_waiting();
}

#[test]
fn a_process_that_ends_in_a_call_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let library = pipe(dir.path());
    let waiting = Waiting::start(|| {});
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            let _writer = other_end(&library);
            // SAFETY: a child that was not waited for.
            unsafe { libc::kill(waiting.0, libc::SIGKILL) };
        });
        try_attach(waiting.0, &library, Duration::from_secs(30)).unwrap_err()
    });
    assert!(matches!(refused, AttachError::Ended(pid) if pid == waiting.0), "{refused}");
}
