//! Whether the host could give back what merging has saved.
//!
//! Every page that was merged, or taken back, takes memory of its own again when it is written. A
//! host that gave the saved memory to further guests may lack it then: when many guests start anew
//! at once, all of them write. What is available, with free swap space, is compared with two needs:
//!
//! ```text
//!   headroom_percent   of what all such pages would take
//!   headroom_seconds   at the rate at which they were written over the last minute
//! ```
//!
//! While less is available, nothing is merged. Merging frees as much as it may need again; but free
//! memory is what further guests are placed by, and a page that is merged in such a time is soon
//! written, and costs a copy. Scans go on, so that the rate is known. Merging goes on when a
//! quarter more is there than the needs: the two states do not alternate.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use parking_lot::Mutex;

use crate::config::Config;

/// The time over which the rate is taken.
const MINUTE: Duration = Duration::from_secs(60);
/// How long a look is good for: it reads every store's counts.
const LOOK: Duration = Duration::from_secs(1);
/// How much more than the needs there must be for merging to go on.
const RESUME: f64 = 1.25;

/// What could be needed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Demand {
    /// Bytes that all merged and given back pages would take.
    pub(crate) unmerge_bytes: u64,
    /// Pages that have taken memory of their own again so far.
    pub(crate) unmerged_pages: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct View {
    /// Bytes that were available, with free swap space; `None`: not known.
    pub(crate) available: Option<u64>,
    pub(crate) bytes_per_second: f64,
    /// Why nothing is merged, and until when.
    pub(crate) short: Option<String>,
}

impl View {
    /// How long what is available lasts at the rate of the last minute. `None`: for ever.
    pub(crate) fn seconds(&self) -> Option<f64> {
        let available = self.available.filter(|_| self.bytes_per_second > 0.0)?;
        Some(available as f64 / self.bytes_per_second)
    }
}

#[derive(Default)]
struct State {
    /// Pages unmerged so far, at some times: one before the last minute, and those since.
    samples: VecDeque<(Instant, u64)>,
    looked: Option<Instant>,
    view: View,
}

#[derive(Default)]
pub(crate) struct Headroom {
    state: Mutex<State>,
    pub(crate) below: Below,
}

/// What files that are merged below their mappings save.
#[derive(Default)]
pub(crate) struct Below {
    /// Pages that they save now.
    pub(crate) pages: AtomicU64,
    /// Pages that took memory of their own again, ever.
    pub(crate) unmerged: AtomicU64,
}

impl Below {
    pub(crate) fn set(&self, pages: u64, unmerged: u64) {
        self.pages.store(pages, Relaxed);
        self.unmerged.store(unmerged, Relaxed);
    }
}

impl Headroom {
    /// What there was within the last second; else `measure` gives demand and available bytes.
    pub(crate) fn look(&self, now: Instant, config: &Config, measure: impl FnOnce() -> (Demand, Option<u64>)) -> View {
        {
            let state = self.state.lock();
            if state.looked.is_some_and(|looked| now.duration_since(looked) < LOOK) {
                return state.view.clone();
            }
        }
        let (demand, available) = measure();
        self.look_anew(now, config, demand, available)
    }

    /// What there is now, by this demand, and these bytes that are available.
    pub(crate) fn look_anew(&self, now: Instant, config: &Config, demand: Demand, available: Option<u64>) -> View {
        let mut state = self.state.lock();
        state.looked = Some(now);
        let bytes_per_second = rate(&mut state.samples, now, demand.unmerged_pages);
        let was_short = state.view.short.is_some();
        let margin = if was_short { RESUME } else { 1.0 };
        let short = available.and_then(|available| why_short(config, demand, available, bytes_per_second, margin));
        match (&short, was_short) {
            (Some(why), false) => tracing::warn!("merging pauses: {why}"),
            (None, true) => tracing::info!("there is headroom again; merging goes on"),
            _ => {}
        }
        state.view = View { available, bytes_per_second, short };
        state.view.clone()
    }
}

/// Bytes a second over the last minute. `pages`: so far, at this time.
fn rate(samples: &mut VecDeque<(Instant, u64)>, now: Instant, pages: u64) -> f64 {
    // The first of two that are both older says nothing about the last minute.
    while samples.get(1).is_some_and(|&(at, _)| now.duration_since(at) >= MINUTE) {
        samples.pop_front();
    }
    // However often somebody asks, there is one a second.
    if samples.back().is_none_or(|&(at, _)| now.duration_since(at) >= LOOK) {
        samples.push_back((now, pages));
    }
    let (since, before) = samples[0];
    let pages = pages.saturating_sub(before) as f64;
    pages * PAGE_SIZE as f64 / now.duration_since(since).max(MINUTE).as_secs_f64()
}

/// Why the headroom is short. `margin`: how much more than the needs there must be.
fn why_short(config: &Config, demand: Demand, available: u64, bytes_per_second: f64, margin: f64) -> Option<String> {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let available = available as f64;
    let all = demand.unmerge_bytes as f64;
    let (percent, seconds) = (config.headroom_percent, config.headroom_seconds);
    let share = all * percent / 100.0;
    if available < share * margin {
        return Some(format!(
            "{:.0} MiB of memory and swap space are available, and writes to merged pages could take {:.0} MiB: less than \
             headroom_percent = {percent} allows; merging waits until there are {:.0} MiB: add swap space, or stop guests",
            mib(available),
            mib(all),
            mib(share * RESUME)
        ));
    }
    let lasting = bytes_per_second * seconds;
    (available < lasting * margin).then(|| {
        format!(
            "writes to merged pages take {:.0} MiB a second, for which the {:.0} MiB of memory and swap space that are \
             available last {:.0} s: less than headroom_seconds = {seconds}; merging waits until they last {:.0} s: stop \
             or pause guests that start, or add swap space",
            mib(bytes_per_second),
            mib(available),
            available / bytes_per_second,
            seconds * RESUME
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn demand(mib: u64, unmerged_mib: u64) -> Demand {
        Demand { unmerge_bytes: mib * MIB, unmerged_pages: unmerged_mib * MIB / PAGE_SIZE as u64 }
    }

    #[test]
    fn merging_pauses_below_the_share_and_goes_on_above_a_quarter_more() {
        let config = Config { headroom_percent: 50.0, ..Config::default() };
        let headroom = Headroom::default();
        let now = Instant::now();
        let short = |available: u64| headroom.look_anew(now, &config, demand(1000, 0), Some(available * MIB)).short;
        assert_eq!(short(500), None);
        let why = short(499).unwrap();
        assert!(why.contains("499 MiB") && why.contains("1000 MiB") && why.contains("625 MiB"), "{why}");
        assert!(short(624).is_some(), "it was short");
        assert_eq!((short(625), short(501)), (None, None));
    }

    #[test]
    fn merging_pauses_when_the_memory_would_not_last() {
        let config = Config { headroom_percent: 0.0, headroom_seconds: 10.0, ..Config::default() };
        let headroom = Headroom::default();
        let now = Instant::now();
        let look = |second, unmerged| {
            let at = now + Duration::from_secs(second);
            headroom.look(at, &config, || (demand(9000, unmerged), Some(1000 * MIB)))
        };
        assert_eq!(look(0, 0).seconds(), None);
        let view = look(10, 600);
        assert_eq!((view.bytes_per_second, view.seconds()), (10.0 * MIB as f64, Some(100.0)), "over a minute");
        assert_eq!(look(10, 9000), view, "once a second");
        let mut samples = VecDeque::new();
        for i in 0..100 {
            rate(&mut samples, now + Duration::from_millis(100 * i), i);
        }
        assert_eq!(samples.len(), 10);
        let why = look(30, 6060).short.unwrap();
        assert!(why.contains("101 MiB a second") && why.contains("headroom_seconds = 10"), "{why}");
        assert!(look(71, 6060).short.is_some(), "the minute holds these writes");
        let view = look(200, 6060);
        assert_eq!((view.short, view.bytes_per_second), (None, 0.0));
    }

    #[test]
    fn nothing_is_short_where_the_operator_or_the_kernel_says_nothing() {
        let headroom = Headroom::default();
        let off = Config { headroom_percent: 0.0, headroom_seconds: 0.0, ..Config::default() };
        let none = headroom.look_anew(Instant::now(), &off, demand(1 << 20, 1 << 20), Some(0));
        assert_eq!((none.short, none.available), (None, Some(0)));
        let unknown = headroom.look_anew(Instant::now(), &Config::default(), demand(1 << 20, 0), None);
        assert_eq!(unknown.short, None);
    }
}
