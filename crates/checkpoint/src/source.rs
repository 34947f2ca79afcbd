//! The memory of a process, read from outside while it runs.
//!
//! A client's RAM is the memory that its agent has registered for asynchronous write-protection.
//! `PAGEMAP_SCAN` distinguishes it from other memory, and reports the pages written since the last
//! scan. A scan clears the report, so only one process may scan at a time: the page map is locked
//! (`flock(2)`) as long as a [`Source`] exists.
//!
//! While an agent merges pages, they are neither tracked nor all mapped. So the regions are read
//! when the agent is at rest, and tracking is checked again while the process is stopped.

mod direct_io;
mod scan;
mod stop;

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::pidfd::PidFd;
use kmem::procmem::{self, ReadError};
use kmem::{PAGE_SIZE, Range, procfs};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Least size of a mapping that counts as memory of a process that is no client, bytes: smaller
/// ones are heaps and stacks.
const LEAST: usize = 16 << 20;
/// How long to wait for another checkpoint of the process: a killed one holds the lock for a moment
/// longer.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// Without a daemon, the agent is at rest if this many scans in a row find the same regions; a
/// merge window takes a millisecond. With a daemon that has frozen the process, the agent may still
/// take back a page that the guest has freed, so two scans must agree.
pub(crate) const SCANS: u32 = 4;
/// Time between two such scans.
const SCAN_EVERY: Duration = Duration::from_millis(20);
/// How long to wait for the agent to be at rest.
pub(crate) const REST_LIMIT: Duration = Duration::from_secs(10);
/// How often reading a page is tried again that is mapped.
const TRIES: u32 = 3;
/// How often to check whether the regions are as before.
const SCANS_AFTER: usize = 10;

/// Why a process's memory cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum SourceError {
    #[error("no process {pid}")]
    NoProcess { pid: i32, source: io::Error },
    #[error("cannot look at the memory of process {pid}")]
    Pagemap { pid: i32, source: io::Error },
    #[error("another checkpoint of process {0} is being taken; wait for its end")]
    Busy(i32),
    #[error("cannot lock the page map")]
    Lock(#[source] io::Error),
    #[error("the memory of process {0} does not come to rest; try again")]
    Restless(i32),
    #[error("cannot list the mappings of process {pid}")]
    Mappings { pid: i32, source: io::Error },
    #[error(
        "process {0} has no memory to store: no client, and no mapping of 16 MiB or more; for a guest name \
             QEMU itself, and not a script that starts it"
    )]
    Nothing(i32),
    #[error("cannot scan the page map of process {pid}")]
    Scan { pid: i32, source: io::Error },
    #[error(
        "process {pid} has mapped {address:#x}, and the page there cannot be read: memory of the host has failed, or the page \
         is lost in the pool that the process was started from"
    )]
    Unreadable { pid: i32, address: usize },
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("cannot stop the process")]
    Stop(#[source] io::Error),
    #[error(
        "process {0} does not stop; one of its threads waits in the kernel (state D), for a disk say: try \
             again later"
    )]
    StillRuns(i32),
    #[error("process {0} has ended")]
    Ended(i32),
}

/// Pages that map a part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FilePart {
    /// Number of the first page.
    pub(crate) first: u64,
    /// Number of pages.
    pub(crate) pages: u64,
    inode: u64,
    offset: u64,
}

/// A mapping of a file.
struct FileMap {
    range: Range,
    inode: u64,
    offset: u64,
}

impl FileMap {
    fn of(line: &procfs::MapLine) -> Option<Self> {
        (line.inode != 0).then_some(Self { range: line.range, inode: line.inode, offset: line.offset })
    }
}

/// A process's memory. Its pages are numbered from 0, in the order of the regions.
pub struct Source {
    pid: i32,
    regions: Vec<Range>,
    /// Number of the first page of each region.
    firsts: Vec<u64>,
    /// The parts of the regions that map files: merged pages.
    files: HashSet<FilePart>,
    pagemap: Pagemap,
    process: PidFd,
    /// Whether the kernel notes writes.
    tracked: bool,
    /// What else there is does not count.
    within: Range,
}

impl Source {
    /// Opens a process exclusively and finds its memory: the RAM of a client, the large writable
    /// mappings of another process.
    ///
    /// # Errors
    /// If the process cannot be opened, another checkpoint of it is being taken, or it has no
    /// memory to store.
    pub fn open(pid: i32) -> Result<Self, SourceError> {
        Self::open_within(pid, Range::new(0, usize::MAX & !(PAGE_SIZE - 1)))
    }

    /// Opens a process, as [`Source::open`] does, of which only this part of its memory counts.
    ///
    /// # Errors
    /// Those of [`Source::open`].
    pub fn open_within(pid: i32, within: Range) -> Result<Self, SourceError> {
        let process = PidFd::open(pid).map_err(|source| SourceError::NoProcess { pid, source })?;
        let pagemap = Pagemap::open(pid).map_err(|source| SourceError::Pagemap { pid, source })?;
        let start = Instant::now();
        loop {
            match rustix::fs::flock(pagemap.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if start.elapsed() < LOCK_LIMIT => std::thread::sleep(SCAN_EVERY),
                Err(Errno::WOULDBLOCK) => return Err(SourceError::Busy(pid)),
                Err(e) => return Err(SourceError::Lock(e.into())),
            }
        }
        let mut source = Self {
            pid,
            regions: Vec::new(),
            firsts: Vec::new(),
            files: HashSet::new(),
            pagemap,
            process,
            tracked: false,
            within,
        };
        source.find()?;
        Ok(source)
    }

    /// The process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the kernel notes writes: the process is a client.
    pub fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Finds the memory again, when the agent is at rest: when this number of scans after the first
    /// one find the same, for at most `limit`.
    pub(crate) fn find_at_rest(&mut self, scans: u32, limit: Duration) -> Result<(), SourceError> {
        let (start, mut same) = (Instant::now(), 0);
        loop {
            let before = std::mem::take(&mut self.regions);
            self.find()?;
            same = if self.regions == before { same + 1 } else { 0 };
            if same >= scans {
                return Ok(());
            }
            if start.elapsed() >= limit {
                return Err(SourceError::Restless(self.pid));
            }
            std::thread::sleep(SCAN_EVERY);
        }
    }

    /// Whether the regions are as before. Finds merged pages too, see [`Source::merged`].
    pub(crate) fn is_as_found(&mut self) -> Result<bool, SourceError> {
        let before = self.regions.clone();
        for scan in 0..SCANS_AFTER {
            if scan > 0 {
                std::thread::sleep(SCAN_EVERY);
            }
            self.find()?;
            if self.regions == before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The parts that mapped files, merged pages, when the memory was last found.
    pub(crate) fn merged(&self) -> &HashSet<FilePart> {
        &self.files
    }

    /// Reads the mappings: the regions, and the parts of them that map files.
    fn find(&mut self) -> Result<(), SourceError> {
        let (pid, pagemap, within) = (self.pid, &self.pagemap, self.within);
        let tracked = |range: Range| {
            let query = Query { required: Categories::WPALLOWED, ..Query::default() };
            let mut found = false;
            let first = Range::new(range.start, PAGE_SIZE);
            pagemap.scan(first, &query, &mut |_| found = true).map(|_| found).unwrap_or(false)
        };
        let mut files: Vec<FileMap> = Vec::new();
        let (mut client, mut others): (Vec<Range>, Vec<Range>) = Default::default();
        let join = |list: &mut Vec<Range>, range: Range| match list.last_mut() {
            Some(last) if last.end() == range.start => last.len += range.len,
            _ => list.push(range),
        };
        procfs::for_each_map(Some(pid), |line| {
            files.extend(FileMap::of(line));
            let Some(range) = line.range.intersect(&within) else { return };
            let usual = line.perms.read && line.perms.write && !line.path.starts_with("/dev/");
            if usual && !line.perms.shared && tracked(range) {
                join(&mut client, range);
            } else if usual && range.len >= LEAST {
                join(&mut others, range);
            }
        })
        .map_err(|source| SourceError::Mappings { pid, source })?;
        self.tracked = !client.is_empty();
        self.regions = if self.tracked { client } else { others };
        if self.regions.is_empty() {
            return Err(SourceError::Nothing(pid));
        }
        self.firsts.clear();
        self.regions.iter().fold(0, |first, region| {
            self.firsts.push(first);
            first + region.pages() as u64
        });
        self.files = files.iter().flat_map(|file| self.parts_of(file)).collect();
        Ok(())
    }

    /// Address and length in bytes of each region.
    pub fn addresses(&self) -> Vec<(u64, u64)> {
        self.regions.iter().map(|region| (region.start as u64, region.len as u64)).collect()
    }

    /// Adds the pages of parts of the process's memory, given by address and length in bytes, as
    /// far as they lie in the regions.
    pub(crate) fn insert(&self, parts: &[(u64, u64)], into: &DirtyTree) {
        for &(start, len) in parts {
            let part = Range::new(start as usize, len as usize);
            for (region, first) in self.regions.iter().zip(&self.firsts) {
                if let Some(part) = region.intersect(&part) {
                    into.insert_range(first + ((part.start - region.start) / PAGE_SIZE) as u64, part.pages() as u64);
                }
            }
        }
    }

    /// The parts of the process's memory, address and length in bytes, that these pages are.
    pub(crate) fn parts(&self, pages: &DirtyTree) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> = Vec::new();
        for page in pages.iter() {
            let address = self.address(page) as u64;
            match all.last_mut() {
                Some((start, len)) if *start + *len == address => *len += PAGE_SIZE as u64,
                _ => all.push((address, PAGE_SIZE as u64)),
            }
        }
        all
    }

    /// Number of pages in all regions.
    pub(crate) fn pages(&self) -> u64 {
        self.regions.iter().map(|region| region.pages() as u64).sum()
    }

    fn address(&self, page: u64) -> usize {
        let region = self.firsts.partition_point(|&first| first <= page) - 1;
        self.regions[region].start + (page - self.firsts[region]) as usize * PAGE_SIZE
    }

    /// The parts that map files now: merged pages.
    pub(crate) fn files(&self) -> Result<HashSet<FilePart>, SourceError> {
        let mut all = HashSet::new();
        procfs::for_each_map(Some(self.pid), |line| {
            all.extend(FileMap::of(line).iter().flat_map(|file| self.parts_of(file)));
        })
        .map_err(|source| SourceError::Mappings { pid: self.pid, source })?;
        Ok(all)
    }

    /// The parts of the regions that a mapping of a file covers.
    fn parts_of(&self, file: &FileMap) -> impl Iterator<Item = FilePart> {
        let FileMap { range, inode, offset } = *file;
        self.regions.iter().zip(&self.firsts).filter_map(move |(region, first)| {
            let part = region.intersect(&range)?;
            let at = part.start - region.start;
            let offset = offset + (part.start - range.start) as u64;
            let (first, pages) = (first + (at / PAGE_SIZE) as u64, part.pages() as u64);
            Some(FilePart { first, pages, inode, offset })
        })
    }

    /// Reads pages. A page that is not mapped (any more) reads as zeros.
    ///
    /// # Errors
    ///
    /// [`SourceError::Unreadable`]: a page that is mapped cannot be read. With zeros in its place
    /// a guest that goes on from the checkpoint would see other bytes.
    pub(crate) fn read(&self, pages: &[u64], out: &mut [u8]) -> Result<(), SourceError> {
        let addresses: Vec<usize> = pages.iter().map(|&page| self.address(page)).collect();
        let mut done = 0;
        let mut tries = 0;
        while done < addresses.len() {
            let read = procmem::read_pages(self.pid, &addresses[done..], &mut out[done * PAGE_SIZE..])?;
            if read > 0 {
                (done, tries) = (done + read, 0);
                continue;
            }
            let address = addresses[done];
            if !self.maps(address)? {
                out[done * PAGE_SIZE..(done + 1) * PAGE_SIZE].fill(0);
                done += 1;
            } else if tries == TRIES {
                return Err(SourceError::Unreadable { pid: self.pid, address });
            }
            // It may have been mapped between the two looks.
            tries += 1;
        }
        Ok(())
    }

    /// Whether the process has mapped an address for reading.
    fn maps(&self, address: usize) -> Result<bool, SourceError> {
        let (page, mut is_mapped) = (Range::new(address, PAGE_SIZE), false);
        procfs::for_each_map(Some(self.pid), |line| {
            is_mapped |= line.perms.read && line.range.intersect(&page).is_some()
        })
        .map_err(|source| SourceError::Mappings { pid: self.pid, source })?;
        Ok(is_mapped)
    }
}

#[cfg(test)]
mod tests;
