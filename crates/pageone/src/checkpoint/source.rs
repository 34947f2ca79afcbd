//! The memory that a checkpoint stores: a guest's, read from outside while it runs.
//!
//! A client's RAM is what its agent has registered for asynchronous write-protection:
//! `PAGEMAP_SCAN` tells it apart, and tells which of its pages were written since the last look.
//! Only one may ask that at a time: whoever asks clears the answer. So the page map
//! is locked (`flock(2)`) for as long as it is in use here.
//!
//! While an agent merges, the memory that it has in hand is neither tracked nor all in its place.
//! So memory is looked for when the agent is at rest, and whether all of it is tracked is asked
//! again while the process stands.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dirty::DirtyTree;
use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::pidfd::PidFd;
use kmem::{PAGE_SIZE, Range, procfs, procmem};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Mappings of a process that is no client count as its memory from this size on, in bytes.
const LEAST: usize = 16 << 20;
/// How long a process may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// How long to wait for another checkpoint of the process: one that was killed has it for a moment
/// still.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// Without a daemon: the agent is at rest when so many looks, so far apart, find the same memory as
/// the one before; a window takes a millisecond. With one that says so, it may still take back a
/// page that the guest has freed, so one look is not enough either.
const LOOKS: u32 = 4;
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// … and how long that may take.
const REST_LIMIT: Duration = Duration::from_secs(10);
/// How often to look whether the memory is where it was.
const LOOKS_AFTER: usize = 10;

use super::guard::First;

/// Pages that show a part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FilePart {
    pub(super) first: u64,
    pub(super) pages: u64,
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

/// A process's memory.
pub(super) struct Source {
    pub(super) pid: i32,
    pub(super) regions: Vec<Range>,
    /// The first page number of each region.
    firsts: Vec<u64>,
    /// The parts of the regions that are mapped files: merged pages.
    files: HashSet<FilePart>,
    pagemap: Pagemap,
    process: PidFd,
    /// Writes to it are tracked.
    pub(super) tracked: bool,
}

impl Source {
    /// Opens a process, for nobody else, and looks for its memory: a client's RAM; of another
    /// process the large writable mappings.
    pub(super) fn open(pid: i32) -> Result<Self> {
        let process = PidFd::open(pid).with_context(|| format!("no process {pid}"))?;
        let pagemap = Pagemap::open(pid).with_context(|| format!("cannot look at the memory of process {pid}"))?;
        let start = Instant::now();
        loop {
            match rustix::fs::flock(pagemap.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if start.elapsed() < LOCK_LIMIT => std::thread::sleep(LOOK_EVERY),
                Err(Errno::WOULDBLOCK) => bail!("another checkpoint of process {pid} is being taken; wait for its end"),
                Err(e) => return Err(e).context("cannot lock the page map"),
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
        };
        source.find()?;
        Ok(source)
    }

    /// Looks for its memory again. `alone`: no daemon says that the agent is at rest.
    pub(super) fn find_at_rest(&mut self, alone: bool) -> Result<()> {
        let looks = if alone { LOOKS } else { 1 };
        let (start, mut same) = (Instant::now(), 0);
        loop {
            let before = std::mem::take(&mut self.regions);
            self.find()?;
            same = if self.regions == before { same + 1 } else { 0 };
            if same >= looks {
                return Ok(());
            }
            ensure!(
                start.elapsed() < REST_LIMIT,
                "the memory of process {} does not come to rest; try again",
                self.pid
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether its memory is where it was. Looks for merged pages too, see [`Source::merged`].
    pub(super) fn is_as_found(&mut self) -> Result<bool> {
        let before = self.regions.clone();
        for look in 0..LOOKS_AFTER {
            if look > 0 {
                std::thread::sleep(LOOK_EVERY);
            }
            self.find()?;
            if self.regions == before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The parts that were mapped files, merged pages, when the memory was last looked for.
    pub(super) fn merged(&self) -> &HashSet<FilePart> {
        &self.files
    }

    fn find(&mut self) -> Result<()> {
        let (pid, pagemap) = (self.pid, &self.pagemap);
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
            let usual = line.perms.read && line.perms.write && !line.path.starts_with("/dev/");
            if usual && !line.perms.shared && tracked(line.range) {
                join(&mut client, line.range);
            } else if usual && line.range.len >= LEAST {
                join(&mut others, line.range);
            }
        })
        .with_context(|| format!("cannot list the mappings of process {pid}"))?;
        self.tracked = !client.is_empty();
        self.regions = if self.tracked { client } else { others };
        ensure!(
            !self.regions.is_empty(),
            "process {pid} has no memory to store: no client, and no mapping of 16 MiB or more"
        );
        self.firsts.clear();
        self.regions.iter().fold(0, |first, region| {
            self.firsts.push(first);
            first + region.pages() as u64
        });
        self.files = files.iter().flat_map(|file| self.parts_of(file)).collect();
        Ok(())
    }

    /// Address and length of each region, in bytes.
    pub(super) fn addresses(&self) -> Vec<(u64, u64)> {
        self.regions.iter().map(|region| (region.start as u64, region.len as u64)).collect()
    }

    /// Adds the pages of parts of the process's memory, addresses and lengths in bytes, as far as
    /// they are its regions'.
    pub(super) fn insert(&self, parts: &[(u64, u64)], into: &DirtyTree) {
        for &(start, len) in parts {
            let part = Range::new(start as usize, len as usize);
            for (region, first) in self.regions.iter().zip(&self.firsts) {
                if let Some(part) = region.intersect(&part) {
                    into.insert_range(first + ((part.start - region.start) / PAGE_SIZE) as u64, part.pages() as u64);
                }
            }
        }
    }

    /// The other way round: the parts of the process's memory that these pages are.
    pub(super) fn parts(&self, pages: &DirtyTree) -> Vec<(u64, u64)> {
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

    /// Whether every page is tracked; an agent that merges takes those that it has in hand away
    /// from the tracking.
    pub(super) fn is_tracked(&self) -> Result<bool> {
        let mut tracked = true;
        let query = Query { inverted: Categories::WPALLOWED, required: Categories::WPALLOWED, ..Query::default() };
        for region in &self.regions {
            let scanned = self.pagemap.scan(*region, &query, &mut |_| tracked = false);
            scanned.with_context(|| format!("cannot scan the page map of process {}", self.pid))?;
        }
        Ok(tracked)
    }

    /// Whether a device may write to its memory some time after the kernel has noted that: by
    /// direct I/O, whose requests hold on to pages. The kernel notes when one begins, not when
    /// it ends.
    pub(super) fn may_do_direct_io(&self) -> bool {
        const DIRECT: u64 = 0o40000; // O_DIRECT on x86-64.
        const DEVICES: [&str; 6] = ["/dev/sg", "/dev/bsg", "/dev/ng", "/dev/nvme", "/dev/vfio", "/dev/infiniband"];
        let looks = || -> std::io::Result<bool> {
            for entry in std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid))? {
                let path = entry?.path();
                let Ok(info) = std::fs::read_to_string(&path) else { continue };
                let number = |name: &str, radix| {
                    let value = info.lines().find_map(|line| line.strip_prefix(name))?;
                    u64::from_str_radix(value.trim(), radix).ok()
                };
                // Files that are registered with a ring are not in the list of descriptors.
                let ring = number("UserFiles:", 10).is_some_and(|files| files > 0);
                if ring || number("flags:", 8).is_none_or(|flags| flags & DIRECT != 0) {
                    return Ok(true);
                }
                let name = path.file_name().unwrap_or_default();
                let target = std::fs::read_link(format!("/proc/{}/fd", self.pid) + "/" + &name.to_string_lossy());
                let target = target.unwrap_or_default().to_string_lossy().into_owned();
                if DEVICES.iter().any(|device| target.starts_with(device)) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        looks().unwrap_or(true)
    }

    /// Whether some of its memory is pinned for good: a device may write to it at any time.
    pub(super) fn is_pinned(&self) -> bool {
        procfs::status(Some(self.pid)).map_or(true, |status| status.vm_pin_kib > 0)
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

    /// Adds the pages that are there at all. A page of a mapped file (a merged one) is there also
    /// while no page table says so. `files` are the mapped files.
    pub(super) fn populated(&self, files: &HashSet<FilePart>, into: &DirtyTree) -> Result<()> {
        files.iter().for_each(|file| into.insert_range(file.first, file.pages));
        self.scan(&Query { any_of: Categories::PRESENT | Categories::SWAPPED, ..Query::default() }, into)
    }

    /// The parts that are mapped files now: merged pages.
    pub(super) fn files(&self) -> Result<HashSet<FilePart>> {
        let mut all = HashSet::new();
        procfs::for_each_map(Some(self.pid), |line| {
            all.extend(FileMap::of(line).iter().flat_map(|file| self.parts_of(file)));
        })
        .with_context(|| format!("cannot list the mappings of process {}", self.pid))?;
        Ok(all)
    }

    /// The parts of the regions that a file's mapping is.
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

    /// Adds the pages that were written since they were last protected, and protects them again.
    pub(super) fn written(&self, into: &DirtyTree) -> Result<()> {
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        self.scan(&Query { write_protect: true, required: Categories::WRITTEN, any_of, ..Query::default() }, into)
    }

    /// In one look, for a process that stands: adds the pages that were written since they were
    /// last protected, and, as [`Source::populated`], those that are there at all.
    pub(super) fn look(&self, files: &HashSet<FilePart>, written: &DirtyTree, populated: &DirtyTree) -> Result<()> {
        files.iter().for_each(|file| populated.insert_range(file.first, file.pages));
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { any_of, returned: Categories::WRITTEN, ..Query::default() };
        for (region, first) in self.regions.iter().zip(&self.firsts) {
            let each = &mut |run: kmem::pagemap::PageRun| {
                let (start, pages) = (first + ((run.start - region.start) / PAGE_SIZE) as u64, run.pages() as u64);
                populated.insert_range(start, pages);
                if run.categories.contains(Categories::WRITTEN) {
                    written.insert_range(start, pages);
                }
            };
            let scanned = self.pagemap.scan(*region, &query, each);
            scanned.with_context(|| format!("cannot scan the page map of process {}", self.pid))?;
        }
        Ok(())
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
        procfs::is_stopped(self.pid).unwrap_or(false)
    }

    /// The process, if it is to run again after it was stopped: unless somebody else has stopped it
    /// already.
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
        // On a busy machine threads wait for a processor to notice the signal on. None of them does
        // anything else before.
        let _first = First::begin(Some(self.pid));
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
