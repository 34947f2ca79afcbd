//! Checkpoints that are given up: of real processes, which do what is in the way.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

use kmem::pidfd::PidFd;
use kmem::procfs;
use kmem::testing::{Child, Memory, forking, refuse, uffd};
use kmem::uffd::{Features, Uffd};
use mpool::{BLOCK, Pool};

use super::store::{pump, store_read};
use super::*;
use crate::catalog::{Catalog, Store, hash};
use crate::test;

const PAGES: usize = 4096;
const ASYNC: Features = Features::WP.union(Features::WP_ASYNC).union(Features::WP_UNPOPULATED);

/// A process whose memory the kernel tracks. It does what it is told by a byte, and says so.
struct Tracked {
    child: Child,
    memory: Memory,
    tell: PipeWriter,
    told: PipeReader,
}

impl Tracked {
    /// `None`: the kernel tracks no memory here, which is printed.
    fn start() -> Option<Self> {
        drop(uffd(ASYNC)?);
        let memory = Memory::new(PAGES);
        let ((from, tell), (told, to)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let child = Child::fork(|| obey(&memory, &from, &to));
        let tracked = Self { child, memory, tell, told };
        tracked.hear(b'.');
        Some(tracked)
    }

    fn hear(&self, what: u8) {
        let mut said = [0];
        (&self.told).read_exact(&mut said).unwrap();
        assert_eq!(said, [what]);
    }

    fn tell(&self, what: u8) {
        (&self.tell).write_all(&[what]).unwrap();
        self.hear(what);
    }

    fn source(&self) -> Source {
        Source::open_within(self.child.0, self.memory.0).unwrap()
    }
}

/// What the process does. It allocates nothing.
fn obey(memory: &Memory, from: &PipeReader, to: &PipeWriter) -> u8 {
    let Ok(uffd) = Uffd::new(ASYNC) else { return 1 };
    (0..PAGES).for_each(|page| memory.write(page, 1));
    if uffd.register_wp(memory.0).is_err() {
        return 2;
    }
    let (mut told, page) = ([b'.'], memory.pages(1, 1));
    loop {
        let done = match told[0] {
            b'u' => uffd.unregister(page).is_ok(),
            b'r' => uffd.register_wp(page).is_ok(),
            b'm' => memory.unmap(2).is_ok(),
            b'a' => {
                (0..PAGES).for_each(|page| memory.write(page, memory.read(page) + 1));
                true
            }
            _ => true,
        };
        if !done || rustix::io::write(to, &told) != Ok(1) {
            return 3;
        }
        if told[0] == b'w' {
            loop {
                (0..PAGES).for_each(|page| memory.write(page, memory.read(page) + 1));
            }
        }
        if rustix::io::read(from, &mut told) != Ok(1) {
            return 4;
        }
    }
}

/// The process is told something before each stop, and something else behind it.
struct Telling<'a>(&'a Tracked, u8, u8);

impl Halt for Telling<'_> {
    fn halt(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.tell(self.1);
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.tell(self.2);
        Ok(())
    }
}

/// A daemon that has frozen the process. Whether that lasted.
struct Lasted(bool);

impl Frozen for Lasted {
    fn is_held(&self) -> bool {
        true
    }

    fn changes(&self) -> Option<Changes<'_>> {
        None
    }

    fn lasted(&self) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.0)
    }
}

fn pool(dir: &tempfile::TempDir) -> Pool {
    Pool::create(&dir.path().join("pool"), "test").unwrap()
}

fn options(stop: bool, guard: &Guard) -> Options<'_> {
    Options { stop, full: false, max_pause: Duration::ZERO, guard }
}

/// Why no checkpoint is taken; `None`: one is.
fn refused(
    pool: &Pool,
    options: &Options<'_>,
    source: &mut Source,
    lasted: bool,
    halt: &mut dyn Halt,
) -> Option<TakeError> {
    let store = Store::new(Catalog::open(pool).unwrap());
    let mut writer = store.begin("refused").unwrap();
    let (phases, frozen) = (&mut Phases::new(), Lasted(lasted));
    take(options, source, &frozen, halt, &mut writer, phases, &mut |_| {}).err()
}

#[test]
fn without_a_guard_nothing_is_stopped() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (pool, mut source) = (pool(&dir), process.source());
    // It is never told anything, because it is never stopped.
    let guard = Guard::start(&["true".into()]).unwrap();
    let error = refused(&pool, &options(true, &guard), &mut source, true, &mut Telling(&process, b'?', b'?')).unwrap();
    assert!(matches!(error, TakeError::Guard(GuardError::NotReady(_))), "{error}");
    assert_eq!(error.to_string(), "the guard did not start");
}

#[test]
fn memory_that_changes_in_the_pause_is_not_stored() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (pool, mut source, guard) = (pool(&dir), process.source(), Guard::thread());
    let mut refused = |stop: bool, before: u8, after: u8| {
        let error =
            refused(&pool, &options(stop, &guard), &mut source, true, &mut Telling(&process, before, after)).unwrap();
        assert_eq!(procfs::is_stopped(process.child.0).ok(), Some(false), "it goes on");
        error
    };
    // As the agent does when it merges: a page is not tracked for a moment.
    let error = refused(true, b'u', b'r');
    assert!(matches!(error, TakeError::AgentAtWork), "{error}");
    assert_eq!(error.to_string(), "the agent is changing mappings: take the checkpoint again");
    let error = refused(false, b'u', b'r');
    assert!(matches!(error, TakeError::Agent(_)), "{error}");
    assert!(error.to_string().ends_with("is changing mappings: take the checkpoint again"), "{error}");
    let error = refused(false, b'm', b'.');
    assert!(matches!(error, TakeError::Remapped(_)), "{error}");
    assert!(error.to_string().contains("has mapped or unmapped memory meanwhile"), "{error}");
}

#[test]
fn what_others_do_meanwhile_is_noticed() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let (medium, mut source) = (test::Memory::default(), process.source());
    let pool = Pool::create_on(Arc::new(medium.clone()), Path::new("/pool"), "test").unwrap();
    let error = refused(&pool, &options(false, &Guard::thread()), &mut source, false, &mut ByStopping).unwrap();
    assert!(matches!(error, TakeError::Interfered), "{error}");
    assert!(error.to_string().contains("may have cleared notes of writes"), "{error}");
    // It was stopped when the checkpoint began, and goes on when the first page is stored.
    let pid = process.child.0;
    let signal = move |signal: i32, stops: bool| {
        PidFd::open(pid).unwrap().send_signal(signal).unwrap();
        while procfs::is_stopped(pid).unwrap() != stops {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    signal(libc::SIGSTOP, true);
    let store = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = store.begin("continued").unwrap();
    medium.before_next_change(move || signal(libc::SIGCONT, false));
    let guard = Guard::thread();
    let (options, phases) = (options(false, &guard), &mut Phases::new());
    let taken = take(&options, &mut source, &Lasted(true), &mut ByStopping, &mut writer, phases, &mut |_| {});
    let error = taken.unwrap_err();
    assert!(matches!(error, TakeError::Continued(_)), "{error}");
    assert!(error.to_string().ends_with("was stopped and went on meanwhile: take the checkpoint again"), "{error}");
}

#[test]
fn one_that_writes_faster_than_it_is_stored_is_let_alone() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (pool, mut source) = (pool(&dir), process.source());
    process.tell(b'w');
    // Where it gets no CPU for the time of a round, its writes end.
    let error =
        (0..100).find_map(|_| refused(&pool, &options(false, &Guard::thread()), &mut source, true, &mut ByStopping));
    let Some(error) = error else { return println!("SKIPPED: it got no CPU, and wrote less than can be stored") };
    assert!(matches!(error, TakeError::TooFast { rounds: 12, .. }), "{error}");
    assert!(error.to_string().starts_with("the guest writes faster than it can be stored: "), "{error}");
    assert_eq!(procfs::is_stopped(process.child.0).ok(), Some(false));
}

/// The process writes to all of its pages before the first stops, when the rounds have ended.
struct Bursts<'a>(&'a Tracked, usize);

impl Halt for Bursts<'_> {
    fn halt(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.tell(if self.1 > 0 { b'a' } else { b'.' });
        self.1 = self.1.saturating_sub(1);
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

#[test]
fn what_is_found_in_the_pause_is_stored_there_only_if_it_does_not_take_longer_than_that_may() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (pool, mut source, guard) = (pool(&dir), process.source(), Guard::thread());
    let options = options(false, &guard);
    {
        let store = Store::new(Catalog::open(&pool).unwrap());
        let mut writer = store.begin("bursts").unwrap();
        let (phases, bursts) = (&mut Phases::new(), &mut Bursts(&process, 2));
        let taken = take(&options, &mut source, &Lasted(true), bursts, &mut writer, phases, &mut |_| {}).unwrap();
        assert!(taken.in_pause < PAGES as u64 && taken.rounds > 2, "{taken:?}");
    }
    // Whoever writes so much each time is refused, with the figure.
    let error = refused(&pool, &options, &mut source, true, &mut Bursts(&process, usize::MAX)).unwrap();
    let all = PAGES as u64;
    assert!(matches!(error, TakeError::TooFast { pages, rounds: 12, pause_ms: 28 } if pages == all), "{error}");
    assert_eq!(procfs::is_stopped(process.child.0).ok(), Some(false), "it goes on");
}

/// From the pause on there is no memory.
struct NoMemory;

impl Halt for NoMemory {
    fn halt(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        refuse(libc::SYS_mmap, None, libc::ENOMEM);
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

#[test]
fn a_set_of_pages_that_there_is_no_memory_for_is_said() {
    let _forking = forking();
    // 256 GiB, of which nothing is touched: the set takes 8 MiB.
    let memory = Memory::new(1 << 26);
    let child = Child::idle();
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(&dir);
    let error = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let mut source = Source::open_within(child.0, memory.0).unwrap();
            refused(&pool, &options(true, &Guard::thread()), &mut source, true, &mut NoMemory)
        });
        taking.join().unwrap().unwrap()
    });
    assert!(matches!(error, TakeError::Set(_)), "{error}");
    assert_eq!(error.to_string(), "cannot make a set of pages");
    assert_eq!(procfs::is_stopped(child.0).ok(), Some(false), "it goes on");
}

#[test]
fn mistakes_of_ours_are_errors_and_end_in_no_wrong_checkpoint() {
    let _forking = forking();
    let Some(process) = Tracked::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (pool, source) = (pool(&dir), process.source());
    let pages = |_: &u64| -> Vec<u64> { panic!("as a mistake in reading would") };
    let error = pump(&source, [7_u64].into_iter(), pages, |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, TakeError::Panicked), "{error}");
    assert_eq!(error.to_string(), "reading the guest's memory panicked");
    // A page that the pool may have is put off, and is not among those that were read.
    let page = [7; BLOCK];
    let store_one = |name: &str, catalog: Catalog| {
        let store = Store::new(catalog);
        let mut writer = store.begin(name).unwrap();
        writer.set_pages(1);
        writer.put(&[0], &page, &[hash(&page, writer.seed())]).unwrap();
        let not_read = store_read(&[], &[], &mut writer, &mut |_| {});
        writer.commit("test".into(), vec![(0, BLOCK as u64)]).unwrap();
        (not_read, store.into_catalog())
    };
    let (first, catalog) = store_one("first", Catalog::open(&pool).unwrap());
    assert!(first.is_ok(), "it was stored at once");
    let error = store_one("second", catalog).0.unwrap_err();
    assert!(matches!(error, TakeError::NotRead(0)), "{error}");
    assert_eq!(error.to_string(), "page 0 was not read");
}
