//! A private mapping of a file gives way to private, anonymous memory while the program runs: the
//! RAM of a clone that is attached.
//!
//! The kernel lets nobody block writers in a mapping of such a file, so its pages cannot be merged.
//! The mapping is moved aside, and holds all bytes: those of the file, and those of the pages that
//! the program has written. The memory in its place is empty, and loaded from there.
//!
//! Its place is never a hole: other threads go on, and the C library would map an arena there,
//! which the new memory would cover.
//!
//! The program must stand still meanwhile: QEMU's processors are stopped, and its disks have
//! nothing to do. A thread that touches the memory all the same gets SIGSEGV and no other bytes.
//! But a device that has pinned a page would write into the mapping that is aside.

use std::fs::File;
use std::io;

use kmem::range::Range;
use kmem::{mm, raw};
use rustix::io::Errno;

use super::{Loader, end, spawn};
use crate::intercept::mark;
use crate::runtime::descriptors::Descriptor;
use crate::runtime::state::region::Sticky;
use crate::service::start::StartError;
use crate::window::anonymous::{Backing, repeat_advice};

/// Why a mapping stays.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplaceError {
    #[error("its memory cannot be read through /proc: {0}")]
    Memory(#[from] io::Error),
    #[error("its mapping cannot be replaced: {0}")]
    Map(#[from] Errno),
    #[error("its memory cannot be loaded: {0}")]
    Load(String),
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Replaces a mapping. The loader takes the memory as a region when all of it is there.
///
/// # Safety
///
/// The range is one private mapping, and until this returns nothing uses it: no other thread, and
/// no device that has pinned pages of it.
pub(in crate::intercept) unsafe fn replace(range: Range, sticky: Sticky) -> Result<(), ReplaceError> {
    let file = Descriptor::new(File::open("/proc/self/mem")?)?;
    let aside = Range::new(mm::map_anonymous(range.len)?, range.len);
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    // Before the pages move: a thread that does not stand still must not read the file's bytes.
    //
    // SAFETY: by the contract nothing uses the range. What is replaced was mapped just now.
    let moved = unsafe {
        raw::mprotect(range.start, range.len, libc::PROT_NONE).and_then(|_| mm::remap_and_keep(range, aside.start))
    };
    if let Err(error) = moved {
        // SAFETY: `aside` was mapped just now, and nobody else knows it; the range has the
        // protection that it had.
        let _ = unsafe { (mm::unmap(aside), raw::mprotect(range.start, range.len, read_write)) };
        return Err(error.into());
    }
    // SAFETY: nobody else knows `aside`. Where that fails its pages cannot be read, and are put
    // back.
    let readable = unsafe { raw::mprotect(aside.start, aside.len, read_write) }.map(drop);
    let started = readable.map_err(ReplaceError::from).and_then(|()| cover(range, sticky)).and_then(|()| {
        let loader = Loader::new(range, aside.start as u64).map_err(ReplaceError::Load)?;
        // Only now: a thread that does not stand still must not read zeros.
        //
        // SAFETY: the memory was mapped just now, and what touches it waits for the loader.
        unsafe { raw::mprotect(range.start, range.len, read_write) }?;
        mark::set_loading(Some(range));
        Ok(spawn(loader, file, aside)?)
    });
    started.inspect_err(|_| {
        mark::set_loading(None);
        // SAFETY: nothing has used what is mapped in the range now; the loader has ended. Then it
        // has the protection that it had.
        let back = unsafe {
            mm::remap_fixed(aside, range.start).and_then(|()| raw::mprotect(range.start, range.len, read_write))
        };
        if let Err(error) = back {
            end(format_args!("it cannot be put back: {error}"));
        }
    })
}

/// Maps untouched memory that nobody may access, with the program's advice.
fn cover(range: Range, sticky: Sticky) -> Result<(), ReplaceError> {
    let reserve = if sticky.no_reserve { libc::MAP_NORESERVE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | reserve;
    // SAFETY: the pages were moved, and by the contract of [`replace`] nothing uses the range.
    unsafe { raw::mmap(range.start, range.len, libc::PROT_NONE, flags, -1, 0) }?;
    if repeat_advice(range, sticky, Backing::Anonymous) {
        Ok(())
    } else {
        Err(ReplaceError::Load("children would inherit it".into()))
    }
}

#[cfg(test)]
mod tests;
