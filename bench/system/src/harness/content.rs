//! What lies on the pages of the benches' clients, and what of it can be merged.
//!
//! Every process makes its content from its own number and the page's, so that nothing has to be
//! handed over, and the bench can count what is reachable without looking at a client. A page has
//! an identity: pages with equal identities hold equal bytes, and identity 0 is the zero page. The
//! bytes are words of a hash over identity and place.
//!
//! *Written pages.* Of each stretch of 4096 pages, 64 in the middle are the ones that a client
//! writes to while it times itself ([`crate::harness::probe`]). They do not count as reachable.

use std::ops::Range;

use anyhow::Result;
use bench_common::dump::Dump;
use bench_common::random::mix;
use clap::ValueEnum;
use kmem::PAGE_SIZE;

/// Words of a page.
pub(crate) const WORDS: usize = PAGE_SIZE / 8;
/// Of this many pages …
const STRETCH: usize = 4096;
/// … in `idle` this many, the last, are zero …
const ZERO: usize = STRETCH / 8;
/// … and this many, in the middle, are written to while merging is timed.
const WRITTEN: Range<usize> = STRETCH / 2..STRETCH / 2 + STRETCH / 64;
/// Mean length of the zeros in front of a page of `zero-prefix`.
const PREFIX: f64 = 128.0;

/// What the clients hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// Each page drawn from as many different ones as a client has pages, in any order
    Random,
    /// The same, with zero bytes of mean length 128 in front
    ZeroPrefix,
    /// All clients hold the same pages in the same order
    Clones,
    /// As `random`, but a third are zero pages
    Zero,
    /// The memory of guests of `pageone demo`, each of which has checked all of its files once
    Guest,
    /// As `clones`, but the last eighth of every 16 MiB is zero
    Idle,
    /// Unique pages first ([`UNIQUE`]), then as `clones`
    Steady,
    /// As `clones`, but only the first of each four stretches of 64 pages; the others are unique
    Quarter,
    /// The same, but the first of each sixteen
    Unique,
}

/// Pages of a stretch of `quarter`.
const COMMON: usize = 64;

/// How many of so many pages of `quarter` all clients have in common.
pub(crate) fn common(pages: usize) -> usize {
    pages / (4 * COMMON) * COMMON
}

/// How many pages of `steady` are unique, at the beginning; later duplicates are written over them.
pub(crate) const UNIQUE: usize = 30_000;

impl Case {
    /// As on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// A client's content.
pub(crate) struct Content {
    case: Case,
    client: u64,
    pages: usize,
    dump: Option<Dump>,
    /// Pages that have been given the content of a seed since.
    duplicates: Vec<(Range<usize>, u64)>,
}

impl Content {
    /// Content of client number `client`, `pages` long.
    ///
    /// # Errors
    ///
    /// When a guest's dump is not there.
    pub(crate) fn new(case: Case, client: usize, pages: usize) -> Result<Self> {
        let dump = if case == Case::Guest { Some(Dump::open(client)?) } else { None };
        Ok(Self { case, client: client as u64, pages, dump, duplicates: Vec::new() })
    }

    /// The page's identity; `None`: the page was never touched.
    pub(crate) fn identity(&self, page: usize) -> Option<u64> {
        if let Some((range, seed)) = self.duplicates.iter().find(|(range, _)| range.contains(&page)) {
            return Some(mix(seed << 40 | (page - range.start) as u64) | 1 << 63);
        }
        let any = || 1 + mix(self.client << 40 | page as u64) % self.pages as u64;
        match self.case {
            Case::Random | Case::ZeroPrefix => Some(any()),
            Case::Clones => Some(page as u64 + 1),
            Case::Zero if mix(!(self.client << 40 | page as u64)).is_multiple_of(3) => Some(0),
            Case::Zero => Some(any()),
            Case::Idle if page % STRETCH >= STRETCH - ZERO => Some(0),
            Case::Idle => Some(page as u64 + 1),
            Case::Steady if page < UNIQUE => Some((self.client + 1) << 40 | page as u64),
            Case::Quarter if !(page / COMMON).is_multiple_of(4) => Some((self.client + 1) << 40 | page as u64),
            Case::Unique if !(page / COMMON).is_multiple_of(16) => Some((self.client + 1) << 40 | page as u64),
            Case::Steady | Case::Quarter | Case::Unique => Some(page as u64 + 1),
            Case::Guest => self.dump.as_ref()?.identity(page),
        }
    }

    /// Gives pages new content: clients to which the same seed is given have the same there. Not
    /// for a guest's memory.
    pub(crate) fn duplicate(&mut self, pages: Range<usize>, seed: u64) {
        self.duplicates.push((pages, seed));
    }

    /// Whether the page was ever touched.
    pub(crate) fn is_resident(&self, page: usize) -> bool {
        self.dump.as_ref().is_none_or(|dump| dump.words(page).is_some())
    }

    /// Writes the page through `put`, word by word; zeros too, so that the page becomes resident.
    /// Nothing for an untouched one.
    pub(crate) fn write(&self, page: usize, mut put: impl FnMut(usize, u64)) {
        if let Some(dump) = &self.dump {
            if let Some(words) = dump.words(page) {
                words.iter().enumerate().for_each(|(word, &value)| put(word, value));
            }
            return;
        }
        let Some(identity) = self.identity(page) else { return };
        let prefix = self.prefix(identity);
        (0..WORDS).for_each(|word| put(word, made(identity, word, prefix)));
    }

    /// One word; 0 on an untouched page.
    pub(crate) fn word(&self, page: usize, word: usize) -> u64 {
        match &self.dump {
            Some(dump) => dump.words(page).map_or(0, |words| words[word]),
            None => self.identity(page).map_or(0, |identity| made(identity, word, self.prefix(identity))),
        }
    }

    /// Zero bytes in front: geometrically distributed.
    fn prefix(&self, identity: u64) -> usize {
        if self.case != Case::ZeroPrefix {
            return 0;
        }
        let uniform = (mix(!identity) >> 11) as f64 / (1u64 << 53) as f64;
        // Not all of a page, however unlikely: then it would be a zero page.
        ((-(1.0 - uniform).ln() * PREFIX) as usize).min(PAGE_SIZE / 2)
    }
}

/// A word of a page with `prefix` zero bytes in front.
fn made(identity: u64, word: usize, prefix: usize) -> u64 {
    if identity == 0 {
        return 0;
    }
    let value = (identity << 16 ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let value = value ^ value >> 32;
    match prefix.saturating_sub(word * 8) {
        0 => value,
        zeros @ 1..8 => value & u64::MAX << (8 * zeros),
        _ => 0,
    }
}

/// The pages that a client writes to while it times itself.
pub(crate) fn written(pages: usize) -> impl Iterator<Item = usize> {
    (0..pages).filter(|page| WRITTEN.contains(&(page % STRETCH)))
}

/// What all clients together could save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// Pages that are resident.
    pub(crate) resident: u64,
    /// Pages that have an equal, zero pages among them.
    pub(crate) mergeable: u64,
    /// Zero pages.
    pub(crate) zero: u64,
    /// Frames that these would need.
    pub(crate) frames: u64,
}

/// Counts what `clients` hold. `left_out`: the first client's written pages do not count as
/// mergeable.
pub(crate) fn reach(clients: &[Content], left_out: bool) -> Reach {
    let mut reach = Reach::default();
    let mut seen = Vec::new();
    for (number, client) in clients.iter().enumerate() {
        for page in 0..client.pages {
            let Some(identity) = client.identity(page) else { continue };
            reach.resident += 1;
            if !(left_out && number == 0 && WRITTEN.contains(&(page % STRETCH))) {
                seen.push(identity);
            }
        }
    }
    seen.sort_unstable();
    for equal in seen.chunk_by(|a, b| a == b) {
        match equal {
            [0, ..] => reach.zero += equal.len() as u64,
            [_] => {}
            _ => {
                reach.mergeable += equal.len() as u64;
                reach.frames += 1;
            }
        }
    }
    reach.mergeable += reach.zero;
    reach
}

#[cfg(test)]
mod tests;
