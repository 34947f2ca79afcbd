//! Processes: finding their pages and reading them. The process is neither changed nor stopped.
//!
//! The scan covers present pages of private memory without a file. It leaves out pages in swap,
//! which reading would bring back, and pages never written. `PAGEMAP_SCAN` finds the pages,
//! `process_vm_readv(2)` reads them.

mod areas;

use std::io;

use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::pidfd::PidFd;
use kmem::procfs;
use kmem::procmem::{ReadError, read_pages};
use kmem::{PAGE_SIZE, Range};

use crate::counter::Counter;
use crate::files::BLOCK;

/// Why a process cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process.
    #[error("there is no process {0}; for a file of that name, write ./{0}")]
    NoProcess(i32),
    /// The account must not read the process.
    #[error("no permission to look at process {0}; run as root, or as its owner with kernel.yama.ptrace_scope=0")]
    NoPermission(i32),
    /// The number belongs to a thread.
    #[error("it is a thread; give the number of its process")]
    Thread,
    /// The process has no mapping that is guest RAM.
    #[error(
        "no guest memory of its own was found; shared guest memory cannot be merged: give the guest private \
             memory (no share=on), or name the process by its number"
    )]
    NoGuestMemory,
    /// The process has no private mapping.
    #[error("it has no private memory (a kernel thread, or it has ended)")]
    NoMemory,
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error("Linux 6.7 or later is needed (PAGEMAP_SCAN); files and directories need no such kernel")]
    OldKernel,
    /// The process has ended during the scan.
    #[error("process {0} has ended meanwhile")]
    Ended(i32),
    /// The process's memory cannot be read.
    #[error(transparent)]
    Read(ReadError),
    /// Another error.
    #[error(transparent)]
    Io(io::Error),
}

impl ProcessError {
    fn of(pid: i32, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NoProcess(pid),
            io::ErrorKind::PermissionDenied => Self::NoPermission(pid),
            _ if error.raw_os_error() == Some(libc::ESRCH) => Self::NoProcess(pid),
            _ => Self::Io(error),
        }
    }
}

impl From<ReadError> for ProcessError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Gone { pid } => Self::Ended(pid),
            error => Self::Read(error),
        }
    }
}

/// Which memory of a process is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All that is private and has no file.
    All,
    /// Guest RAM alone.
    Guest,
}

/// A process to scan.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) name: String,
    fd: PidFd,
    /// The present pages, ascending.
    pages: Vec<Range>,
    /// `pages`, widened to whole chunks.
    spans: Vec<Range>,
    /// Number of its pages that KSM has merged.
    pub(crate) merged_by_ksm: u64,
}

impl Process {
    /// Finds the pages of a process.
    pub(crate) fn open(pid: i32, part: Part, chunk: usize) -> Result<Self, ProcessError> {
        let fd = PidFd::open(pid).map_err(|error| match error.raw_os_error() {
            // The number of a thread: EINVAL, on newer kernels ENOENT. One that nobody has: ESRCH.
            Some(libc::EINVAL | libc::ENOENT) => ProcessError::Thread,
            _ => ProcessError::of(pid, error),
        })?;
        let status = procfs::status(Some(pid)).map_err(|error| ProcessError::of(pid, error))?;
        let mut areas = areas::areas(pid, part).map_err(|error| ProcessError::of(pid, error))?;
        if areas.is_empty() {
            return Err(if part == Part::Guest { ProcessError::NoGuestMemory } else { ProcessError::NoMemory });
        }
        let pagemap = Pagemap::open(pid).map_err(|error| ProcessError::of(pid, error))?;
        let query = Query {
            required: Categories::PRESENT | Categories::FILE | Categories::PFNZERO,
            inverted: Categories::FILE | Categories::PFNZERO,
            ..Query::default()
        };
        let mut pages = Vec::new();
        areas.sort_unstable_by_key(|area| area.start);
        for area in areas {
            let scanned = pagemap.scan(area, &query, &mut |run| pages.push(Range::new(run.start, run.end - run.start)));
            match scanned {
                Ok(_) => {}
                Err(rustix::io::Errno::NOTTY) => return Err(ProcessError::OldKernel),
                Err(error) => return Err(ProcessError::of(pid, error.into())),
            }
        }
        if fd.has_exited() {
            return Err(ProcessError::Ended(pid));
        }
        let merged_by_ksm = kmem::ksm::process_stat(pid).ok().and_then(|stat| stat.merging_pages).unwrap_or(0);
        let spans = widen(&pages, chunk);
        Ok(Self { pid, name: status.name, fd, pages, spans, merged_by_ksm })
    }

    /// Bytes of all chunks with pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.len as u64).sum()
    }

    /// Cuts the memory into pieces of about `piece` bytes: ranges of whole chunks.
    pub(crate) fn pieces(&self, piece: usize) -> Vec<Vec<Range>> {
        let mut pieces = Vec::new();
        let mut current = Vec::new();
        let mut room = piece;
        for span in &self.spans {
            let mut rest = *span;
            while rest.len > 0 {
                let len = rest.len.min(room);
                current.push(Range::new(rest.start, len));
                rest = Range::new(rest.start + len, rest.len - len);
                room -= len;
                if room == 0 {
                    pieces.push(std::mem::take(&mut current));
                    room = piece;
                }
            }
        }
        if !current.is_empty() {
            pieces.push(current);
        }
        pieces
    }

    /// Counts the chunks of a piece. Pages that have vanished meanwhile count as zeros in a larger
    /// chunk, and are not counted otherwise.
    ///
    /// # Errors
    ///
    /// If the process cannot be read any more.
    pub(crate) fn read(
        &self,
        spans: &[Range],
        chunk: usize,
        buffer: &mut Vec<u8>,
        counter: &mut Counter<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<(), ProcessError> {
        buffer.resize(BLOCK.max(chunk), 0);
        counter.start();
        let unit = chunk.max(PAGE_SIZE);
        let mut units = spans.iter().flat_map(|span| (span.start..span.end()).step_by(unit)).peekable();
        let mut addresses: Vec<usize> = Vec::with_capacity(BLOCK / PAGE_SIZE);
        while units.peek().is_some() {
            addresses.clear();
            let read = if chunk <= PAGE_SIZE {
                addresses.extend(units.by_ref().take(BLOCK / PAGE_SIZE));
                progress((addresses.len() * PAGE_SIZE) as u64);
                self.read_packed(&mut addresses, buffer)?
            } else {
                let Some(start) = units.next() else { break };
                progress(unit as u64);
                addresses.push(start);
                self.read_sparse(start, &mut buffer[..unit])?
            };
            if self.fd.has_exited() {
                // The memory may have been that of another process with the same number.
                return Err(ProcessError::Ended(self.pid));
            }
            let per_unit = (unit / chunk) as u64;
            let positions = addresses.iter().flat_map(|&address| {
                let first = (address / chunk) as u64;
                first..first + per_unit
            });
            counter.chunks(positions, &buffer[..read]);
        }
        Ok(())
    }

    /// Reads pages into consecutive memory; removes vanished pages from `addresses`.
    fn read_packed(&self, addresses: &mut Vec<usize>, buffer: &mut [u8]) -> Result<usize, ReadError> {
        let mut done = 0;
        while done < addresses.len() {
            done += read_pages(self.pid, &addresses[done..], &mut buffer[done * PAGE_SIZE..])?;
            if done < addresses.len() {
                addresses.remove(done);
            }
        }
        Ok(done * PAGE_SIZE)
    }

    /// Reads the present pages of one chunk; the others are zeros, and are not touched.
    fn read_sparse(&self, start: usize, buffer: &mut [u8]) -> Result<usize, ReadError> {
        buffer.fill(0);
        let chunk = Range::new(start, buffer.len());
        let first = self.pages.partition_point(|run| run.end() <= start);
        for run in self.pages[first..].iter().map_while(|run| run.intersect(&chunk)) {
            let addresses: Vec<usize> = (run.start..run.end()).step_by(PAGE_SIZE).collect();
            read_pages(self.pid, &addresses, &mut buffer[run.start - start..])?;
        }
        Ok(buffer.len())
    }
}

/// The whole chunks with these pages, each once.
fn widen(pages: &[Range], chunk: usize) -> Vec<Range> {
    if chunk <= PAGE_SIZE {
        return pages.to_vec();
    }
    let mut spans: Vec<Range> = Vec::new();
    for run in pages {
        let start = run.start / chunk * chunk;
        let end = run.end().next_multiple_of(chunk);
        match spans.last_mut() {
            Some(last) if last.end() >= start => last.len = end.max(last.end()) - last.start,
            _ => spans.push(Range::new(start, end - start)),
        }
    }
    spans
}

#[cfg(test)]
mod tests;
