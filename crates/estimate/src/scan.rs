//! Scanning one target with several threads.
//!
//! A target is cut into pieces of about 4 MiB. So pages are counted mostly in address order, and
//! threads still share the work. Threads take pieces one by one. The files of a directory are found
//! on the way, so that memory use does not depend on their number.

use std::path::PathBuf;
use std::sync::Arc;

use kmem::Range;
use output::Progress;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::counter::{Counter, Tally};
use crate::files::{self, OpenFile, Step, Walk};
use crate::index::Index;
use crate::process::Process;
use crate::target::{LeftOut, Reason};

/// Bytes of a piece: see the top of this file.
const PIECE: usize = 4 << 20;
/// Problems of one target that are reported; further ones are counted.
const NAMED: usize = 20;

/// What all scans of an estimate have in common.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) index: &'a Index,
    pub(crate) seed: u64,
    pub(crate) chunk: usize,
    pub(crate) threads: usize,
    pub(crate) progress: &'a Progress,
}

/// An open target.
pub(crate) enum Source {
    Process(Process),
    File(OpenFile),
    Directory(Walk),
}

enum Piece {
    Memory(Arc<Process>, Vec<Range>),
    File(Arc<OpenFile>, std::ops::Range<u64>),
    /// A hole of this many bytes.
    Hole(u64),
}

/// The part of a file that is still to be scanned.
struct Rest {
    file: Arc<OpenFile>,
    range: std::ops::Range<u64>,
    /// End of the current data: there is no hole before it.
    data_end: u64,
}

/// The work left.
struct Queue {
    /// Pieces of memory; the next piece last.
    pieces: Vec<Piece>,
    files: Vec<Rest>,
    walk: Option<Walk>,
    /// Number of files that threads are opening: they may become pieces.
    opening: usize,
    problems: Problems,
}

/// What could not be scanned.
#[derive(Default)]
struct Problems {
    named: Vec<LeftOut>,
    further: u64,
    /// The process has ended; nothing more can be scanned.
    over: bool,
}

impl Problems {
    fn add(&mut self, target: String, reason: Reason) {
        match self.named.len() {
            NAMED.. => self.further += 1,
            _ => self.named.push(LeftOut { target, reason }),
        }
    }
}

/// Scans the target with this number. Returns its counts, and what was left out.
pub(crate) fn scan(name: &str, number: u16, source: Source, context: Context<'_>) -> (Tally, Vec<LeftOut>) {
    let mut queue =
        Queue { pieces: Vec::new(), files: Vec::new(), walk: None, opening: 0, problems: Problems::default() };
    match source {
        Source::Process(process) => {
            context.progress.inc_length(process.bytes());
            let process = Arc::new(process);
            let pieces = process.pieces(PIECE.max(context.chunk));
            queue.pieces.extend(pieces.into_iter().rev().map(|piece| Piece::Memory(process.clone(), piece)));
        }
        Source::File(file) => {
            context.progress.inc_length(file.size);
            queue.push_file(file);
        }
        Source::Directory(walk) => queue.walk = Some(walk),
    }
    let work = Work { queue: Mutex::new(queue), changed: Condvar::new(), name, number, context };
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..context.threads).map(|_| scope.spawn(|| work.run())).collect();
        for thread in threads {
            match thread.join() {
                Ok(part) => tally.add(&part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    let problems = work.queue.into_inner().problems;
    let mut left_out = problems.named;
    if problems.further > 0 {
        left_out.push(LeftOut { target: name.into(), reason: Reason::More(problems.further) });
    }
    (tally, left_out)
}

struct Work<'a> {
    queue: Mutex<Queue>,
    /// Notified when there are new pieces, or there will be none.
    changed: Condvar,
    name: &'a str,
    number: u16,
    context: Context<'a>,
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
    /// A worker: counts pieces until there are none.
    fn run(&self) -> Tally {
        let Context { index, seed, chunk, progress, .. } = self.context;
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
                    if let Err(error) = file.read(range, chunk, &mut buffer, &mut counter, advance) {
                        self.queue.lock().problems.add(file.path().display().to_string(), error.into());
                    }
                }
                Piece::Memory(process, spans) => {
                    if let Err(error) = process.read(&spans, chunk, &mut buffer, &mut counter, advance) {
                        let mut queue = self.queue.lock();
                        queue.pieces.clear();
                        if !std::mem::replace(&mut queue.problems.over, true) {
                            queue.problems.add(self.name.into(), error.into());
                        }
                    }
                }
            }
        }
        counter.tally
    }

    /// The next piece; waits while files are being opened. `None`: there will be none.
    fn next(&self) -> Option<Piece> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(piece) = queue.pop(self.context.chunk) {
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
                Some(Step::LeftOut(path, reason)) => queue.problems.add(path.display().to_string(), reason.into()),
                None if queue.opening > 0 => self.changed.wait(&mut queue),
                None => return None,
            }
        }
    }

    /// Opens a file of a directory and adds it to the queue.
    fn open(&self, path: PathBuf) -> MutexGuard<'_, Queue> {
        let opened = files::open(&path, files::Links::Refuse);
        let mut queue = self.queue.lock();
        match opened {
            Ok(file) => {
                if queue.walk.as_mut().is_some_and(|walk| walk.admits(&file)) {
                    self.context.progress.inc_length(file.size);
                    queue.push_file(file);
                }
            }
            Err(error) => queue.problems.add(path.display().to_string(), error.into()),
        }
        queue
    }
}
