//! A program that speaks the agents' protocol itself, and does what no agent would.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;

use kmem::memfd::{self, SharedMap};
use kmem::range::Range;
use kmem::seqpacket::Conn;
use kmem::uffd::{Features, Uffd};
use wire::{RegionId, ToAgent, ToDaemon};

use crate::region::{PAGE, Region};
use crate::{hear, say};

/// Where the memory lies, in this program and in the one that it runs next.
const PLACE: usize = 0x7000_0000_0000 >> 4;

/// An agent of this process, with one region.
pub(crate) struct Raw {
    conn: Conn,
    _control: SharedMap,
    _uffd: Uffd,
}

/// Anonymous memory at [`PLACE`]: `pages` pages.
fn memory(pages: usize) -> Region {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: the kernel refuses the address if anything is mapped there.
    let start = unsafe { libc::mmap(PLACE as *mut libc::c_void, pages * PAGE, prot, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    Region { start: start.cast(), pages }
}

impl Raw {
    /// Fills `pages` pages from `seed` on and introduces itself with them.
    pub(crate) fn connect(socket: &Path, uffd: Uffd, pages: usize, seed: u64) -> Self {
        Self::lie(socket, uffd, pages, seed, None)
    }

    /// The same, and says that it has mapped the control page `elsewhere`.
    fn lie(socket: &Path, uffd: Uffd, pages: usize, seed: u64, elsewhere: Option<usize>) -> Self {
        let region = memory(pages);
        (0..pages).for_each(|page| region.fill(page, seed + page as u64));
        uffd.register_wp(Range::new(PLACE, pages * PAGE)).unwrap();
        let conn = Conn::connect(socket).unwrap();
        let send = |message: ToDaemon| conn.send(&wire::encode(&message), &[]).unwrap();
        send(ToDaemon::Hello { version: wire::VERSION, domain: None, name: "raw".into(), forks: 0 });
        send(ToDaemon::RegionAdded { region: RegionId(1), start: PLACE as u64, len: (pages * PAGE) as u64 });
        send(ToDaemon::Ready);
        let control = loop {
            match receive(&conn) {
                Some((ToAgent::Welcome { .. }, fds)) => break memfd::map_shared(&fds[0], wire::control::LEN).unwrap(),
                Some((message, _)) => panic!("{message:?}"),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let address = elsewhere.unwrap_or(control.range().start);
        send(ToDaemon::Mapped { address: address as u64 });
        Self { conn, _control: control, _uffd: uffd }
    }
}

/// What tracks writes.
fn tracking() -> Uffd {
    Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED).unwrap()
}

fn receive(conn: &Conn) -> Option<(ToAgent, Vec<OwnedFd>)> {
    let (mut packet, mut fds) = (vec![0; wire::MAX_MESSAGE], Vec::new());
    match conn.recv(&mut packet, &mut fds).unwrap() {
        Some(0) => panic!("the daemon has hung up"),
        Some(len) => Some((wire::decode_to_agent(&packet[..len]).unwrap(), fds)),
        None => None,
    }
}

/// `exec SOCKET PAGES SEED`: a client that runs another program when it is told to, which keeps the
/// connection and has other contents at the same addresses, from SEED on.
pub(crate) fn exec(socket: &str, pages: usize, seed: u64) {
    let raw = Raw::connect(Path::new(socket), tracking(), pages, u64::from(std::process::id()) << 40);
    say("ready");
    hear();
    rustix::io::fcntl_setfd(&raw.conn, rustix::io::FdFlags::empty()).unwrap();
    let fd = raw.conn.as_fd().as_raw_fd().to_string();
    let words = ["other".to_string(), fd, pages.to_string(), seed.to_string()];
    panic!("{}", std::process::Command::new("/proc/self/exe").args(words).exec());
}

/// `other FD PAGES SEED`: the program that [`exec`] runs.
pub(crate) fn other(fd: i32, pages: usize, seed: u64) {
    let region = memory(pages);
    (0..pages).for_each(|page| region.fill(page, (seed << 32) + 1 + page as u64));
    // SAFETY: the descriptor was left open for this program, and nothing else here uses it.
    let _conn = unsafe { OwnedFd::from_raw_fd(fd) };
    say("other");
    hear();
    say(if region.wrong(0..pages, |page| (seed << 32) + 1 + page as u64) == 0 { "ok" } else { "wrong" });
}

/// `stuck SOCKET PAGES FILE`: a client of the user nobody that maps FILE over its memory when it is
/// told to. It wants to be started as root, which may open the file.
pub(crate) fn stuck(socket: &str, pages: usize, file: &str) {
    const NOBODY: u32 = 65534;
    let (file, uffd) = (std::fs::File::open(file).unwrap(), tracking());
    // The kernel asks for the size now, and else never.
    assert!(file.metadata().unwrap().len() >= (pages * PAGE) as u64);
    // SAFETY: the calls take numbers. This process has one thread.
    let result = unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) | libc::setresuid(NOBODY, NOBODY, NOBODY) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let _raw = Raw::connect(Path::new(socket), uffd, pages, u64::from(std::process::id()) << 40);
    crate::wait_go();
    let (place, fd) = (PLACE as *mut libc::c_void, file.as_raw_fd());
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: replaces memory that nothing here looks at any more.
    let mapped = unsafe { libc::mmap(place, pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    assert_ne!(mapped, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    say("mapped");
    while hear().is_some() {}
}

/// `misplaced SOCKET FILE`: maps FILE, and says when it is told to that the control page is there.
pub(crate) fn misplaced(socket: &str, file: &str) {
    let file = std::fs::File::open(file).unwrap();
    assert!(file.metadata().unwrap().len() >= PAGE as u64);
    // SAFETY: a new mapping, which nothing here looks at.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    crate::wait_go();
    let _raw = Raw::lie(Path::new(socket), tracking(), 64, 1 << 40, Some(start.addr()));
    say("said");
    while hear().is_some() {}
}

/// `sibling PAGES COPIES`: when it is told to go on, it ends and leaves its memory to a process
/// that is none of its threads. That one checks the memory whenever it is told to.
pub(crate) fn sibling(pages: usize, copies: usize) {
    const STACK: usize = 1 << 20;
    let region = Region::new(pages, true);
    (0..pages).for_each(|page| region.fill(page, 1 + (page % (pages / copies)) as u64));
    let seed = move |page: usize| 1 + (page % (pages / copies)) as u64;
    crate::wait_go();
    let body: Box<dyn FnOnce()> = Box::new(move || {
        while rustix::process::getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == parent_of_sibling()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        say("alone");
        while hear().is_some() {
            say(if region.wrong(0..region.pages, seed) == 0 { "ok" } else { "wrong" });
        }
    });
    PARENT.store(std::process::id() as i32, Relaxed);
    let stack = Box::leak(vec![0u8; STACK].into_boxed_slice());
    let argument = Box::into_raw(Box::new(body));
    // SAFETY: the new process has a stack of its own, and the argument, which this one leaves
    // alone. It shares the memory; this process ends at once, so that only one of them runs on.
    let child = unsafe {
        let top = stack.as_mut_ptr().add(STACK).cast();
        libc::clone(enter, top, libc::CLONE_VM | libc::SIGCHLD, argument.cast())
    };
    // SAFETY: ends this process without running what the other still needs.
    unsafe { libc::_exit(i32::from(child < 0)) }
}

static PARENT: AtomicI32 = AtomicI32::new(0);

fn parent_of_sibling() -> i32 {
    PARENT.load(Relaxed)
}

/// What a sibling runs.
extern "C" fn enter(argument: *mut libc::c_void) -> i32 {
    // SAFETY: the box that `sibling` has made for this process.
    let body = unsafe { Box::from_raw(argument.cast::<Box<dyn FnOnce()>>()) };
    body();
    0
}
