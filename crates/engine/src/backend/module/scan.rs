//! A scan of a file: the kernel says which pages were written since the last one.

use kmem::pageonefs::Page;
use rustix::io::Errno;
use wire::{PageNo, Run};

use super::file::{CHUNK, Digests, File, Kind, window};
use crate::core::ledger::{Cool, Entry};

/// Words of bits that are taken in one call: 8 GiB of memory.
const WORDS: usize = 1 << 15;

impl<K: Kind> File<K> {
    /// Takes the dirty bits, and lets every page get older by a period. Returns the pages that are
    /// candidates now.
    ///
    /// Hot pages are spared ([`crate::core::ledger`]): to take a bit takes the page's mappings
    /// away, and costs a guest two faults in its stage-2 tables. They count as written; their bits
    /// stay for a later scan. Bits are taken by words, so a word is spared whose pages are all hot
    /// and were all found written when its bits were taken last. Otherwise it would not be seen
    /// that one of them has calmed down.
    /// `Err`: the file is gone, or its mount. Bits may be lost: all pages count as written.
    pub(crate) fn scan(&self) -> Result<u64, Errno> {
        let (pages, first, parts) = {
            let state = self.state();
            let pages = state.region.pages;
            let spared = state.region.spared().map_or_else(Vec::new, |spared| full_words(spared.iter(), pages));
            let parts = spared.into_iter().filter(|run| state.all_written[run.page.0 as usize / 64]);
            (pages, state.region.first_scan, parts.collect::<Vec<Run>>())
        };
        let mut bits = vec![0u64; (pages as usize).div_ceil(64).min(WORDS)];
        for (run, is_spared) in split(&parts, pages) {
            if is_spared {
                self.state().region.ages.found_written(run);
                continue;
            }
            self.take_bits(run, pages, &mut bits)?;
        }
        let mut state = self.state();
        if first {
            // Whenever its pages were written: it was not asked before.
            let all = state.region.all();
            state.region.ages.found_written(all);
        }
        state.region.end_scan(Cool::Copies);
        state.totals.scans += 1;
        if state.totals.scans.is_multiple_of(RETRY) {
            state.region.ages.retry_deferred();
        }
        Ok(state.region.ages.due())
    }

    /// Takes the dirty bits of a run, whose ends are those of words, and enters them. `bits`: room.
    fn take_bits(&self, run: Run, pages: u32, bits: &mut [u64]) -> Result<(), Errno> {
        let (mut from, end) = (run.page.0, run.end().0);
        while from < end {
            let words = ((end - from) as usize).div_ceil(64).min(bits.len());
            let result = self.kernel.harvest(self.id, from.into(), &mut bits[..words]);
            let result = result.and_then(|dirty| match dirty {
                0 => Ok(Vec::new()),
                _ => self.without_holes(runs(&bits[..words], from, pages)),
            });
            let mut state = self.state();
            match result {
                Ok(runs) => {
                    for (at, &word) in (from..pages).step_by(64).zip(&bits[..words]) {
                        let len = (pages - at).min(64);
                        state.all_written[at as usize / 64] = word.count_ones() == len;
                    }
                    for run in runs {
                        state.region.ages.found_written(run);
                        let unmerged = self.forget(&mut state, run);
                        state.totals.unmerged += unmerged;
                    }
                }
                Err(why) => {
                    let all = state.region.all();
                    state.region.ages.found_written(all);
                    return Err(why);
                }
            }
            from += (words * 64) as u32;
        }
        Ok(())
    }
}

impl<K: Kind> File<K> {
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

/// The words all of whose pages are among these, which are in ascending order, of a file of `end`.
fn full_words(pages: impl Iterator<Item = u64>, end: u32) -> Vec<Run> {
    let mut full = Vec::new();
    let (mut word, mut count) = (0, 0);
    for page in pages.map(|page| page as u32) {
        count = if page / 64 == word { count + 1 } else { 1 };
        word = page / 64;
        let len = (end - word * 64).min(64);
        full.extend((count == len).then(|| Run::new(PageNo(word * 64), len)));
    }
    full
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
    fn words_of_spared_pages_are_told_from_the_rest() {
        let run = |page, len| Run::new(PageNo(page), len);
        let spared = (0..10).chain(64..192).chain(193..256).chain(256..300);
        let parts = full_words(spared, 300);
        assert_eq!(parts, [run(64, 64), run(128, 64), run(256, 44)]);
        let all = [(run(0, 64), false), (run(64, 64), true), (run(128, 64), true), (run(192, 64), false)];
        let all = [&all[..], &[(run(256, 44), true)]].concat();
        assert_eq!(split(&parts, 300), all);
        assert_eq!(split(&[], 5), [(run(0, 5), false)]);
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
