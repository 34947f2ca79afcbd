//! The host's side: claim, recycle, release.
//!
//! For the bits of a word of F that stand for managed RAM (*wanted*):
//!
//! 1. *Claim*: set the bits in C, **then** clear them in F. Bits that were still set are the host's
//!    own. For the others C is cleared again at once.
//! 2. *Recycle*: zero the pages, by runs.
//! 3. *Release*: clear the bits in C.
//!
//! The guest is not trusted. The host reads only bits from the pool. The length of the pool and
//! [`Ram`], which both belong to the host, limit the frames that these bits can name. A guest that
//! writes arbitrary bits can only have its own RAM zeroed, or not.

use std::ops::{Deref, Range};
use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::primitive::Ordering::SeqCst;
use crate::ram::Ram;

/// Words that are claimed together: 8,192 pages. Fewer would cut long runs, and a guest would wait
/// longer for more.
pub const BATCH_WORDS: usize = 128;

/// The host's operations. One thread at a time works on a pool.
///
/// `P` is the host's reference to its pool: `&Pool` if the pool outlives the host, `Arc<Pool>` or
/// `Box<Pool>` if the host owns it.
pub struct Host<P> {
    pool: P,
    ram: Ram,
    runs: Vec<Range<u64>>,
}

/// The result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recycled {
    /// Pages passed to the closure.
    pub pages: u64,
    /// Runs of these pages.
    pub runs: u64,
    /// Pages that the guest took back between the host's look and its claim.
    pub lost: u64,
    /// The longest time that a batch took from its first claim on: a guest that needs one of its
    /// pages waits no longer.
    pub longest: Duration,
}

impl Recycled {
    /// Adds what another batch has done.
    pub fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.runs += other.runs;
        self.lost += other.lost;
        self.longest = self.longest.max(other.longest);
    }
}

/// Pages of one word that the host owns until this value is dropped.
#[must_use = "dropping a claim releases it"]
pub struct Claim<'p> {
    pool: &'p Pool,
    word: usize,
    bits: u64,
}

impl Claim<'_> {
    /// The first frame of the word.
    pub fn first(&self) -> u64 {
        self.word as u64 * 64
    }

    /// The pages, bit `i` for frame `first() + i`.
    pub fn bits(&self) -> u64 {
        self.bits
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.pool.claims()[self.word].fetch_and(!self.bits, SeqCst);
    }
}

impl<P: Deref<Target = Pool>> Host<P> {
    /// The host of a pool, for a guest with this managed RAM.
    pub fn new(pool: P, ram: Ram) -> Self {
        Self { pool, ram, runs: Vec::with_capacity(BATCH_WORDS * 32) }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Releases the claims that an earlier host left when it died.
    ///
    /// Only for a host that is certain that no other host works on the pool, in any process. An
    /// exclusive `flock` on the pool's file makes this certain: the kernel drops it only after the
    /// last thread of a dead process has left its last system call.
    pub fn recover(&self) {
        for claims in self.pool.claims() {
            if claims.load(SeqCst) != 0 {
                claims.store(0, SeqCst);
            }
        }
    }

    /// Clears all marks. For a guest that was reset and does not run yet: a kernel that is gone has
    /// made its marks.
    pub fn forget(&self) {
        for bits in self.pool.free().iter().chain(self.pool.summary()) {
            if bits.load(SeqCst) != 0 {
                bits.store(0, SeqCst);
            }
        }
    }

    /// Whether the page is marked. The guest may cancel the mark a moment later.
    #[inline]
    pub fn is_free(&self, frame: u64) -> bool {
        let word = self.pool.free().get((frame / 64) as usize);
        word.is_some_and(|word| word.load(SeqCst) >> (frame % 64) & 1 == 1)
    }

    /// The number of marked pages of managed RAM. Reads all of F; for tests and reports.
    pub fn marked(&self) -> u64 {
        let free = self.pool.free().iter().enumerate();
        free.map(|(word, bits)| u64::from((bits.load(SeqCst) & self.ram.mask(word)).count_ones())).sum()
    }

    /// Claims the wanted pages of a word that are marked and managed. `None`: there are none.
    pub fn claim(&self, word: usize, wanted: u64) -> Option<Claim<'_>> {
        self.claim_counted(word, wanted).0
    }

    /// The claim, and the number of pages that the guest took back.
    fn claim_counted(&self, word: usize, wanted: u64) -> (Option<Claim<'_>>, u64) {
        let free = &self.pool.free()[word];
        let marked = free.load(SeqCst);
        let ram = self.ram.mask(word);
        let wanted = marked & ram & wanted;
        // Bits outside of RAM belong to no page. They are cleared: a word that never becomes 0
        // would hide later marks from S.
        let strange = marked & !ram;
        if wanted | strange == 0 {
            return (None, 0);
        }
        if wanted != 0 {
            self.pool.claims()[word].fetch_or(wanted, SeqCst);
        }
        let before = free.fetch_and(!(wanted | strange), SeqCst);
        if before & !(wanted | strange) != 0 {
            // Bits were set meanwhile, or are not wanted now. No other thread will set the word's
            // bit in S.
            self.pool.raise(word);
        }
        let bits = before & wanted;
        let lost = wanted & !bits;
        if lost != 0 {
            self.pool.claims()[word].fetch_and(!lost, SeqCst);
        }
        let claim = (bits != 0).then_some(Claim { pool: &self.pool, word, bits });
        (claim, u64::from(lost.count_ones()))
    }

    /// The number of words of F that S names: 0 if there is no work in frames below `end`, rounded
    /// up to a multiple of 4,096. Reads only that part of S, 4 KiB for 8 GiB of guest, whatever the
    /// length of the pool.
    pub fn pending(&self, end: u64) -> u64 {
        let nodes = (end.min(self.pool.frames()).div_ceil(64 * 64)) as usize;
        self.pool.summary().iter().take(nodes).map(|node| u64::from(node.load(SeqCst).count_ones())).sum()
    }

    /// Recycles the marked pages in `within`, rounded outwards to multiples of 64 frames, in
    /// batches of at most [`BATCH_WORDS`] words. Ends after the batch that reaches `most` pages.
    ///
    /// Each batch is claimed, passed to `zero` as ascending runs of pages, and released. `zero`
    /// must make each page read as zeros or leave it as it is, **and must have finished when it
    /// returns**. `within` becomes the rest that was not searched: empty, unless `most` or an error
    /// ended the sweep.
    ///
    /// # Errors
    /// The first error of `zero`. The pages of that batch are released and no longer marked: only
    /// their saving is lost.
    pub fn recycle<E>(
        &mut self,
        within: &mut Range<u64>,
        most: u64,
        zero: impl FnMut(&[Range<u64>]) -> Result<(), E>,
    ) -> Result<Recycled, E> {
        // Claims borrow the host, so the host's buffer of runs is taken out while they exist.
        let mut runs = std::mem::take(&mut self.runs);
        let result = self.recycle_with(&mut runs, within, most, zero);
        self.runs = runs;
        result
    }

    fn recycle_with<E>(
        &self,
        runs: &mut Vec<Range<u64>>,
        within: &mut Range<u64>,
        most: u64,
        mut zero: impl FnMut(&[Range<u64>]) -> Result<(), E>,
    ) -> Result<Recycled, E> {
        let mut sum = Recycled::default();
        let end = within.end.min(self.pool.frames()).div_ceil(64);
        let mut next = within.start / 64;
        while next < end && sum.pages < most {
            let begin = Instant::now();
            let mut batch: [Option<Claim<'_>>; BATCH_WORDS] = [const { None }; BATCH_WORDS];
            next = self.fill(next..end, most - sum.pages, &mut batch, &mut sum.lost);
            within.start = (next * 64).min(within.end);
            runs.clear();
            for claim in batch.iter().flatten() {
                sum.pages += u64::from(claim.bits.count_ones());
                push_runs(runs, claim.first(), claim.bits);
            }
            sum.runs += runs.len() as u64;
            if !runs.is_empty() {
                zero(runs)?;
            }
            drop(batch);
            sum.longest = sum.longest.max(begin.elapsed());
        }
        if next >= end {
            within.start = within.end;
        }
        Ok(sum)
    }

    /// Claims the next words with marked pages, until the batch is full or has `most` pages.
    /// Returns the word to go on from.
    fn fill<'c>(&'c self, words: Range<u64>, most: u64, batch: &mut [Option<Claim<'c>>], lost: &mut u64) -> u64 {
        let (mut next, mut filled, mut pages) = (words.start, 0, 0);
        while next < words.end {
            // One word of S at a time: its bits for this range are taken, and those behind the end
            // of the work are put back.
            let node = next / 64;
            let stop = words.end.min((node + 1) * 64);
            let mask = (u64::MAX >> (64 - (stop - next))) << (next % 64);
            let summary = &self.pool.summary()[node as usize];
            let mut looks = match summary.load(SeqCst) & mask {
                0 => 0,
                _ => summary.fetch_and(!mask, SeqCst) & mask,
            };
            while looks != 0 {
                let word = node * 64 + u64::from(looks.trailing_zeros());
                if filled == batch.len() || pages >= most {
                    summary.fetch_or(looks, SeqCst);
                    return word;
                }
                looks &= looks - 1;
                let (claim, gone) = self.claim_counted(word as usize, u64::MAX);
                *lost += gone;
                if let Some(claim) = claim {
                    pages += u64::from(claim.bits.count_ones());
                    batch[filled] = Some(claim);
                    filled += 1;
                }
            }
            next = stop;
        }
        next
    }
}

/// Adds the runs of a word's bits, joined to the last run where they go on from it.
fn push_runs(runs: &mut Vec<Range<u64>>, first: u64, mut bits: u64) {
    while bits != 0 {
        let start = bits.trailing_zeros();
        let len = (bits >> start).trailing_ones();
        bits &= !((u64::MAX >> (64 - len)) << start);
        let run = first + u64::from(start)..first + u64::from(start + len);
        match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        }
    }
}
