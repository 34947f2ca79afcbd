//! Switches one guard off (`PAGEONE_SABOTAGE=<guard>`), to prove that the hazard tests would
//! notice.
//!
//! Compiled in only with the cargo feature `sabotage`. Without it every guard is on, and asking
//! costs nothing.

/// A guard that can be switched off, or a hazard that can be made larger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Sabotage {
    /// Writers do not wait in a window.
    NoProtect = 1,
    /// Discarding merged pages brings back the frame.
    NoDontneedGuard,
    /// Unmapped ranges stay in the tables.
    NoUnmapGuard,
    /// Memory is moved without unmerging it.
    NoMremapUnmerge,
    /// Pinned and locked memory is merged.
    NoPinCheck,
    /// Mappings are made beyond the budget.
    NoBudget,
    /// Forks are not counted.
    NoForkCount,
    /// The agent's threads take signals.
    SignalsUnblocked,
    /// `MADV_DONTFORK`, `MADV_DONTDUMP` and huge page advice are not repeated on new mappings.
    NoStickyAdvice,
    /// Every window takes 50 ms.
    SlowWindow,
    /// A second passes between the comparison and the taking of pages, and another one before they
    /// are compared again; another one before memory that is given back is filled.
    SlowTake,
    /// Memory merges while another process shares it. Windows are slow as with `SlowTake`.
    NoSharerCheck,
    /// A child's userfaultfd is only closed. Windows are slow as with `SlowTake`.
    NoUnregister,
}

#[cfg(feature = "sabotage")]
mod chosen {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Sabotage;

    static CHOSEN: AtomicU8 = AtomicU8::new(0);

    pub(crate) fn read() {
        use Sabotage::*;
        let all = [
            ("no-protect", NoProtect),
            ("no-dontneed-guard", NoDontneedGuard),
            ("no-unmap-guard", NoUnmapGuard),
            ("no-mremap-unmerge", NoMremapUnmerge),
            ("no-pin-check", NoPinCheck),
            ("no-budget", NoBudget),
            ("no-fork-count", NoForkCount),
            ("signals-unblocked", SignalsUnblocked),
            ("no-sticky-advice", NoStickyAdvice),
            ("slow-window", SlowWindow),
            ("slow-take", SlowTake),
            ("no-sharer-check", NoSharerCheck),
            ("no-unregister", NoUnregister),
        ];
        let name = std::env::var("PAGEONE_SABOTAGE").unwrap_or_default();
        let found = all.iter().find(|(known, _)| *known == name);
        CHOSEN.store(found.map_or(0, |&(_, which)| which as u8), Ordering::Relaxed);
    }

    pub(crate) fn is_on(which: Sabotage) -> bool {
        let chosen = CHOSEN.load(Ordering::Relaxed);
        let is_slow = [Sabotage::NoSharerCheck, Sabotage::NoUnregister].map(|which| which as u8).contains(&chosen);
        chosen == which as u8 || which == Sabotage::SlowTake && is_slow
    }
}

#[cfg(not(feature = "sabotage"))]
mod chosen {
    pub(crate) const fn read() {}
    pub(crate) const fn is_on(_: super::Sabotage) -> bool {
        false
    }
}

pub(crate) use chosen::{is_on, read};
