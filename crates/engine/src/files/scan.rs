//! A scan of a file: the kernel says which pages were written since the last one.

use kmem::pageonefs::Page;
use rustix::io::Errno;
use wire::{PageNo, Run};

use super::file::File;
use super::merge::{CHUNK, digest, window};
use crate::ledger::Entry;

/// Words of bits that are taken in one call: 8 GiB of memory.
const WORDS: usize = 1 << 15;

impl File {
    /// Takes the dirty bits, and lets every page get older by a period. Returns the pages that are
    /// candidates now.
    ///
    /// # Errors
    /// The file is gone, or its mount. Bits may be lost: all pages count as written.
    pub(super) fn scan(&self) -> Result<u64, Errno> {
        let (pages, first) = {
            let state = self.state();
            (state.region.pages, state.region.first_scan)
        };
        let mut bits = vec![0u64; (pages as usize).div_ceil(64).min(WORDS)];
        let mut from = 0u32;
        while from < pages {
            let words = ((pages - from) as usize).div_ceil(64).min(WORDS);
            let result = self.kernel.harvest(self.id, from.into(), &mut bits[..words]);
            let result = result.and_then(|dirty| match dirty {
                0 => Ok(Vec::new()),
                _ => self.without_holes(runs(&bits[..words], from, pages)),
            });
            let mut state = self.state();
            match result {
                Ok(runs) => {
                    for run in runs {
                        state.region.mark_written(run);
                        let unmerged = self.forget(&mut state, run);
                        state.totals.unmerged += unmerged;
                    }
                }
                Err(why) => {
                    let all = state.region.all();
                    state.region.mark_written(all);
                    return Err(why);
                }
            }
            from += (words * 64) as u32;
        }
        let mut state = self.state();
        if first {
            // Whenever its pages were written: it was not asked before.
            let all = state.region.all();
            state.region.mark_written(all);
        }
        state.region.end_scan(false);
        state.totals.scans += 1;
        if state.totals.scans.is_multiple_of(RETRY) {
            state.region.retry_deferred();
        }
        Ok(state.region.due())
    }
}

impl File {
    /// The pages of these runs but those that were recycled and are still holes: punching them has
    /// set their bits, and no write. What the guest writes after this look has a bit again.
    fn without_holes(&self, runs: Vec<Run>) -> Result<Vec<Run>, Errno> {
        let recycled: Vec<PageNo> = {
            let state = self.state();
            if state.region.counts().recycled == 0 {
                return Ok(runs);
            }
            let known = runs.iter().flat_map(|&run| state.region.known(run));
            known.filter(|&page| state.region.entry(page) == Entry::Recycled).collect()
        };
        let mut holes = Vec::new();
        let mut rest = &recycled[..];
        while let Some(&first) = rest.first() {
            let (chunk, later) = rest.split_at(rest.partition_point(|&page| page < window(first) + CHUNK as u32));
            let words = digest(self, chunk, false)?;
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

/// Pages that were held or swapped out are looked at again after so many scans.
const RETRY: u64 = 4;

/// The runs of set bits; the first bit is page `from`.
fn runs(bits: &[u64], from: u32, pages: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, &word) in bits.iter().enumerate() {
        let (mut word, base) = (word, from + at as u32 * 64);
        while word != 0 {
            let skip = word.trailing_zeros();
            let len = (!(word >> skip)).trailing_zeros();
            let end = base.saturating_add(skip + len).min(pages);
            let run = Run::between(PageNo((base + skip).min(end)), PageNo(end));
            match runs.last_mut() {
                Some(last) if last.end() == run.page => last.len += run.len,
                _ if run.len > 0 => runs.push(run),
                _ => {}
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
    fn bits_become_runs() {
        let run = |page, len| Run::new(PageNo(page), len);
        assert_eq!(runs(&[0, 0], 0, 128), []);
        assert_eq!(runs(&[0b1011, 1 << 63], 0, 128), [run(0, 2), run(3, 1), run(127, 1)]);
        assert_eq!(runs(&[1 << 63, 0b11], 64, 192), [run(127, 3)]);
        assert_eq!(runs(&[u64::MAX, u64::MAX], 0, 100), [run(0, 100)]);
        assert_eq!(runs(&[0, u64::MAX], 0, 40), [], "nothing behind the end");
    }
}
