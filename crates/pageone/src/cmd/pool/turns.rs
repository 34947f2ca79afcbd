//! Turns: a command that works on a pool for long gives it to those who wait for it.
//!
//! ```text
//! is_asked     somebody waits (`Sign::Waits`) who was not passed over: the command closes the pool
//! leave        each has looked, and one of them waits no more, or a second has passed: those are
//!              passed over until others wait
//! open_again   the command waits, and says that it comes back (`Sign::Returns`): who comes then
//!              lets it go first
//! ```

use std::error::Error;
use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::Result;
use checkpoint::Others;
use mpool::{Access, Pool, Sign};
use parking_lot::Mutex;
use serde::Serialize;

use super::names::{Comes, Found, PATIENCE, RETRY, holders, named, used_by};
use crate::cmd::Quiet;

/// How long a command has a pool at least for which others wait.
pub(super) const TURN: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 1 });
/// How long a pool is left to those who wait for it, if none takes it.
const OFFER: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 1 });

/// A pool that is given to others in the midst of work.
pub(crate) struct Turns<'a> {
    pub(super) found: Found<'a>,
    /// Those who waited when it was asked for last.
    waiting: Vec<i32>,
    /// Those who waited, and did not take it.
    passed: Vec<i32>,
    /// Says that who waits need not give up.
    _works: Option<File>,
}

impl<'a> Turns<'a> {
    /// Opens a pool for work that takes turns, or ends. Waits as [`Found::open_soon`] does.
    pub(crate) fn begin(mut found: Found<'a>) -> Result<(Self, Pool)> {
        let pool = found.open_soon(Access::Exclusive)?;
        let works = Sign::Works.give(pool.path()).ok();
        Ok((Self { found, waiting: Vec::new(), passed: Vec::new(), _works: works }, pool))
    }

    /// Whether somebody waits for the pool, which is open, who was not passed over.
    pub(super) fn is_asked(&mut self, pool: &Pool) -> bool {
        if !pool.is_awaited() {
            return false;
        }
        self.waiting = holders(&self.found.path.join(Sign::Waits.file()));
        self.waiting.is_empty() || self.waiting != self.passed
    }

    /// Leaves the pool, which was closed, to those who waited for it, until one of them waits no
    /// more. Who is not known has as long as it takes to look.
    pub(super) fn leave(&mut self) {
        let (begin, waiting) = (Instant::now(), std::mem::take(&mut self.waiting));
        self.passed = loop {
            std::thread::sleep(RETRY * 3);
            if waiting.is_empty() || holders(&self.found.path.join(Sign::Waits.file())) != waiting {
                break Vec::new();
            }
            if begin.elapsed() > OFFER {
                // Whoever came between has it: they could not.
                break if holders(&self.found.path).is_empty() { waiting } else { Vec::new() };
            }
        };
    }

    /// Opens it again when others have closed it, however long they have it. Who comes meanwhile
    /// lets it go first. If that takes long, `tell` is told once who has it. `goes_on` is asked
    /// meanwhile.
    pub(super) fn open_again(&mut self, tell: &dyn Fn(&str), goes_on: &dyn Fn() -> Result<()>) -> Result<Pool> {
        let (name, mut told) = (self.found.name, false);
        let _returns = Sign::Returns.give(&self.found.path);
        self.found.open_behind(Access::Exclusive, Comes::Back, |waited, busy| {
            goes_on()?;
            if waited > PATIENCE && !std::mem::replace(&mut told, true) {
                used_by(name, &busy).iter().for_each(|used| tell(used));
            }
            Ok(())
        })
    }
}

/// The turns of a command that stores into a pool.
pub(crate) struct Storing<'a> {
    turns: Mutex<Turns<'a>>,
    quiet: Quiet,
}

impl<'a> Storing<'a> {
    /// Unless it is quiet, it says who has the pool when that takes long.
    pub(crate) fn new(turns: Turns<'a>, quiet: Quiet) -> Self {
        Self { turns: Mutex::new(turns), quiet }
    }
}

impl Others for Storing<'_> {
    fn wait(&self, pool: &Pool) -> bool {
        self.turns.lock().is_asked(pool)
    }

    fn again(&self) -> Result<Pool, Box<dyn Error + Send + Sync>> {
        let mut turns = self.turns.lock();
        turns.leave();
        let tell = |used: &str| {
            if !self.quiet.is_asked() {
                output::note!("{used}: storing goes on when that has closed it");
            }
        };
        Ok(turns.open_again(&tell, &|| Ok(()))?)
    }

    fn least(&self) -> Duration {
        TURN
    }
}

/// A program that keeps all mblocks of a pool, since it stores into it in turns.
#[derive(Debug, Serialize)]
pub(crate) struct Keeper {
    /// `None`: it is not known here.
    pid: Option<i32>,
    /// Its command, and what may be done.
    #[serde(rename = "command")]
    name: String,
}

/// Those who keep all mblocks of a pool that is open exclusively.
pub(crate) fn keepers(pool: &Pool) -> Vec<Keeper> {
    let unknown = || Keeper { pid: None, name: "another program".into() };
    let Ok(files) = pool.keeping() else { return vec![unknown()] };
    let of = |file| {
        let known = holders(file).into_iter().map(|pid| Keeper { pid: Some(pid), name: named(pid) });
        let known: Vec<Keeper> = known.collect();
        if known.is_empty() { vec![unknown()] } else { known }
    };
    files.iter().flat_map(|file| of(file)).collect()
}

/// What that means for one who frees space; `None`: nobody keeps anything.
pub(crate) fn kept(keepers: &[Keeper]) -> Option<String> {
    let names: Vec<&str> = keepers.iter().map(|keeper| &*keeper.name).collect();
    (!names.is_empty()).then(|| {
        format!(
            "no space is freed before that ends: {}, which keeps what it may need of the pool while it stores into it. \
             If it is killed, the next checkpoint or `pageone pool repack` frees it",
            names.join(", and ")
        )
    })
}

#[cfg(test)]
mod tests;
