//! The `pages` case: distinct pages of booted guests, from the dumps that other benches use too.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};

use super::measure::Plan;
use super::pages::{Layout, Pages};
use bench_common::dump::Dump;
use bench_common::guest;
use bench_common::interrupt::Interrupt;
use bench_common::random::mix;

/// Guests to take pages from.
const GUESTS: usize = 4;

/// Pages of guests, no two alike, in a random order.
pub(super) struct Contents {
    dumps: Vec<Dump>,
    /// Guest and page.
    distinct: Vec<(usize, usize)>,
}

impl Contents {
    pub(super) fn read() -> Result<Self> {
        guest::make_dumps(GUESTS, &Interrupt::watch()?).context("no guests to take pages from")?;
        let dumps = (0..GUESTS).map(Dump::open).collect::<Result<Vec<_>, _>>()?;
        let mut known = HashSet::new();
        let all = dumps.iter().enumerate().flat_map(|(guest, dump)| (0..dump.pages()).map(move |page| (guest, page)));
        let is_new = |&(guest, page): &(usize, usize)| dumps[guest].identity(page).is_some_and(|id| known.insert(id));
        let mut distinct: Vec<_> = all.filter(is_new).collect();
        ensure!(distinct.len() >= 2000, "only {} distinct pages in the guests' memory", distinct.len());
        distinct.sort_by_key(|&(guest, page)| mix((guest << 32 | page) as u64));
        Ok(Self { dumps, distinct })
    }

    /// As many keys as were asked for, or as there are, with a part left for the misses.
    pub(super) fn plan(&self, asked: usize, plan: impl Fn(usize) -> Plan) -> Plan {
        let fits = |keys: usize| keys + plan(keys).layout.queries <= self.distinct.len();
        let mut keys = asked.min(self.distinct.len());
        while !fits(keys) {
            keys = keys * 99 / 100;
        }
        plan(keys)
    }

    pub(super) fn fill(&self, pages: &mut Pages, layout: Layout) {
        let all: Vec<&[u64]> =
            self.distinct.iter().map(|&(guest, page)| self.dumps[guest].words(page).unwrap_or_default()).collect();
        pages.fill(|number, page| {
            let words = match number {
                n if n < layout.keys => all[n],
                n if n < layout.keys + layout.queries => all[layout.asked(n - layout.keys)],
                n => all[(n - layout.queries).min(all.len() - 1)], // pages past the misses are not looked up
            };
            let (to, _) = page.as_chunks_mut::<8>();
            to.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_ne_bytes());
        });
    }
}
