//! A look at pages before they are taken away.
//!
//! Pages that can be moved are compared whole where they were moved to. One that differs is put
//! back, which costs as much as ten looks, and counts as written afterwards. A look at every page
//! would cost a tenth of all merging (two cache lines from memory). But most pages equal their
//! targets, and those that differ lie together, since the daemon predicted them by what is in front
//! of them. So every eighth page is looked at, and all around one that differs.
//!
//! The lines of many pages are read in one system call, which fails where a dereference would end
//! the program. A page that cannot be read and was not looked at is refused by `UFFDIO_MOVE`.

#![allow(unsafe_code)] // Reads frames.

use kmem::PAGE_SIZE;
use kmem::procmem::{OWN_PARTS, prefetch, read_own_parts};
use wire::MergeRun;

use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::window::ZEROS;
use crate::window::compare::{Finding, Found, Verdicts};

/// The part of a page that is looked at, in bytes: a cache line behind what headers and zeros in
/// front take.
const LINE: std::ops::Range<usize> = 2688..2752;
const LINE_LEN: usize = LINE.end - LINE.start;
/// One page in this number is looked at.
const STEP: usize = 8;

/// What is known of the pages of some runs.
pub(super) struct Looked {
    /// One for each page, in order.
    findings: Vec<Finding>,
    /// How many of them were told.
    told: usize,
}

impl Looked {
    /// Looks at pages of all these runs.
    ///
    /// # Safety
    ///
    /// No process writes the frames of the runs, and their memory has not failed. The runs do not
    /// leave their segments.
    pub(super) unsafe fn at(region: &Region, segments: &Segments, runs: impl Iterator<Item = MergeRun>) -> Self {
        let mut pages = Vec::new();
        for MergeRun { run, target } in runs {
            let first = segments.frames(target).unwrap_or_default();
            pages.extend((0..run.len as usize).map(|i| Pair {
                page: region.bytes(run).start + i * PAGE_SIZE + LINE.start,
                frame: first.map_or(ZEROS.as_ptr(), |first| first.wrapping_add(i * PAGE_SIZE)).wrapping_add(LINE.start),
            }));
        }
        let mut findings = vec![Finding::Equal; pages.len()];
        let is_first = |&i: &usize| i.is_multiple_of(STEP) || i + 1 == pages.len();
        let first: Vec<usize> = (0..pages.len()).filter(is_first).collect();
        // SAFETY: the lines of the frames lie in their segments, which are mapped in full length.
        // By the contract nobody writes them, and they can be read.
        unsafe { check(&pages, &first, &mut findings) };
        let around = |&i: &usize| {
            let near = &findings[i.saturating_sub(STEP - 1)..(i + STEP).min(pages.len())];
            near.iter().any(|&finding| finding != Finding::Equal)
        };
        let second: Vec<usize> = (0..pages.len()).filter(|i| !is_first(i)).filter(around).collect();
        // SAFETY: the lines of the frames lie in their segments, which are mapped in full length.
        // By the contract nobody writes them, and they can be read.
        unsafe { check(&pages, &second, &mut findings) };
        Self { findings, told: 0 }
    }

    /// Adds the verdicts on the next of the runs.
    pub(super) fn tell(&mut self, merge: MergeRun, verdicts: &mut Verdicts) {
        let mut found = Found::new(merge);
        let findings = &self.findings[self.told..self.told + merge.run.len as usize];
        (0..).zip(findings).for_each(|(page, &finding)| found.add(page, finding, verdicts));
        found.end(merge.run.len, verdicts);
        self.told += findings.len();
    }
}

/// A page and its target.
struct Pair {
    /// The address of the page's line.
    page: usize,
    /// The target's line.
    frame: *const u8,
}

/// Looks at those of the pages that have these numbers, and notes what they are.
///
/// # Safety
///
/// The frames' lines can be read, and nobody writes to them.
unsafe fn check(pages: &[Pair], numbers: &[usize], findings: &mut [Finding]) {
    let mut lines = [0; OWN_PARTS * LINE_LEN];
    let mut left = numbers;
    while !left.is_empty() {
        let now = &left[..left.len().min(OWN_PARTS)];
        now.iter().for_each(|&i| prefetch(pages[i].frame));
        let read = read_own_parts(now.iter().map(|&i| pages[i].page), LINE_LEN, &mut lines);
        // Without the call pages are taken without a look.
        let Ok(read) = read else { return };
        for (&i, line) in now[..read].iter().zip(lines.as_chunks::<LINE_LEN>().0) {
            // SAFETY: by the contract the frame's line can be read, and nobody writes to it. An
            // array of bytes has no alignment.
            if *line != unsafe { *pages[i].frame.cast::<[u8; LINE_LEN]>() } {
                findings[i] = Finding::Differs;
            }
        }
        let mut done = read;
        if let Some(&i) = now.get(read) {
            findings[i] = Finding::Unreadable;
            done += 1;
        }
        left = &left[done..];
    }
}
