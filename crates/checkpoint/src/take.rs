//! Taking a checkpoint, see the crate's page.

mod phases;
mod running;
mod store;

use std::time::{Duration, Instant};

use dirty::{DirtyTree, NewError};
use guard::{Guard, GuardError};

use crate::catalog::{StoreError, Warning, Writer};
use crate::source::{REST_LIMIT, SCANS, Source, SourceError};

pub use phases::Phases;
pub use store::store_read;

/// How a checkpoint is taken.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Whether the process is stopped for the whole time: for a process that is no client, or that
    /// writes faster than it can be stored.
    pub stop: bool,
    /// Whether all of the memory is read, even if it has not changed since the last checkpoint.
    pub full: bool,
    /// The longest pause.
    pub max_pause: Duration,
    /// What lets the process go on if this does not.
    pub guard: &'a Guard,
}

/// What a process has changed since an earlier checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Changes<'a> {
    /// The earlier checkpoint, see [`Catalog::label`](crate::Catalog::label).
    pub label: &'a str,
    /// Address and length in bytes of each changed part.
    pub changed: &'a [(u64, u64)],
}

/// The daemon's freeze of the process: while it lasts, the daemon neither scans nor merges it.
pub trait Frozen {
    /// Whether a daemon has frozen the process. Without a daemon there is nothing to freeze.
    fn is_held(&self) -> bool;

    /// The process's changes since the last checkpoint, if the daemon knows them.
    fn changes(&self) -> Option<Changes<'_>>;

    /// Whether no daemon has read the kernel's notes since the checkpoint began: the freeze still
    /// holds, or no daemon has been started.
    ///
    /// # Errors
    /// If the daemon cannot be asked.
    fn lasted(&self) -> Result<bool, Box<dyn std::error::Error + Send + Sync>>;
}

/// What stands still with the process during the pause: a guest's devices, for example.
pub trait Halt {
    /// Brings it to a stand, before the process is stopped and the last pages are copied. If the
    /// process's mappings change in the pause, or the pages are too many, it is let go on, and is
    /// halted once more.
    ///
    /// # Errors
    /// If it cannot be brought to a stand. Then it goes on.
    fn halt(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

    /// Lets it go on, when the process runs again.
    ///
    /// # Errors
    /// If it does not go on.
    fn go_on(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// Nothing stands still but the process, which is stopped by a signal.
pub struct ByStopping;

impl Halt for ByStopping {
    fn halt(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

/// It stands still until this is dropped.
struct Halted<'a>(Option<&'a mut dyn Halt>);

impl<'a> Halted<'a> {
    fn begin(halt: &'a mut dyn Halt) -> Result<Self, TakeError> {
        halt.halt().map_err(TakeError::Halt)?;
        Ok(Self(Some(halt)))
    }

    fn end(mut self) -> Result<(), TakeError> {
        self.0.take().map_or(Ok(()), Halt::go_on).map_err(TakeError::Halt)
    }
}

impl Drop for Halted<'_> {
    fn drop(&mut self) {
        // The error that led here says more.
        let _ = self.0.take().map(Halt::go_on);
    }
}

/// Why a checkpoint was not taken.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum TakeError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Guard(#[from] GuardError),
    #[error("cannot make a set of pages")]
    Set(#[from] NewError),
    #[error("reading the guest's memory panicked")]
    Panicked,
    #[error("page {0} was not read")]
    NotRead(u64),
    #[error(
        "the guest writes faster than it can be stored: {pages} pages are left after {rounds} rounds; use --max-pause {pause_ms} \
         or --stop"
    )]
    TooFast { pages: u64, rounds: usize, pause_ms: u64 },
    #[error("process {0} was stopped and went on meanwhile: take the checkpoint again")]
    Continued(i32),
    #[error("process {0} has mapped or unmapped memory meanwhile: take the checkpoint again")]
    Remapped(i32),
    #[error("the agent in process {0} is changing mappings: take the checkpoint again")]
    Agent(i32),
    #[error("the agent is changing mappings: take the checkpoint again")]
    AgentAtWork,
    #[error(transparent)]
    Halt(Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Freeze(Box<dyn std::error::Error + Send + Sync>),
    #[error(
        "a daemon was started, or ended, meanwhile, and may have cleared notes of writes: take the checkpoint again"
    )]
    Interfered,
}

impl TakeError {
    /// Whether the pool is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_full())
    }
}

/// What taking a checkpoint has found.
#[derive(Debug, Default)]
pub struct Taken {
    /// The longest pause of the process.
    pub pause: Duration,
    /// Number of rounds.
    pub rounds: usize,
    /// Number of pages copied during the pause.
    pub in_pause: u64,
    /// Number of pages that were not read, because the daemon knows that they are unchanged.
    pub unchanged: u64,
    /// For a process that may do direct I/O: address and length in bytes of the written parts.
    pub written: Option<Vec<(u64, u64)>>,
}

/// Stores a process's memory with `writer`, which is still to be committed
/// ([`Writer::commit`]) or dropped.
///
/// # Errors
/// If the process or the pool fails, or the memory cannot be stored consistently.
pub fn take(
    options: &Options<'_>,
    source: &mut Source,
    frozen: &dyn Frozen,
    halt: &mut dyn Halt,
    writer: &mut Writer<'_>,
    phases: &mut Phases,
    warn: &mut dyn FnMut(&Warning),
) -> Result<Taken, TakeError> {
    // Not before the freeze: it brings the agent to rest.
    // While the daemon has stopped its work one scan is enough.
    let scans = if !source.is_tracked() || frozen.is_held() { 1 } else { SCANS };
    source.find_at_rest(scans, REST_LIMIT)?;
    writer.set_pages(source.pages() as usize);
    let taken = if options.stop {
        take_stopped(options, source, halt, writer, warn)?
    } else {
        running::take((options, halt), source, frozen.changes(), writer, phases, warn)?
    };
    if !frozen.lasted().map_err(TakeError::Freeze)? {
        return Err(TakeError::Interfered);
    }
    Ok(taken)
}

/// The empty set of the process's pages.
fn set(source: &Source) -> Result<DirtyTree, NewError> {
    DirtyTree::new(source.pages())
}

fn take_stopped(
    options: &Options<'_>,
    source: &Source,
    halt: &mut dyn Halt,
    writer: &mut Writer<'_>,
    warn: &mut dyn FnMut(&Warning),
) -> Result<Taken, TakeError> {
    let guard = options.guard;
    writer.keep_pool();
    source.watch(guard)?;
    guard.stands(guard::PROMISE)?;
    let start = Instant::now();
    let halted = Halted::begin(halt)?;
    let stopped = source.stop()?;
    guard.is_there()?;
    if source.is_tracked() && !source.is_all_tracked()? {
        return Err(TakeError::AgentAtWork);
    }
    let all = set(source)?;
    source.populated(&source.files()?, &all)?;
    let in_pause = store::store((source, guard), &all, writer, warn)?.pages;
    drop(stopped);
    halted.end()?;
    guard.runs()?;
    Ok(Taken { pause: start.elapsed(), rounds: 0, in_pause, unchanged: 0, written: None })
}

#[cfg(test)]
mod tests;
