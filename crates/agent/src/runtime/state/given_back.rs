//! Pages of a region that were made untouched memory, and why. A daemon that was restarted is told.
//!
//! What a page held since is not noted: the page map says whether it is still untouched.

use wire::Run;

use crate::runtime::state::bitmap::Bitmap;

/// Why pages were given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GivenFor {
    /// They were zeros.
    Zeros,
    /// Their guest had marked them as free.
    Marks,
}

pub(crate) struct GivenBack {
    zeros: Bitmap,
    marked: Bitmap,
}

impl GivenBack {
    /// `None`: there is no memory for it.
    pub(super) fn new(pages: u32) -> Option<Self> {
        Some(Self { zeros: Bitmap::new(pages)?, marked: Bitmap::new(pages)? })
    }

    pub(crate) fn note(&mut self, run: Run, why: GivenFor) {
        self.forget(run);
        match why {
            GivenFor::Zeros => self.zeros.set(run),
            GivenFor::Marks => self.marked.set(run),
        }
    }

    pub(crate) fn forget(&mut self, run: Run) {
        self.zeros.clear(run);
        self.marked.clear(run);
    }

    /// Those that are noted, ascending.
    pub(crate) fn runs(&self, within: Run, why: GivenFor) -> impl Iterator<Item = Run> {
        match why {
            GivenFor::Zeros => self.zeros.runs(within),
            GivenFor::Marks => self.marked.runs(within),
        }
    }
}
