//! The client: does operations that its seed determines, and compares memory with the oracle.

use std::collections::VecDeque;
use std::fs::File;
use std::io::BufRead;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::*};

use crate::arena::{Arena, Meta, PAGE};
use crate::device::Pin;
use crate::ops::{OPS, Op};
use crate::pool::Pool;
use crate::random::Random;
use crate::writers::Writers;
use crate::{finding, process, sys};

/// Pages of an arena: several times the smallest piece that the agent manages.
const ARENA_PAGES: usize = 1536;
const ARENAS: usize = 3;
/// Operations between two looks at all of the memory.
const FULL_CHECK: u64 = 64;

/// What a client is told by the driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Operations that are left out.
    pub(crate) without: Vec<String>,
    /// A file with every content, one page each.
    pub(crate) contents: String,
    /// A file whose reads and writes take a while, or nothing.
    pub(crate) slow: Option<String>,
    /// Pages of the slow file from here on are this client's.
    pub(crate) slow_from: usize,
    /// A directory for files.
    pub(crate) dir: String,
}

/// Something that ends at a later operation.
pub(crate) enum Pending {
    /// The slow file is read into pages, which hold these contents then.
    Read { thread: std::thread::JoinHandle<sys::Answer>, arena: usize, pages: Range<usize>, first: usize },
    /// Pages are written to the slow file, at this page of it.
    Write { thread: std::thread::JoinHandle<sys::Answer>, wanted: Vec<u8>, first: usize },
    /// A pipe holds references to pages, with these bytes.
    Splice { pipe: i32, wanted: Vec<u8> },
    /// Pages are pinned.
    Pin(Box<Pin>),
    /// Pages are locked.
    Lock { arena: usize, pages: Range<usize> },
    /// A child checks its copy.
    Child(usize),
}

pub(crate) struct Client {
    pub(crate) random: Random,
    pub(crate) now: u64,
    pub(crate) arenas: Vec<Arena>,
    pub(crate) pending: VecDeque<(u64, Pending)>,
    pub(crate) writers: Writers,
    pub(crate) pool: Option<Pool>,
    pub(crate) contents: [File; 2],
    pub(crate) scratch: File,
    pub(crate) slow: Option<File>,
    pub(crate) slow_next: usize,
    pub(crate) memory: File,
    /// A page that is never marked.
    pub(crate) plain: Arena,
    pub(crate) refused: u64,
    pub(crate) checked: u64,
    /// The operations of this client, and the sum of their weights.
    chosen: Vec<(usize, &'static Op)>,
    weights: u64,
}

/// The operations that a client does. Each client leaves some out, so that others meet in ways in
/// which they would not otherwise: most clients pin and lock nothing, since nothing of them is
/// merged meanwhile.
fn choose_ops(random: &mut Random, without: &[String]) -> Vec<(usize, &'static Op)> {
    let mut left_out = |name: &str| match name {
        "fill" | "check" | "map" | "mergeable" => false,
        "pin" | "lock" => !random.once_in(3),
        _ => random.once_in(5),
    };
    let ops = OPS.iter().enumerate().filter(|(_, op)| !left_out(op.name));
    ops.filter(|(_, op)| !without.iter().any(|name| name == op.name)).collect()
}

fn open(path: &str, flags: i32) -> File {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = File::options().read(true).write(true).custom_flags(flags).open(path);
    opened.unwrap_or_else(|e| panic!("{path} cannot be opened: {e}"))
}

impl Client {
    fn new(options: Options) -> Self {
        let path = format!("{}/scratch-{}", options.dir, std::process::id());
        drop(File::create(&path));
        let scratch = open(&path, libc::O_DIRECT);
        let _ = std::fs::remove_file(path);
        let arenas: Vec<Arena> = (0..ARENAS).map(|_| Arena::new(ARENA_PAGES)).collect();
        let mut random = Random::new(options.seed);
        let chosen = choose_ops(&mut random, &options.without);
        let has_pool = chosen.iter().any(|(_, op)| op.name == "mark");
        Self {
            random,
            weights: chosen.iter().map(|(_, op)| op.weight).sum(),
            chosen,
            now: 0,
            pool: has_pool.then(|| Pool::share(&arenas[0])).flatten(),
            arenas,
            pending: VecDeque::new(),
            writers: Writers::new(),
            contents: [open(&options.contents, 0), open(&options.contents, libc::O_DIRECT)],
            scratch,
            slow: options.slow.as_deref().map(|path| open(path, libc::O_DIRECT)),
            slow_next: options.slow_from,
            memory: open("/proc/self/mem", 0),
            plain: Arena::plain(64),
            refused: 0,
            checked: 0,
        }
    }

    /// A range of an arena, most often a short one, as far as its pages meet a condition.
    pub(crate) fn choose(&mut self, holds: impl Fn(&Meta, u64) -> bool) -> Option<(usize, Range<usize>)> {
        let most = [4, 4, 16, 16, 64, 64, 256, ARENA_PAGES][self.random.below(8) as usize];
        self.choose_most(most, holds)
    }

    /// The same, with at most `most` pages.
    pub(crate) fn choose_most(
        &mut self,
        most: usize,
        holds: impl Fn(&Meta, u64) -> bool,
    ) -> Option<(usize, Range<usize>)> {
        let arena = self.random.below(self.arenas.len() as u64) as usize;
        let start = self.random.below(ARENA_PAGES as u64) as usize;
        let len = 1 + self.random.below(most as u64) as usize;
        let now = self.now;
        let pages = self.arenas[arena].prefix(start..(start + len).min(ARENA_PAGES), |meta| holds(meta, now));
        finding::about(&[arena, pages.start, pages.len()]);
        (!pages.is_empty()).then_some((arena, pages))
    }

    /// Until when something lasts that begins now.
    pub(crate) fn later(&mut self, least: u64, most: u64) -> u64 {
        self.now + least + self.random.below(most - least)
    }

    pub(crate) fn check(&mut self, arena: usize, pages: Range<usize>, what: &str) {
        self.checked += self.arenas[arena].check(pages, self.now, what) as u64;
    }

    pub(crate) fn check_all(&mut self, what: &str) {
        (0..self.arenas.len()).for_each(|arena| self.check(arena, 0..ARENA_PAGES, what));
    }

    pub(crate) fn add(&mut self, due: u64, pending: Pending) {
        self.pending.push_back((due, pending));
    }

    /// Ends what has to end by now, or all.
    pub(crate) fn finish(&mut self, all: bool) {
        let mut left = VecDeque::new();
        while let Some((due, pending)) = self.pending.pop_front() {
            if all || due <= self.now { self.complete(pending) } else { left.push_back((due, pending)) }
        }
        self.pending = left;
        if all {
            for arena in &mut self.arenas {
                arena.set(0..ARENA_PAGES, |meta| (meta.busy, meta.held, meta.kept, meta.pinned) = (0, 0, 0, 0));
            }
        }
    }

    fn complete(&mut self, pending: Pending) {
        match pending {
            Pending::Read { thread, arena, pages, first } => self.read_done(thread, arena, pages, first),
            Pending::Write { thread, wanted, first } => self.write_done(thread, &wanted, first),
            Pending::Splice { pipe, wanted } => self.splice_done(pipe, &wanted),
            Pending::Pin(pin) => pin.release(),
            Pending::Lock { arena, pages } => {
                // Pages that are gone were unlocked by that.
                for run in self.arenas[arena].runs(pages, |meta| !meta.gone) {
                    let _ = sys::munlock(self.arenas[arena].at(run.start), run.len());
                }
            }
            Pending::Child(pid) => process::reap(pid),
        }
    }

    fn step(&mut self) {
        self.now += 1;
        let mut at = self.random.below(self.weights);
        let chosen = self.chosen.iter().find(|(_, op)| {
            let found = at < op.weight;
            at = at.saturating_sub(op.weight);
            found
        });
        let Some(&(number, op)) = chosen else { return };
        finding::begin(self.now, number);
        self.finish(false);
        (op.run)(self);
        if self.now.is_multiple_of(FULL_CHECK) {
            self.check_all("memory");
        }
        finding::end();
        // Time in which pages merge.
        let pause = self.random.below(100);
        sys::sleep_ms(match pause {
            0 => 400,
            1..10 => 30,
            10..60 => 2,
            _ => 0,
        });
    }
}

/// Runs until standard input ends.
pub(crate) fn run(options: Options) {
    static STOP: AtomicBool = AtomicBool::new(false);
    finding::watch(options.seed);
    std::thread::spawn(|| {
        while std::io::stdin().lock().read_line(&mut String::new()).is_ok_and(|count| count > 0) {}
        STOP.store(true, Release);
    });
    let mut client = Client::new(options);
    client.writers.start();
    println!("ready");
    while !STOP.load(Acquire) {
        client.step();
    }
    client.leave();
}

impl Client {
    fn leave(&mut self) {
        finding::begin(self.now + 1, OPS.len());
        self.finish(true);
        self.check_all("memory at the end");
        let writes = self.writers.stop();
        finding::end();
        println!(
            "ok {} operations, {} pages checked, {writes} writes of threads, {} accesses refused at first",
            self.now, self.checked, self.refused
        );
        if self.random.once_in(3) && self.chosen.iter().any(|(_, op)| op.name == "clone-vm") {
            process::leave_sibling(self);
        }
        sys::exit_now(0);
    }

    /// The descriptor of `/proc/self/mem`.
    pub(crate) fn own_memory(&self) -> i32 {
        self.memory.as_raw_fd()
    }
}

/// Pages as bytes.
pub(crate) fn bytes(pages: &Range<usize>) -> usize {
    pages.len() * PAGE
}
