//! Guests of the demo on this host, and what merges them.

use anyhow::Result;
use bench_common::guest;
use bench_common::interrupt::Interrupt;
use kmem::PAGE_SIZE;
use testguest::{Guest, Options};

use crate::subjects::Who;
use crate::subjects::engine::Engine;
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::HugePages;

/// Merge period, in seconds.
const PERIOD: f64 = 2.0;
/// How long KSM's scans are to take, in seconds: both engines look for new pages at the same pace,
/// as in [`crate::questions::steady`].
pub(crate) const SCAN: f64 = 3.0;

/// The guests end before what merges them.
pub(crate) struct Host {
    pub(crate) guests: Vec<Guest>,
    pub(crate) engine: Option<Engine>,
    who: Who,
    pages: u64,
}

impl Host {
    /// Boots guests, and waits until each has checked all of its files once. Nothing is merged yet.
    pub(crate) fn boot(
        who: Who,
        count: usize,
        options: &Options,
        huge_pages: HugePages,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let program = guest::command(options)?;
        // KSM comes later: it would begin while they boot.
        let mut engine = if who == Who::Pageone { Engine::prepare(who.subject())? } else { None };
        if let Some(Engine::PageOne { pageone, .. }) = &mut engine {
            pageone.set_huge_pages(huge_pages)?;
        }
        let command = || engine.as_ref().map_or_else(|| Ok(Rival::launch(&program)), |engine| engine.launch(&program));
        let mut guests = (0..count).map(|_| Ok(Guest::start(command()?)?)).collect::<Result<Vec<_>>>()?;
        guest::wait_checked(&mut guests, interrupt)?;
        let pages = count as u64 * ((u64::from(options.memory_mib) << 20) / PAGE_SIZE as u64);
        Ok(Self { guests, engine, who, pages })
    }

    /// Begins to merge. `false`: that cannot be measured on this host.
    pub(crate) fn merge(&mut self, interrupt: &Interrupt) -> Result<bool> {
        match &mut self.engine {
            Some(engine) => engine.start(PERIOD, self.who.subject(), interrupt)?,
            None if self.who == Who::Ksm => {
                self.engine = Engine::prepare(self.who.subject())?;
                let Some(Engine::Ksm(rival)) = &mut self.engine else { return Ok(false) };
                rival.set_pace(Pace::of(self.pages, SCAN))?;
            }
            None => {}
        }
        Ok(true)
    }

    /// The guests' processes.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.guests.iter().map(Guest::pid).collect()
    }
}
