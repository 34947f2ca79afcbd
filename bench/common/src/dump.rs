//! Dumps of guests' memory, from which a bench fills memory with a guest's pages.
//!
//! A dump is two files: the numbers of the pages that the guest has touched, ascending, 4 bytes
//! each (little-endian), and the bytes of these pages. Untouched pages are in neither.
#![allow(unsafe_code, reason = "mmap(2) of a dump, so that processes share it in the page cache")]

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kmem::{PAGE_SIZE, procfs};
use rustix::process::{Pid, Signal, kill_process};

use testguest::find;

/// 8-byte words of a page.
pub const WORDS: usize = PAGE_SIZE / 8;

/// The directory of dumps: `bench` below [`find::cache_dir`].
pub fn directory() -> Result<PathBuf> {
    Ok(find::cache_dir()?.join("bench"))
}

/// The dump with number `number`: the file of page numbers and the file of bytes.
pub fn files(directory: &Path, number: usize) -> [PathBuf; 2] {
    ["index", "pages"].map(|kind| directory.join(format!("guest-{number}.{kind}")))
}

/// Pages of the largest of the first `count` dumps.
pub fn pages(count: usize) -> Result<usize> {
    let pages = (0..count).map(|number| Ok(Dump::open(number)?.pages())).collect::<Result<Vec<_>>>()?;
    Ok(pages.into_iter().max().unwrap_or(0))
}

/// Writes the memory of the guest in process `pid` as dump number `number`. The guest has
/// `memory_mib` MiB; it is stopped, and stays stopped.
pub fn write(pid: i32, memory_mib: usize, number: usize) -> Result<()> {
    write_to(&directory()?, pid, memory_mib, number)
}

fn write_to(directory: &Path, pid: i32, memory_mib: usize, number: usize) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let stop = Pid::from_raw(pid).map_or(Err(rustix::io::Errno::SRCH), |pid| kill_process(pid, Signal::STOP));
    stop.with_context(|| format!("cannot stop guest {pid}"))?;
    let copy = || format!("cannot copy the memory of guest {pid}");
    let bytes = memory_mib << 20;
    let mut start = None;
    procfs::for_each_map(Some(pid), |map| {
        if map.range.len == bytes {
            start = Some(map.range.start);
        }
    })
    .with_context(copy)?;
    let start = start.context(
        "QEMU has no mapping of the size of the guest's memory; give the size of QEMU's -m, and memory in one piece",
    )?;
    copy_pages(pid, start, bytes / PAGE_SIZE, &files(directory, number)).with_context(copy)
}

/// Copies the present pages of the `pages` pages at `start`.
fn copy_pages(pid: i32, start: usize, pages: usize, [index, contents]: &[PathBuf; 2]) -> io::Result<()> {
    let open = |file| File::open(format!("/proc/{pid}/{file}"));
    let (memory, mut pagemap) = (open("mem")?, open("pagemap")?);
    pagemap.seek(SeekFrom::Start((start / PAGE_SIZE * 8) as u64))?;
    let mut pagemap = BufReader::new(pagemap);
    let mut out = BufWriter::new(File::create(contents)?);
    let (mut numbers, mut entry, mut bytes) = (Vec::new(), [0; 8], vec![0; PAGE_SIZE]);
    for page in 0..pages {
        pagemap.read_exact(&mut entry)?;
        // Bit 63: present (Documentation/admin-guide/mm/pagemap.rst).
        if u64::from_le_bytes(entry) >> 63 == 1 {
            memory.read_exact_at(&mut bytes, (start + page * PAGE_SIZE) as u64)?;
            out.write_all(&bytes)?;
            numbers.extend((page as u32).to_le_bytes());
        }
    }
    out.flush()?;
    // The index is written last and renamed into place: if it exists, the dump is complete.
    let unfinished = index.with_extension("new");
    fs::write(&unfinished, numbers)?;
    fs::rename(unfinished, index)
}

/// An open dump.
pub struct Dump {
    /// For each page of the guest, the position of its bytes in pages, plus 1; 0: untouched.
    places: Vec<u32>,
    identities: std::cell::OnceCell<Vec<u64>>,
    words: *const u64,
    /// Bytes mapped at `words`.
    len: usize,
}

impl Dump {
    /// Opens dump number `number`.
    pub fn open(number: usize) -> Result<Self> {
        Self::open_in(&directory()?, number)
    }

    fn open_in(directory: &Path, number: usize) -> Result<Self> {
        let [index, pages] = files(directory, number);
        let read = |path: &Path| format!("cannot read {}", path.display());
        let index = fs::read(&index).with_context(|| read(&index))?;
        let mut places = Vec::new();
        for (place, number) in index.as_chunks::<4>().0.iter().enumerate() {
            let number = u32::from_le_bytes(*number) as usize;
            places.resize(places.len().max(number + 1), 0);
            places[number] = place as u32 + 1;
        }
        let len = index.len() / 4 * PAGE_SIZE;
        let file = File::open(&pages).with_context(|| read(&pages))?;
        let is_whole = len > 0 && file.metadata().with_context(|| read(&pages))?.len() == len as u64;
        ensure!(is_whole, "{} is cut off; remove it", pages.display());
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: the address is null, so the kernel chooses a free range and replaces no mapping.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) };
        let start = start.with_context(|| format!("cannot map {}", pages.display()))?;
        Ok(Self { places, identities: Default::default(), words: start.cast(), len })
    }

    /// Number of pages from the first to the last touched page.
    pub fn pages(&self) -> usize {
        self.places.len()
    }

    /// The [`WORDS`] words of a page; `None`: untouched.
    pub fn words(&self, page: usize) -> Option<&[u64]> {
        let place = (*self.places.get(page)? as usize).checked_sub(1)?;
        // SAFETY: `words` points to `len` mapped bytes for the life of `self`; mmap(2) aligns them
        // to a page. `open` made one place for each of the index's `len / PAGE_SIZE` entries and
        // checked that the file has `len` bytes, so page `place` is inside. A complete dump is
        // never written again.
        Some(unsafe { std::slice::from_raw_parts(self.words.add(place * WORDS), WORDS) })
    }

    /// A hash of a page's contents, 0 for a page of zeros; `None`: untouched.
    pub fn identity(&self, page: usize) -> Option<u64> {
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
        // SAFETY: `open` mapped exactly these `len` bytes for this value, nothing else unmaps them,
        // and slices into them borrow `self`, which ends here.
        let _ = unsafe { rustix::mm::munmap(self.words.cast_mut().cast(), self.len) };
    }
}

fn hash(words: &[u64]) -> u64 {
    words.iter().fold(words.len() as u64, |hash, &word| {
        let mixed = (u128::from(hash ^ word) + 1) * 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        (mixed >> 64) as u64 ^ mixed as u64
    })
}

#[cfg(test)]
mod tests;
