//! A scan of a file: the kernel says which pages were written since the last one.

use rustix::io::Errno;
use wire::{PageNo, Run};

use super::file::File;

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
            let mut state = self.state();
            match result {
                Ok(0) => {}
                Ok(_) => {
                    for run in runs(&bits[..words], from, pages) {
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
    fn bits_become_runs() {
        let run = |page, len| Run::new(PageNo(page), len);
        assert_eq!(runs(&[0, 0], 0, 128), []);
        assert_eq!(runs(&[0b1011, 1 << 63], 0, 128), [run(0, 2), run(3, 1), run(127, 1)]);
        assert_eq!(runs(&[1 << 63, 0b11], 64, 192), [run(127, 3)]);
        assert_eq!(runs(&[u64::MAX, u64::MAX], 0, 100), [run(0, 100)]);
        assert_eq!(runs(&[0, u64::MAX], 0, 40), [], "nothing behind the end");
    }
}
