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
//! While less is available, merging pauses. Merging frees as much as it may need again; but free
//! memory is what further guests are placed by, and a page that is merged in such a time is soon
//! written, and costs a copy. Scans go on, so that the rate is known. Merging goes on when a
//! quarter more is there than the needs: the two states do not alternate.
//!
//! What is available is shared out among users, as much to each as it needs or an equal share.
//! Only those who need more wait: whatever one user does or claims, others are merged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use claims::Owner;
use kmem::PAGE_SIZE;

use crate::config::Config;
use crate::sync::Mutex;

/// The time over which the rate is taken.
const MINUTE: Duration = Duration::from_secs(60);
/// How long a look is good for: it reads every store's counts.
const LOOK: Duration = Duration::from_secs(1);
/// How much more than the needs there must be for merging to go on.
const RESUME: f64 = 1.25;

/// A user; `None`: what is lent for no user in particular.
pub(crate) type Who = Option<Owner>;

/// What could be needed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Demand {
    /// Bytes that all merged and given back pages would take.
    pub(crate) unmerge_bytes: u64,
    /// Pages that have taken memory of their own again so far.
    pub(crate) unmerged_pages: u64,
    /// The parts of those who have any now. What they share is in the part of each.
    pub(crate) parts: BTreeMap<Who, Part>,
}

/// One user's part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Part {
    pub(crate) unmerge_bytes: u64,
    pub(crate) unmerged_pages: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct View {
    pub(crate) bytes_per_second: f64,
    /// Why merging pauses, and until when.
    pub(crate) short: Option<String>,
    /// Whose merging that is.
    waits: BTreeSet<Who>,
}

impl View {
    /// Why nothing of this user is merged.
    pub(crate) fn pauses(&self, who: Who) -> Option<&str> {
        self.short.as_deref().filter(|_| self.waits.contains(&who))
    }

    /// How long so many bytes last at the rate of the last minute. `None`: for ever.
    pub(crate) fn seconds(&self, available: u64) -> Option<f64> {
        (self.bytes_per_second > 0.0).then(|| available as f64 / self.bytes_per_second)
    }
}

/// Pages unmerged so far, at some times: one before the last minute, and those since.
type Samples = VecDeque<(Instant, Demand)>;

#[derive(Default)]
struct State {
    samples: Samples,
    looked: Option<Instant>,
    view: Arc<View>,
}

#[derive(Default)]
pub(crate) struct Headroom {
    state: Mutex<State>,
    pub(crate) below: Mutex<Below>,
}

/// What files that are merged below their mappings save, as of the last look.
#[derive(Clone, Debug, Default)]
pub(crate) struct Below {
    pub(crate) all: Part,
    /// By the owners of the files.
    pub(crate) parts: BTreeMap<Who, Part>,
}

impl Headroom {
    /// What there was within the last second; else `measure` gives demand and available bytes.
    pub(crate) fn look(
        &self,
        now: Instant,
        config: &Config,
        measure: impl FnOnce() -> (Demand, Option<u64>),
    ) -> Arc<View> {
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
    fn look_anew(&self, now: Instant, config: &Config, demand: Demand, available: Option<u64>) -> Arc<View> {
        let mut state = self.state.lock();
        state.looked = Some(now);
        let was_short = state.view.short.is_some();
        let needs = Needs::new(&mut state.samples, now, demand);
        let margin = if was_short { RESUME } else { 1.0 };
        let short = available.and_then(|available| needs.why_short(config, available, margin));
        match (&short, was_short) {
            (Some((why, _)), false) => tracing::warn!("merging pauses: {why}"),
            (None, true) => tracing::info!("there is headroom again; merging goes on"),
            _ => {}
        }
        let (short, waits) = short.unzip();
        let waits = waits.unwrap_or_default();
        state.view = Arc::new(View { bytes_per_second: needs.all.bytes_per_second, short, waits });
        state.view.clone()
    }
}

/// Of all, or of one user.
#[derive(Clone, Copy)]
struct Need {
    unmerge_bytes: f64,
    bytes_per_second: f64,
}

struct Needs {
    all: Need,
    parts: BTreeMap<Who, Need>,
}

impl Needs {
    /// By what is merged now, and by what was written over the last minute.
    fn new(samples: &mut Samples, now: Instant, demand: Demand) -> Self {
        // The first of two that are both older says nothing about the last minute.
        while samples.get(1).is_some_and(|&(at, _)| now.duration_since(at) >= MINUTE) {
            samples.pop_front();
        }
        // However often somebody asks, there is one a second.
        if samples.back().is_none_or(|&(at, _)| now.duration_since(at) >= LOOK) {
            samples.push_back((now, demand.clone()));
        }
        let (since, before) = &samples[0];
        let seconds = now.duration_since(*since).max(MINUTE).as_secs_f64();
        let need = |part: Part, before: u64| Need {
            unmerge_bytes: part.unmerge_bytes as f64,
            bytes_per_second: part.unmerged_pages.saturating_sub(before) as f64 * PAGE_SIZE as f64 / seconds,
        };
        let Demand { unmerge_bytes, unmerged_pages, parts } = demand;
        let of_part = |(who, part)| {
            let before = before.parts.get(&who).map_or(0, |part: &Part| part.unmerged_pages);
            (who, need(part, before))
        };
        Self {
            all: need(Part { unmerge_bytes, unmerged_pages }, before.unmerged_pages),
            parts: parts.into_iter().map(of_part).collect(),
        }
    }

    /// Those who need more than an equal share of what there is.
    fn over_their_share(&self, there: f64, need: impl Fn(&Need) -> f64) -> BTreeSet<Who> {
        let mut parts: Vec<(f64, Who)> = self.parts.iter().map(|(&who, part)| (need(part), who)).collect();
        parts.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut left, mut others) = (there, parts.len());
        let fits = parts.iter().take_while(|&&(need, _)| {
            let fits = need <= left / others as f64;
            (left, others) = (left - need, others - 1);
            fits
        });
        let fit = fits.count();
        parts[fit..].iter().map(|&(_, who)| who).collect()
    }

    /// Why the headroom is short, and who waits. `margin`: how much more than the needs there must
    /// be.
    fn why_short(&self, config: &Config, available: u64, margin: f64) -> Option<(String, BTreeSet<Who>)> {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let available = available as f64;
        let Need { unmerge_bytes: all, bytes_per_second } = self.all;
        let (percent, seconds) = (config.headroom_percent, config.headroom_seconds);
        let share = percent / 100.0;
        if available < all * share * margin {
            let why = format!(
                "{:.0} MiB of memory and swap space are available, and writes to merged pages could take {:.0} MiB: less than \
                 headroom_percent = {percent} allows; merging waits until there are {:.0} MiB: add swap space, or stop guests",
                mib(available),
                mib(all),
                mib(all * share * RESUME)
            );
            return Some((why, self.over_their_share(available, |need| need.unmerge_bytes * share * margin)));
        }
        (available < bytes_per_second * seconds * margin).then(|| {
            let why = format!(
                "writes to merged pages take {:.0} MiB a second, for which the {:.0} MiB of memory and swap space that are \
                 available last {:.0} s: less than headroom_seconds = {seconds}; merging waits until they last {:.0} s: stop \
                 or pause guests that start, or add swap space",
                mib(bytes_per_second),
                mib(available),
                available / bytes_per_second,
                seconds * RESUME
            );
            (why, self.over_their_share(available, |need| need.bytes_per_second * seconds * margin))
        })
    }
}

#[cfg(test)]
mod tests;
