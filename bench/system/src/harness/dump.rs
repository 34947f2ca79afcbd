//! Dumps of guests' memory: pages of a guest that ran, to be held by a client.
//!
//! A dump is a file of page numbers, ascending, 4 bytes each, and one with these pages' bytes.
//! Pages that the guest never touched are in neither.

#![allow(unsafe_code)] // mmap(2) of the dump, so that clients share it in the page cache.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;

use crate::harness::content::WORDS;

/// Where dumps are kept.
///
/// # Errors
///
/// When the account has no cache directory.
pub(crate) fn directory() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("PAGEONE_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("pageone")))
        .or_else(|| Some(set("HOME")?.join(".cache/pageone")));
    Ok(cache.context("no place for guests' dumps; set PAGEONE_CACHE")?.join("bench"))
}

/// The two files of guest number `guest`: numbers and bytes.
pub(crate) fn files(directory: &Path, guest: usize) -> [PathBuf; 2] {
    ["index", "pages"].map(|kind| directory.join(format!("guest-{guest}.{kind}")))
}

/// Pages of the largest of the first `guests` guests.
///
/// # Errors
///
/// When a dump is not there.
pub(crate) fn pages(guests: usize) -> Result<usize> {
    let pages = (0..guests).map(|guest| Ok(Dump::open(guest)?.pages())).collect::<Result<Vec<_>>>()?;
    Ok(pages.into_iter().max().unwrap_or(0))
}

/// An open dump.
pub(crate) struct Dump {
    /// For each page of the guest where its bytes are, counted in pages from 1; 0: untouched.
    places: Vec<u32>,
    identities: std::cell::OnceCell<Vec<u64>>,
    words: *const u64,
    len: usize,
}

impl Dump {
    /// Opens the dump of guest number `guest`.
    ///
    /// # Errors
    ///
    /// When it is not there, or is cut off.
    pub(crate) fn open(guest: usize) -> Result<Self> {
        let [index, pages] = files(&directory()?, guest);
        let index = std::fs::read(&index).with_context(|| format!("cannot read {}", index.display()))?;
        let mut places = Vec::new();
        for (place, number) in index.chunks_exact(4).enumerate() {
            let number = u32::from_le_bytes([number[0], number[1], number[2], number[3]]) as usize;
            places.resize(places.len().max(number + 1), 0);
            places[number] = place as u32 + 1;
        }
        let len = index.len() / 4 * PAGE_SIZE;
        let file = File::open(&pages).with_context(|| format!("cannot read {}", pages.display()))?;
        ensure!(len > 0 && file.metadata()?.len() == len as u64, "{} is cut off; remove it", pages.display());
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a fresh mapping replaces nothing.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) };
        let start = start.with_context(|| format!("cannot map {}", pages.display()))?;
        Ok(Self { places, identities: Default::default(), words: start.cast(), len })
    }

    /// Pages from the first to the last that was touched.
    pub(crate) fn pages(&self) -> usize {
        self.places.len()
    }

    /// A page's words; `None`: untouched.
    pub(crate) fn words(&self, page: usize) -> Option<&[u64]> {
        let place = (*self.places.get(page)? as usize).checked_sub(1)?;
        // SAFETY: `place` is one of the index's, and the file has so many pages; it is mapped for as long
        // as this value lives, and nothing writes to a dump that is complete.
        Some(unsafe { std::slice::from_raw_parts(self.words.add(place * WORDS), WORDS) })
    }

    /// A page's identity: its content's hash, 0 for a zero page.
    pub(crate) fn identity(&self, page: usize) -> Option<u64> {
        let identity = |words: Option<&[u64]>| match words {
            Some(words) if words.iter().any(|&word| word != 0) => hash(words).max(1),
            _ => 0,
        };
        let all = || (0..self.pages()).map(|page| identity(self.words(page))).collect();
        self.words(page)?;
        self.identities.get_or_init(all).get(page).copied()
    }
}

impl Drop for Dump {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping; slices of it do not outlive it.
        let _ = unsafe { rustix::mm::munmap(self.words.cast_mut().cast(), self.len) };
    }
}

fn hash(words: &[u64]) -> u64 {
    words.iter().fold(words.len() as u64, |hash, &word| {
        let mixed = (u128::from(hash ^ word) + 1) * 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        (mixed >> 64) as u64 ^ mixed as u64
    })
}
