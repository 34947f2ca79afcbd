//! Storing a process that runs: a first pass, rounds, and a pause.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use guard::First;
use mpool::{AlignedBuf, BLOCK};

use super::store::{self, Stored};
use super::{Changes, Halt, Halted, Options, Phases, TakeError, Taken, set};
use crate::catalog::{Warning, Writer};
use crate::source::{FilePart, Source};

/// Rounds after which a process counts as one that writes too fast.
const ROUNDS: usize = 12;
/// Rounds between whose batches others get the pool: what is written while they have it is left.
const TURNS: usize = ROUNDS / 2;
/// With this many pages left, another round gains nothing.
const FEW: u64 = 1024;
/// Least time reckoned for copying a page during the pause; 0.64 µs were measured.
const PAGE_COPY: Duration = Duration::from_micros(1);
/// Time reckoned for stopping the process and scanning its page map.
const STOPPING: Duration = Duration::from_millis(10);
/// How often the process is stopped if mappings change each time: because the agent or the guest
/// gives memory back, or the agent merges.
const STOPS: usize = 4;

/// How the process's mappings are known.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mappings {
    /// They are read.
    Read,
    /// As they were when they were last read.
    AsKnown,
}

/// A checkpoint of a running process.
struct Running<'a, 's> {
    options: &'a Options<'a>,
    halt: &'a mut dyn Halt,
    source: &'a mut Source,
    writer: &'a mut Writer<'s>,
    phases: &'a mut Phases,
    warn: &'a mut dyn FnMut(&Warning),
    /// The pages that were present when the checkpoint began.
    all: DirtyTree,
    /// The merged pages, as last seen.
    merged: HashSet<FilePart>,
    /// The longest pause so far.
    pause: Duration,
}

/// What the rounds have left for the pause.
struct Rounds {
    /// Pages to copy during the pause.
    rest: DirtyTree,
    /// The pages that each round found written, the first scan's included.
    found: Vec<DirtyTree>,
    count: usize,
    /// Number of pages that can be copied during the pause.
    limit: u64,
}

/// What was copied while the process was stopped.
struct Copy {
    /// Numbers of the pages, ascending.
    pages: Vec<u64>,
    bytes: AlignedBuf,
    /// Whether every page was tracked.
    tracked: bool,
}

/// Takes the checkpoint, see the crate's page.
pub(super) fn take(
    (options, halt): (&Options<'_>, &mut dyn Halt),
    source: &mut Source,
    changes: Option<Changes<'_>>,
    writer: &mut Writer<'_>,
    phases: &mut Phases,
    warn: &mut dyn FnMut(&Warning),
) -> Result<Taken, TakeError> {
    let pid = source.pid();
    let resumes = source.watch(options.guard)?;
    phases.end("guard");
    let direct = source.may_do_direct_io();
    // From this scan on the kernel notes every write. Merged pages stay merged as a rule, because
    // the agent is at rest; the pause verifies it.
    let merged = source.merged().clone();
    let noted = set(source)?;
    source.written(&noted)?;
    let all = set(source)?;
    source.populated(&merged, &all)?;
    phases.end("scan");
    let pause = Duration::ZERO;
    let mut running = Running { options, halt, source, writer, phases, warn, all, merged, pause };
    let (unchanged, stored) = running.first_pass(changes, &noted)?;
    running.phases.end("first_pass");
    let mut rounds = running.rounds((vec![noted], 0), stored)?;
    let (Copy { pages, bytes, .. }, written) = loop {
        let written = if direct { Some(running.add_written(&rounds)?) } else { None };
        running.phases.end("rounds");
        if !resumes && !running.source.is_stopped() {
            return Err(TakeError::Continued(pid));
        }
        running.writer.keep_pool();
        if let Some(copy) = running.pause(&rounds)? {
            break (copy, written);
        }
        rounds = running.go_on(rounds)?;
    };
    running.phases.end("look_again");
    store::store_read(&pages, &bytes[..pages.len() * BLOCK], running.writer, running.warn)?;
    running.phases.end("store_rest");
    Ok(Taken { pause: running.pause, rounds: rounds.count, in_pause: pages.len() as u64, unchanged, written })
}

/// Number of pages that can be copied in `budget` if one takes `each`. Half of the budget is for
/// the pages that are written until the process stops.
fn fits(budget: Duration, each: Duration) -> u64 {
    (budget.as_nanos() / each.max(PAGE_COPY).as_nanos() / 2) as u64
}

/// `left` pages after all rounds: twice the time reckoned for them would do.
fn too_fast(left: u64, rounds: usize) -> TakeError {
    TakeError::TooFast { pages: left, rounds, pause_ms: 2 * left / 1000 + 20 }
}

/// The pages of `before` that are not in `now`, a bit for each.
fn gone(before: &DirtyTree, now: &DirtyTree) -> Vec<u64> {
    let [mut gone, mut kept] = [(); 2].map(|()| vec![0; before.frames().div_ceil(64) as usize]);
    before.export(&mut gone);
    now.export(&mut kept);
    gone.iter_mut().zip(kept).for_each(|(gone, kept)| *gone &= !kept);
    gone
}

/// A buffer for the pages copied during the pause, of which `pages` are known, and for some more.
/// Its memory is touched: page faults would take longer than copying.
fn room(pages: u64) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed((pages + pages / 4 + FEW) as usize * BLOCK);
    bytes.iter_mut().step_by(BLOCK).for_each(|byte| *byte = 1);
    bytes
}

impl Running<'_, '_> {
    /// Stores all pages, or those that have changed since an earlier checkpoint. Returns the number
    /// of unchanged pages, and what storing took. `noted`: pages written already.
    fn first_pass(&mut self, changes: Option<Changes<'_>>, noted: &DirtyTree) -> Result<(u64, Stored), TakeError> {
        let usable = changes.filter(|_| !self.options.full && !self.source.is_pinned());
        let addresses = self.source.addresses();
        let mut present = vec![0; self.source.pages().div_ceil(64) as usize];
        self.all.export(&mut present);
        let going_on = usable.map(|changes| Ok((changes, self.writer.go_on(changes.label, &addresses, present)?)));
        let going_on = going_on.transpose().unwrap_or_else(|error| {
            (self.warn)(&Warning::Earlier(error));
            None
        });
        let Some((changes, true)) = going_on else {
            return Ok((0, store::store((self.source, self.options.guard), &self.all, self.writer, self.warn)?));
        };
        let changed = set(self.source)?;
        self.source.insert(changes.changed, &changed);
        changed.unite(noted);
        let rest = set(self.source)?;
        changed.iter().filter(|page| self.all.contains(*page)).for_each(|page| {
            rest.insert(page);
        });
        let unchanged = self.all.count() - rest.count();
        Ok((unchanged, store::store((self.source, self.options.guard), &rest, self.writer, self.warn)?))
    }

    /// Stores written pages again, until those left can be copied during the pause. The pause gets
    /// shorter as long as rounds do.
    /// `found` and `count`: what earlier ones found, and their number.
    fn rounds(
        &mut self,
        (mut found, mut count): (Vec<DirtyTree>, usize),
        mut stored: Stored,
    ) -> Result<Rounds, TakeError> {
        let budget = self.options.max_pause.saturating_sub(STOPPING);
        let mut before = u64::MAX;
        loop {
            count += 1;
            let rest = set(self.source)?;
            self.source.written(&rest)?;
            let left = rest.count();
            // The speed of the last pass, beside whatever else the host does.
            let each = stored.reading / stored.pages.clamp(1, u64::from(u32::MAX)) as u32;
            let limit = fits(budget, each);
            if left <= limit && (left <= FEW || left > before / 2) {
                return Ok(Rounds { rest, found, count, limit });
            }
            before = left;
            if count >= TURNS {
                self.writer.keep_pool();
            }
            if count >= ROUNDS {
                if left > fits(budget, PAGE_COPY) {
                    return Err(too_fast(left, count));
                }
                return Ok(Rounds { rest, found, count, limit });
            }
            stored = store::store((self.source, self.options.guard), &rest, self.writer, self.warn)?;
            found.push(rest);
        }
    }

    /// In the pause more was found than may be copied there: that is stored while the process runs,
    /// and rounds go on.
    fn go_on(&mut self, rounds: Rounds) -> Result<Rounds, TakeError> {
        let Rounds { rest, mut found, count, .. } = rounds;
        if count >= ROUNDS {
            return Err(too_fast(rest.count(), count));
        }
        let stored = store::store((self.source, self.options.guard), &rest, self.writer, self.warn)?;
        found.push(rest);
        self.rounds((found, count), stored)
    }

    /// For a process that may do direct I/O: adds pages that earlier rounds found written to the
    /// rest, the latest first, as far as the pause allows. Returns all parts found written.
    fn add_written(&self, rounds: &Rounds) -> Result<Vec<(u64, u64)>, TakeError> {
        let noted = set(self.source)?;
        noted.unite(&rounds.rest);
        for older in rounds.found.iter().rev() {
            noted.unite(older);
            if noted.count() <= rounds.limit {
                rounds.rest.unite(older);
            }
        }
        Ok(self.source.parts(&noted))
    }

    /// Stops the process and copies the rest, again if mappings have changed meanwhile. `None`: it
    /// goes on, since that would take too long.
    fn pause(&mut self, Rounds { rest, limit, .. }: &Rounds) -> Result<Option<Copy>, TakeError> {
        let most = 2 * rest.count().max(*limit) + FEW;
        for stops in 1..=STOPS {
            let bytes = room(rest.count());
            self.phases.end("room");
            // Reading the mappings takes longest. As a rule they have not changed, which is
            // verified after the pause; only the last stop reads them.
            let mappings = if stops == STOPS { Mappings::Read } else { Mappings::AsKnown };
            let copy = self.copy((rest, most), bytes, mappings)?;
            if !self.source.is_as_found()? {
                return Err(TakeError::Remapped(self.source.pid()));
            }
            let Some(copy) = copy else { return Ok(None) };
            let after = self.source.merged();
            if copy.tracked && (mappings == Mappings::Read || *after == self.merged) {
                return Ok(Some(copy));
            }
            after.difference(&self.merged).for_each(|part| rest.insert_range(part.first, part.pages));
            self.merged = after.clone();
        }
        Err(TakeError::Agent(self.source.pid()))
    }

    /// Copies the pages of `rest` while the process is stopped, after adding those that were
    /// written, merged or given back. `None`: these are more than `most`.
    fn copy(
        &mut self,
        (rest, most): (&DirtyTree, u64),
        mut bytes: AlignedBuf,
        mappings: Mappings,
    ) -> Result<Option<Copy>, TakeError> {
        self.options.guard.stands(guard::PROMISE + self.options.max_pause)?;
        // The process waits for this thread alone.
        let first = First::begin(None);
        let start = Instant::now();
        let halted = Halted::begin(self.halt)?;
        self.phases.end("pause_halt");
        let stopped = self.source.stop()?;
        self.options.guard.is_there()?;
        self.phases.end("pause_stop");
        let files = if mappings == Mappings::Read { Some(self.source.files()?) } else { None };
        let now = set(self.source)?;
        self.source.written_and_populated(files.as_ref().unwrap_or(&self.merged), rest, &now)?;
        let tracked = self.source.is_all_tracked()?;
        let new = files.iter().flat_map(|files| files.difference(&self.merged));
        new.for_each(|part| rest.insert_range(part.first, part.pages));
        // Pages given back meanwhile (by a balloon, say) are zeros now, and are read as such.
        rest.merge(0, &gone(&self.all, &now));
        self.phases.end("pause_look");
        let fits = rest.count() <= most;
        let pages: Vec<u64> = if fits { rest.iter().collect() } else { Vec::new() };
        if bytes.len() < pages.len() * BLOCK {
            bytes = AlignedBuf::zeroed(pages.len() * BLOCK);
        }
        self.source.read(&pages, &mut bytes[..pages.len() * BLOCK])?;
        drop(stopped);
        self.phases.end("pause_read");
        halted.end()?;
        self.pause = self.pause.max(start.elapsed());
        drop(first);
        self.options.guard.runs()?;
        self.phases.end("pause_go_on");
        if !fits {
            // What was given back until now is in the rest.
            self.all = now;
            self.merged = files.unwrap_or_else(|| std::mem::take(&mut self.merged));
        }
        Ok(fits.then_some(Copy { pages, bytes, tracked }))
    }
}
