//! How far a client's detach has come, as its agent says.

use wire::Detaching;

/// What is known of a client's detach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Detach {
    waits: Option<Detaching>,
    errno: Option<i32>,
    retained: u64,
}

impl Detach {
    /// A detach begins.
    pub(crate) fn begin(&mut self) {
        (self.waits, self.errno) = (None, None);
    }

    /// It waits for copies to cool down.
    pub(super) fn waits(&mut self, waits: Detaching) {
        self.waits = Some(waits);
    }

    /// It has failed, and the memory stays managed.
    pub(super) fn failed(&mut self, errno: i32) {
        self.errno = Some(errno);
    }

    /// Pages left management that may map frames.
    pub(super) fn retained(&mut self, pages: u32) {
        self.retained += u64::from(pages);
    }

    /// What it waits for at present.
    pub(crate) fn waiting(&self) -> Option<Detaching> {
        self.waits
    }

    /// The kernel's error with which it failed.
    pub(crate) fn error(&self) -> Option<i32> {
        self.errno
    }

    /// Pages that left management, in a detach or before, and may map frames.
    pub(crate) fn pages_retained(&self) -> u64 {
        self.retained
    }
}
