//! The memory that a checkpoint stores: a guest's, read from outside while it runs.
//!
//! A client's RAM is what its agent has registered for asynchronous write-protection: `PAGEMAP_SCAN` tells it apart, and tells
//! which of its pages were written since the last look. Only one may ask that at a time: whoever asks clears the answer.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dirty::DirtyTree;
use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::pidfd::PidFd;
use kmem::{PAGE_SIZE, Range, procfs, procmem};

/// Mappings of a process that is no client count as its memory from this size on, in bytes.
const LEAST: usize = 16 << 20;
/// How long a process may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Pages that show a part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FilePart {
    pub(super) first: u64,
    pub(super) pages: u64,
    inode: u64,
    offset: u64,
}

/// A process's memory.
pub(super) struct Source {
    pub(super) pid: i32,
    pub(super) regions: Vec<Range>,
    /// The first page number of each region.
    firsts: Vec<u64>,
    pagemap: Pagemap,
    process: PidFd,
    /// Writes to it are tracked.
    pub(super) tracked: bool,
}

impl Source {
    /// Finds the memory of a process: a client's RAM; of another process the large writable mappings.
    pub(super) fn find(pid: i32) -> Result<Self> {
        let process = PidFd::open(pid).with_context(|| format!("no process {pid}"))?;
        let pagemap = Pagemap::open(pid).with_context(|| format!("cannot look at the memory of process {pid}"))?;
        let tracked = |range: Range| {
            let query = Query { required: Categories::WPALLOWED, ..Query::default() };
            let mut found = false;
            let first = Range::new(range.start, PAGE_SIZE);
            pagemap.scan(first, &query, &mut |_| found = true).map(|_| found).unwrap_or(false)
        };
        let (mut client, mut others): (Vec<Range>, Vec<Range>) = Default::default();
        let join = |list: &mut Vec<Range>, range: Range| match list.last_mut() {
            Some(last) if last.end() == range.start => last.len += range.len,
            _ => list.push(range),
        };
        procfs::for_each_map(Some(pid), |line| {
            let usual = line.perms.read && line.perms.write && !line.path.starts_with("/dev/");
            if usual && !line.perms.shared && tracked(line.range) {
                join(&mut client, line.range);
            } else if usual && line.range.len >= LEAST {
                join(&mut others, line.range);
            }
        })
        .with_context(|| format!("cannot list the mappings of process {pid}"))?;
        let tracked = !client.is_empty();
        let regions = if tracked { client } else { others };
        ensure!(
            !regions.is_empty(),
            "process {pid} has no memory to store: no client, and no mapping of 16 MiB or more"
        );
        let mut firsts = Vec::new();
        regions.iter().fold(0, |first, region| {
            firsts.push(first);
            first + region.pages() as u64
        });
        Ok(Self { pid, regions, firsts, pagemap, process, tracked })
    }

    /// All of its pages.
    pub(super) fn pages(&self) -> u64 {
        self.regions.iter().map(|region| region.pages() as u64).sum()
    }

    fn address(&self, page: u64) -> usize {
        let region = self.firsts.partition_point(|&first| first <= page) - 1;
        self.regions[region].start + (page - self.firsts[region]) as usize * PAGE_SIZE
    }

    fn scan(&self, query: &Query, into: &DirtyTree) -> Result<()> {
        for (region, first) in self.regions.iter().zip(&self.firsts) {
            self.pagemap
                .scan(*region, query, &mut |run| {
                    let start = first + ((run.start - region.start) / PAGE_SIZE) as u64;
                    into.insert_range(start, run.pages() as u64);
                })
                .with_context(|| format!("cannot scan the page map of process {}", self.pid))?;
        }
        Ok(())
    }

    /// Adds the pages that are there at all. A page of a mapped file (a merged one) is there also while no page table says so.
    /// `files` are the mapped files.
    pub(super) fn populated(&self, files: &HashSet<FilePart>, into: &DirtyTree) -> Result<()> {
        files.iter().for_each(|file| into.insert_range(file.first, file.pages));
        self.scan(&Query { any_of: Categories::PRESENT | Categories::SWAPPED, ..Query::default() }, into)
    }

    /// The parts that are mapped files: merged pages.
    pub(super) fn files(&self) -> Result<HashSet<FilePart>> {
        let mut all = HashSet::new();
        procfs::for_each_map(Some(self.pid), |line| {
            if line.inode == 0 {
                return;
            }
            for (region, first) in self.regions.iter().zip(&self.firsts) {
                if let Some(part) = region.intersect(&line.range) {
                    let at = part.start - region.start;
                    let offset = line.offset + (part.start - line.range.start) as u64;
                    let (first, pages) = (first + (at / PAGE_SIZE) as u64, part.pages() as u64);
                    all.insert(FilePart { first, pages, inode: line.inode, offset });
                }
            }
        })
        .with_context(|| format!("cannot list the mappings of process {}", self.pid))?;
        Ok(all)
    }

    /// Adds the pages that were written since they were last protected. With `protect` they are protected again.
    pub(super) fn written(&self, protect: bool, into: &DirtyTree) -> Result<()> {
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { write_protect: protect, required: Categories::WRITTEN, any_of, ..Query::default() };
        self.scan(&query, into)
    }

    /// Reads pages. One that is not there (any more) reads as zeros.
    pub(super) fn read(&self, pages: &[u64], out: &mut [u8]) -> Result<()> {
        let addresses: Vec<usize> = pages.iter().map(|&page| self.address(page)).collect();
        let mut done = 0;
        while done < addresses.len() {
            done += procmem::read_pages(self.pid, &addresses[done..], &mut out[done * PAGE_SIZE..])?;
            if done < addresses.len() {
                out[done * PAGE_SIZE..(done + 1) * PAGE_SIZE].fill(0);
                done += 1;
            }
        }
        Ok(())
    }

    /// Whether it is stopped, by whomever.
    pub(super) fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        // The name, in brackets, may hold anything.
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't']))
    }

    /// The process, if it is to run again after it was stopped: unless somebody else has stopped it already.
    pub(super) fn to_resume(&self) -> Vec<i32> {
        if self.is_stopped() { Vec::new() } else { vec![self.pid] }
    }

    /// Stops the process until the result is dropped. One that is stopped already stays so.
    pub(super) fn stop(&self) -> Result<Stopped<'_>> {
        let start = Instant::now();
        if self.is_stopped() {
            return Ok(Stopped { process: None, start });
        }
        self.process.send_signal(libc::SIGSTOP).context("cannot stop the process")?;
        let stopped = Stopped { process: Some(&self.process), start };
        while !self.is_stopped() {
            ensure!(start.elapsed() < STOP_LIMIT, "process {} does not stop", self.pid);
            ensure!(!self.process.has_exited(), "process {} has ended", self.pid);
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(stopped)
    }
}

/// That a process is stopped.
pub(super) struct Stopped<'a> {
    process: Option<&'a PidFd>,
    start: Instant,
}

impl Stopped<'_> {
    /// Lets it run again; gives how long it stood.
    pub(super) fn resume(mut self) -> Duration {
        if let Some(process) = self.process.take() {
            // It has ended if this fails.
            let _ = process.send_signal(libc::SIGCONT);
        }
        self.start.elapsed()
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            let _ = process.send_signal(libc::SIGCONT);
        }
    }
}
