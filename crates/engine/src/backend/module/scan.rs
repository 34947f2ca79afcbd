//! A scan of a file: the kernel says which pages were written since the last one.

use kmem::pageonefs::{Bits, Harvest, Page};
use rustix::io::Errno;
use wire::{PageNo, Run};

use super::file::{CHUNK, CUT, Digests, File, Kind, window};
use crate::core::ledger::PAGES;

/// Pages whose bits are taken in one call: 128 MiB. The kernel keeps them in pieces of this size.
const WINDOW: u32 = 1 << 15;
const WORDS: usize = WINDOW as usize / 64;

/// What a scan found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// Pages that are candidates now.
    pub(crate) due: u64,
    /// Of these, those that the pacer has not been told of.
    pub(crate) new: u64,
}

impl<K: Kind> File<K> {
    /// Takes the dirty bits, and lets every page get older by a period.
    ///
    /// Hot pages are spared ([`crate::core::ledger`]): to take a bit takes the page's mappings
    /// away, and costs a guest two faults in its stage-2 tables. They count as written; their bits
    /// stay for a later scan. Bits are taken by words, so a word is spared whose pages are all hot
    /// and were all found written when its bits were taken last. Otherwise it would not be seen
    /// that one of them has calmed down.
    ///
    /// The kernel passes over what was never written, whatever the file's length. A file whose
    /// pages lie in more windows than [`super::file::State::windows`] is scanned up to there: what
    /// lies behind keeps its bits, and the ledger knows nothing of it.
    /// `Err`: the file is gone, or its mount; no memory; or the engine stops. Bits may be lost: the
    /// next scan asks for all pages that are there.
    pub(crate) fn scan(&self, stopping: impl Fn() -> bool) -> Result<Scanned, Errno> {
        let (spared, most, told, size) = {
            let state = self.state();
            (state.region.spared(), state.windows(), state.region.due().min(state.told), state.size)
        };
        let result = self.take_all(&spared, most, size, stopping);
        let mut state = self.state();
        let end = result.inspect_err(|_| state.asked = 0)?;
        if end < PAGES {
            self.forget(&mut state, Run::between(PageNo(end), PageNo(PAGES)));
            state.region.forget_ages(Run::between(PageNo(end), PageNo(PAGES)));
        }
        (state.asked, state.cut) = (end, if end < PAGES { state.cut + 1 } else { 0 });
        if state.cut == CUT {
            let why = state.unmanaged().unwrap_or_default();
            tracing::warn!(inode = self.inode, uid = self.uid, "a file is merged in part: {why}");
        }
        state.totals.scans += 1;
        state.region.end_scan();
        if state.totals.scans.is_multiple_of(RETRY) {
            state.region.retry_deferred();
        }
        let due = state.region.due();
        Ok(Scanned { due, new: due - told.min(due) })
    }

    /// Takes all dirty bits but those of spared words. Returns up to where: there may be so many
    /// windows. `size`: as it is listed. It may be longer by now: the kernel names what lies
    /// behind.
    fn take_all(&self, spared: &[Run], most: usize, size: u64, stopping: impl Fn() -> bool) -> Result<u32, Errno> {
        let mut bits = [0; WORDS];
        let listed = size.div_ceil(64 * kmem::PAGE_SIZE as u64) * 64;
        let (mut windows, mut last) = (0, None);
        for (run, is_spared) in split(spared, PAGES) {
            if is_spared {
                self.state().region.found_written(run).map_err(|_| Errno::NOMEM)?;
                continue;
            }
            let (mut from, end) = (run.page.0, run.end().0);
            while from < end {
                if stopping() {
                    return Err(Errno::INTR);
                }
                if last.replace(from / WINDOW) != Some(from / WINDOW) {
                    windows += 1;
                    if windows > most {
                        return Ok(from);
                    }
                }
                let mut to = end.min((from / WINDOW + 1) * WINDOW);
                if u64::from(from) < listed {
                    to = listed.min(to.into()) as u32;
                }
                let next = self.take_bits(from, &mut bits[..(to - from) as usize / 64])?;
                // It fits: it is no more than the end.
                from = next.clamp(to.into(), end.into()) as u32;
            }
        }
        Ok(PAGES)
    }

    /// Takes the dirty bits of pages from `from` on, a multiple of 64, and enters them. Returns
    /// which page may have the next.
    fn take_bits(&self, from: u32, bits: &mut [u64]) -> Result<u64, Errno> {
        let of = if from < self.state().asked { Bits::Written } else { Bits::All };
        let Harvest { dirty, next } = self.kernel.harvest(self.id, from.into(), of, bits)?;
        let runs = if dirty == 0 { Vec::new() } else { self.without_holes(runs(bits, from))? };
        let mut state = self.state();
        for run in runs {
            state.region.found_written(run).map_err(|_| Errno::NOMEM)?;
            let unmerged = self.forget(&mut state, run);
            // Else nobody says that they were written.
            state.totals.unmerged += if of == Bits::Written { unmerged } else { 0 };
        }
        state.region.took(PageNo(from), bits);
        Ok(next)
    }

    /// The pages of these runs but those that were recycled and are still holes: punching them has
    /// set their bits, and no write. What the guest writes after this look has a bit again.
    fn without_holes(&self, runs: Vec<Run>) -> Result<Vec<Run>, Errno> {
        let recycled: Vec<PageNo> = {
            let state = self.state();
            runs.iter().flat_map(|&run| state.region.recycled(run)).collect()
        };
        let mut holes = Vec::new();
        let mut rest = &recycled[..];
        while let Some(&first) = rest.first() {
            let (chunk, later) = rest.split_at(rest.partition_point(|&page| page < window(first) + CHUNK as u32));
            let words = self.digest(chunk, Digests::Private)?;
            let pages = chunk.iter().zip(words).filter(|&(_, word)| Page::from_word(word) == Page::None);
            holes.extend(pages.map(|(&page, _)| page));
            rest = later;
        }
        Ok(without(runs, &holes))
    }
}

/// Runs without these pages, all in ascending order.
fn without(runs: Vec<Run>, pages: &[PageNo]) -> Vec<Run> {
    let mut left = Vec::with_capacity(runs.len());
    let mut pages = pages.iter().peekable();
    for run in runs {
        let mut from = run.page;
        while let Some(&&page) = pages.peek().filter(|&&&page| page < run.end()) {
            left.extend((from < page).then(|| Run::between(from, page)));
            from = page + 1;
            pages.next();
        }
        left.extend((from < run.end()).then(|| Run::between(from, run.end())));
    }
    left
}

/// All of a file, in runs that are parts or lie between them; the former have `true`.
fn split(parts: &[Run], pages: u32) -> Vec<(Run, bool)> {
    let mut all = Vec::with_capacity(2 * parts.len() + 1);
    let mut from = PageNo(0);
    for &part in parts {
        all.extend((from < part.page).then(|| (Run::between(from, part.page), false)));
        all.push((part, true));
        from = part.end();
    }
    all.extend((from.0 < pages).then(|| (Run::between(from, PageNo(pages)), false)));
    all
}

/// Pages that were held or swapped out are looked at again after so many scans.
const RETRY: u64 = 4;

/// The runs of set bits; the first bit is page `from`. All of them are below [`PAGES`].
fn runs(bits: &[u64], from: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, &word) in bits.iter().enumerate() {
        let (mut word, base) = (word, from + at as u32 * 64);
        while word != 0 {
            let skip = word.trailing_zeros();
            let len = (!(word >> skip)).trailing_zeros();
            let run = Run::new(PageNo(base + skip), len);
            match runs.last_mut() {
                Some(last) if last.end() == run.page => last.len += run.len,
                _ => runs.push(run),
            }
            word = if skip + len == 64 { 0 } else { word & (u64::MAX << (skip + len)) };
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_out_of_runs() {
        let run = |page, len| Run::new(PageNo(page), len);
        let all = vec![run(0, 4), run(10, 1), run(20, 5)];
        assert_eq!(without(all.clone(), &[]), all);
        let pages = [0, 2, 10, 22, 24].map(PageNo);
        assert_eq!(without(all, &pages), [run(1, 1), run(3, 1), run(20, 2), run(23, 1)]);
    }

    #[test]
    fn spared_words_are_told_from_the_rest() {
        let run = |page, len| Run::new(PageNo(page), len);
        let parts = [run(64, 64), run(128, 64), run(256, 44)];
        let all = [(run(0, 64), false), (run(64, 64), true), (run(128, 64), true), (run(192, 64), false)];
        let all = [&all[..], &[(run(256, 44), true)]].concat();
        assert_eq!(split(&parts, 300), all);
        assert_eq!(split(&[], 5), [(run(0, 5), false)]);
    }

    #[test]
    fn bits_become_runs() {
        let run = |page, len| Run::new(PageNo(page), len);
        assert_eq!(runs(&[0, 0], 0), []);
        assert_eq!(runs(&[0b1011, 1 << 63], 0), [run(0, 2), run(3, 1), run(127, 1)]);
        assert_eq!(runs(&[1 << 63, 0b11], 64), [run(127, 3)]);
        assert_eq!(runs(&[u64::MAX, u64::MAX], PAGES - 128), [run(PAGES - 128, 128)]);
    }
}
