//! A scan's findings enter the ledger: pages that were written, or first touched, since the last
//! scan.

use kmem::pagemap::Categories;
use wire::{PageNo, Run};

use super::{Entry, Region};
use wire::HugePages;

/// Pages that a scan found to take memory of their own again.
#[derive(Clone, Copy, Default)]
pub(crate) struct Unmerged {
    /// They were merged, and are copies now.
    pub(crate) copied: u64,
    /// They were given back as zero pages, or recycled, and hold something now.
    pub(crate) filled: u64,
}

impl std::ops::AddAssign for Unmerged {
    fn add_assign(&mut self, more: Self) {
        self.copied += more.copied;
        self.filled += more.filled;
    }
}

#[derive(Clone, Copy)]
pub(crate) struct HugePolicy {
    pub(crate) pages: HugePages,
    /// Huge pages are split when more than this part can be merged, of 0 to 1; 0: always.
    pub(crate) share: f64,
}

impl Region {
    /// Whether any of these pages maps a frame, as far as is known here.
    pub(crate) fn maps_frames(&self, run: Run) -> bool {
        run.pages().any(|page| matches!(self.entry(page), Entry::Merged(_)))
    }

    /// A scan found these pages written, with these categories (`PRESENT`, `PFNZERO`, `HUGE`, and
    /// `FILE` where the ledger holds one of them for merged). Calls `left` with what was known of
    /// pages of which that is over.
    pub(crate) fn found_written(
        &mut self,
        run: Run,
        is: Categories,
        policy: HugePolicy,
        mut left: impl FnMut(PageNo, Entry),
    ) -> Unmerged {
        let mut unmerged = Unmerged::default();
        let zero = is.contains(Categories::PFNZERO);
        let huge = is.contains(Categories::HUGE);
        let kept_huge = huge && policy.pages == HugePages::Keep;
        if is.contains(Categories::PRESENT) && !zero {
            self.ages.held.insert_range(run.page.into(), run.len.into());
        }
        if huge && policy.share > 0.0 {
            self.found_huge(run, policy.share);
        } else {
            self.lost_huge(run);
        }
        for page in run.pages() {
            match self.entry(page) {
                Entry::Pending => continue,
                // The frame came into the page table by a read, or the zero page did. A frame that
                // the kernel has swapped out since may show as neither present nor of a file.
                Entry::Merged(_) if is.contains(Categories::FILE) || !is.contains(Categories::PRESENT) => continue,
                Entry::Zero | Entry::Fresh | Entry::Recycled if zero => continue,
                entry @ (Entry::Merged(_) | Entry::Unshared(_) | Entry::Zero | Entry::Recycled) => {
                    match entry {
                        Entry::Merged(_) => {
                            unmerged.copied += 1;
                            self.ages.copied(page);
                        }
                        Entry::Zero | Entry::Recycled => unmerged.filled += 1,
                        _ => {}
                    }
                    self.set(page, Entry::Fresh);
                    left(page, entry);
                }
                Entry::Fresh => {}
            }
            if let Some(stamps) = &mut self.stamps {
                stamps.record(page);
            }
            if is.contains(Categories::PRESENT) && !kept_huge {
                self.ages.found_written(Run::one(page));
            }
        }
        unmerged
    }
}
