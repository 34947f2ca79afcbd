//! Looking at one target with several threads.
//!
//! A target is cut into pieces of about 4 MiB, so that its pages are taken mostly in the order in
//! which they lie, and threads still share the work. Pieces are handed out one by one; the files of
//! a directory are found on the way, so that memory does not depend on how many there are.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;
use kmem::Range;

use super::counter::{Counter, Tally};
use super::files::{self, OpenFile, Step, Walk};
use super::index::Index;
use super::process::Process;
use super::target::LeftOut;

/// See the module's page.
const PIECE: usize = 4 << 20;
/// So many problems of one target are named; the rest are counted.
const NAMED: usize = 20;

/// How to look.
#[derive(Clone, Copy)]
pub(super) struct How<'a> {
    pub(super) index: &'a Index,
    pub(super) seed: u64,
    pub(super) chunk: usize,
    pub(super) threads: usize,
    pub(super) progress: &'a ProgressBar,
}

/// What is to be looked at.
pub(super) enum Source {
    Process(Process),
    File(OpenFile),
    Directory(Walk),
}

enum Piece {
    Memory(Arc<Process>, Vec<Range>),
    File(Arc<OpenFile>, std::ops::Range<u64>),
    /// So many bytes of a hole.
    Hole(u64),
}

/// A file, or what is left of it.
struct Rest {
    file: Arc<OpenFile>,
    range: std::ops::Range<u64>,
    /// Up to here there is no hole.
    data_end: u64,
}

/// Work that is left.
struct Queue {
    /// Memory; the next piece last.
    pieces: Vec<Piece>,
    files: Vec<Rest>,
    walk: Option<Walk>,
    /// Files that a thread is just opening: there may be pieces soon.
    opening: usize,
    problems: Problems,
}

/// What could not be looked at.
#[derive(Default)]
struct Problems {
    named: Vec<LeftOut>,
    further: u64,
    /// The process is gone, and with it the rest.
    over: bool,
}

impl Problems {
    fn add(&mut self, target: String, reason: String) {
        match self.named.len() {
            NAMED.. => self.further += 1,
            _ => self.named.push(LeftOut { target, reason }),
        }
    }
}

/// Looks at the target with this number. Gives its figures, and what was left out of it.
pub(super) fn scan(name: &str, number: u16, source: Source, how: How<'_>) -> (Tally, Vec<LeftOut>) {
    let mut queue =
        Queue { pieces: Vec::new(), files: Vec::new(), walk: None, opening: 0, problems: Problems::default() };
    match source {
        Source::Process(process) => {
            how.progress.inc_length(process.bytes());
            let process = Arc::new(process);
            let pieces = process.pieces(PIECE.max(how.chunk));
            queue.pieces.extend(pieces.into_iter().rev().map(|piece| Piece::Memory(process.clone(), piece)));
        }
        Source::File(file) => {
            how.progress.inc_length(file.size);
            queue.push_file(file);
        }
        Source::Directory(walk) => queue.walk = Some(walk),
    }
    let work = Work { queue: Mutex::new(queue), changed: Condvar::new(), name, number, how };
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..how.threads).map(|_| scope.spawn(|| work.run())).collect();
        for thread in threads {
            match thread.join() {
                Ok(part) => tally.add(&part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    let problems = work.queue.into_inner().unwrap_or_else(PoisonError::into_inner).problems;
    let mut left_out = problems.named;
    if problems.further > 0 {
        left_out.push(LeftOut { target: name.into(), reason: format!("{} more could not be read", problems.further) });
    }
    (tally, left_out)
}

struct Work<'a> {
    queue: Mutex<Queue>,
    /// There is more to do, or nothing more will come.
    changed: Condvar,
    name: &'a str,
    number: u16,
    how: How<'a>,
}

impl Queue {
    fn push_file(&mut self, file: OpenFile) {
        let range = 0..file.size;
        self.files.push(Rest { file: Arc::new(file), range, data_end: 0 });
    }

    /// The next piece.
    fn pop(&mut self, chunk: usize) -> Option<Piece> {
        if let Some(piece) = self.pieces.pop() {
            return Some(piece);
        }
        loop {
            let Rest { file, range, data_end } = self.files.last_mut()?;
            let at = range.start;
            if at >= range.end {
                self.files.pop();
                continue;
            }
            if at >= *data_end {
                let data = file.next_data(range.clone(), chunk);
                *data_end = data.end;
                if data.start > at {
                    range.start = data.start;
                    return Some(Piece::Hole(data.start - at));
                }
            }
            range.start = (at + PIECE.max(chunk) as u64).min(*data_end);
            return Some(Piece::File(file.clone(), at..range.start));
        }
    }
}

impl Work<'_> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) -> Tally {
        let How { index, seed, chunk, progress, .. } = self.how;
        let mut counter = Counter::new(index, seed, self.number, chunk);
        let mut buffer = Vec::new();
        while let Some(piece) = self.next() {
            let advance = |bytes| progress.inc(bytes);
            match piece {
                Piece::Hole(bytes) => {
                    counter.zeros(bytes.div_ceil(chunk as u64));
                    advance(bytes);
                }
                Piece::File(file, range) => {
                    if let Err(reason) = file.read(range, chunk, &mut buffer, &mut counter, advance) {
                        self.lock().problems.add(file.path().display().to_string(), reason);
                    }
                }
                Piece::Memory(process, spans) => {
                    if let Err(reason) = process.read(&spans, chunk, &mut buffer, &mut counter, advance) {
                        let mut queue = self.lock();
                        queue.pieces.clear();
                        if !std::mem::replace(&mut queue.problems.over, true) {
                            queue.problems.add(self.name.into(), reason);
                        }
                    }
                }
            }
        }
        counter.tally
    }

    /// The next piece, or `None` when there will be none.
    fn next(&self) -> Option<Piece> {
        let mut queue = self.lock();
        loop {
            if let Some(piece) = queue.pop(self.how.chunk) {
                return Some(piece);
            }
            match queue.walk.as_mut().and_then(Walk::next) {
                Some(Step::File(path)) => {
                    queue.opening += 1;
                    drop(queue);
                    queue = self.open(path);
                    queue.opening -= 1;
                    self.changed.notify_all();
                }
                Some(Step::LeftOut(path, reason)) => queue.problems.add(path.display().to_string(), reason),
                None if queue.opening > 0 => {
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                None => return None,
            }
        }
    }

    /// Opens a file of a directory and puts it into the queue.
    fn open(&self, path: PathBuf) -> MutexGuard<'_, Queue> {
        let opened = files::open(&path, false);
        let mut queue = self.lock();
        match opened {
            Ok(file) => {
                if queue.walk.as_mut().is_some_and(|walk| walk.admits(&file)) {
                    self.how.progress.inc_length(file.size);
                    queue.push_file(file);
                }
            }
            Err(reason) => queue.problems.add(path.display().to_string(), reason),
        }
        queue
    }
}
