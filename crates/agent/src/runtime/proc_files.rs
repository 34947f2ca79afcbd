//! What the kernel says of this process, through files of `/proc` that stay open.
//!
//! A program may change its root directory, unmount `/proc`, or give up its privileges after it
//! became a client. What was opened before goes on telling of the same address space. In a forked
//! child, and where the program has taken a descriptor, files are opened anew for each use.

use std::io;
use std::ops::Deref;

use kmem::pagemap::Pagemap;
use kmem::procfs::{Status, StatusFile};

use crate::runtime::descriptors::Descriptor;

pub(crate) struct ProcFiles {
    pagemap: Option<Descriptor<Pagemap>>,
    /// Of the agent's thread: the kernel says nothing of memory through a thread that has ended,
    /// and the program's first thread may end before the others.
    status: Option<Descriptor<StatusFile>>,
}

pub(crate) enum ProcPagemap<'f> {
    FromStart(&'f Pagemap),
    Reopened(Pagemap),
}

impl Deref for ProcPagemap<'_> {
    type Target = Pagemap;
    fn deref(&self) -> &Pagemap {
        match self {
            Self::FromStart(pagemap) => pagemap,
            Self::Reopened(pagemap) => pagemap,
        }
    }
}

impl ProcFiles {
    pub(crate) const fn new() -> Self {
        Self { pagemap: None, status: None }
    }

    pub(crate) fn open_pagemap(&mut self) -> io::Result<()> {
        self.pagemap = Some(Descriptor::new(Pagemap::open_self()?)?);
        Ok(())
    }

    /// Opens the status of the calling thread, which has to live as long as the descriptor is used.
    pub(crate) fn open_status(&mut self) -> io::Result<()> {
        self.status = Some(Descriptor::new(StatusFile::of_thread()?)?);
        Ok(())
    }

    /// The page map that stays open, unless the program has taken its descriptor.
    pub(crate) fn pagemap_from_start(&self) -> Option<&Pagemap> {
        self.pagemap.as_ref().filter(|pagemap| pagemap.is_intact()).map(|pagemap| &**pagemap)
    }

    /// The page map. `None`: the kernel does not show it.
    pub(crate) fn pagemap(&self) -> Option<ProcPagemap<'_>> {
        match self.pagemap_from_start() {
            Some(pagemap) => Some(ProcPagemap::FromStart(pagemap)),
            None => Pagemap::open_self().ok().map(ProcPagemap::Reopened),
        }
    }

    /// Pinned and locked memory of this process, among others.
    pub(crate) fn status(&self) -> io::Result<Status> {
        match self.status.as_ref().filter(|status| status.is_intact()) {
            Some(status) => status.read(),
            None => StatusFile::of_thread()?.read(),
        }
    }

    pub(crate) fn close(&mut self) {
        *self = Self::new();
    }

    /// Leaves the parent's descriptors open in a child, and uses them no more.
    pub(super) fn forsake(&mut self) {
        std::mem::forget(std::mem::replace(self, Self::new()));
    }
}
