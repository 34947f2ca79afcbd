//! The control page, which agent and daemon share.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use kmem::memfd::{self, MemfdError, SharedMap};
use rustix::fs::SealFlags;
use wire::control;

use crate::runtime::sabotage::{self, Sabotage};

#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Touching a page that the file no longer has would raise SIGBUS.
    #[error("the control page is no memfd of one page, sealed against shrinking")]
    NotSealed,
    #[error("control page: {0}")]
    Map(#[from] MemfdError),
    #[error("control page: {0}")]
    Stat(#[from] io::Error),
}

/// Whether a window is open, as the daemon reads it.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum Window {
    Closed = 0,
    Open = 1,
}

/// The count of forks, and the page in which the daemon reads it.
pub(crate) struct ControlPage {
    forks: u64,
    page: Option<SharedMap>,
}

impl ControlPage {
    pub(crate) const fn new() -> Self {
        Self { forks: 0, page: None }
    }

    /// Forks that may have copied mappings of frames.
    pub(crate) fn forks(&self) -> u64 {
        self.forks
    }

    /// Counts a fork that copied, or is about to copy, mappings of managed memory.
    pub(crate) fn count_fork(&mut self) {
        if sabotage::is_on(Sabotage::NoForkCount) {
            return;
        }
        self.forks += 1;
        if let Some(page) = &self.page {
            // Added, not stored: a forked child counts its own children in the same page.
            page.atomic_u64(control::FORKS).fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Tells the daemon whether pages may be missing.
    pub(crate) fn tell_window(&self, window: Window) {
        if let Some(page) = &self.page {
            page.atomic_u64(control::WINDOW).store(window as u64, Ordering::SeqCst);
        }
    }

    /// Whether no memory of this host has failed, as far as the daemon knows.
    pub(crate) fn memory_is_sound(&self) -> bool {
        self.page.as_ref().is_some_and(|page| page.atomic_u64(control::SOUND).load(Ordering::Acquire) == 1)
    }

    /// Accepts the page of a new connection. Returns its address.
    pub(crate) fn accept(&mut self, fd: OwnedFd) -> Result<u64, ControlError> {
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from)?;
        let cannot_shrink = memfd::seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !cannot_shrink || stat.st_size != control::LEN as i64 {
            return Err(ControlError::NotSealed);
        }
        let page = memfd::map_shared(&fd, control::LEN)?;
        page.atomic_u64(control::FORKS).store(self.forks, Ordering::SeqCst);
        let address = page.range().start as u64;
        self.page = Some(page);
        Ok(address)
    }

    /// Gives the page up. The count stays, for the next connection.
    pub(crate) fn detach(&mut self) {
        self.page = None;
    }
}
