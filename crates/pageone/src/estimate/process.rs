//! Processes: which of their pages there are, and reading those. Nothing is changed in them,
//! nothing is stopped.
//!
//! Looked at is private memory of no file that is present: neither what is in swap, which reading
//! would bring back, nor what was never written. The page map tells which pages those are
//! (`PAGEMAP_SCAN`), `process_vm_readv(2)` reads them.

use std::io;

use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::pidfd::PidFd;
use kmem::procfs::{self, MapLine};
use kmem::procmem::{ReadError, read_pages};
use kmem::{PAGE_SIZE, Range};

use super::counter::Counter;
use super::files::BLOCK;

/// The name that every QEMU's system emulator starts with, as `/proc/PID/comm` has it.
const QEMU: &str = "qemu-system-";
/// Guest RAM is in pieces of at least this size.
const GUEST_MIN: usize = 32 << 20;

/// A process to look at.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) name: String,
    fd: PidFd,
    /// Present pages, ascending.
    pages: Vec<Range>,
    /// `pages`, widened to whole chunks.
    spans: Vec<Range>,
    /// Pages that KSM keeps for it already.
    pub(super) merged_by_ksm: u64,
}

/// The numbers of all processes that are QEMU guests.
pub(super) fn guests() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that has ended meanwhile is none of them.
        if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(QEMU)) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    Ok(pids)
}

impl Process {
    /// Finds the pages of a process. `guest`: guest RAM alone. An error names the reason.
    pub(super) fn open(pid: i32, guest: bool, chunk: usize) -> Result<Self, String> {
        let fd = PidFd::open(pid).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => "it is a thread; give the number of its process".into(),
            _ => reason(pid, &error),
        })?;
        let status = procfs::status(Some(pid)).map_err(|error| reason(pid, &error))?;
        let mut areas = areas(pid, guest).map_err(|error| reason(pid, &error))?;
        if areas.is_empty() {
            return Err(match guest {
                true => "no guest memory of its own was found; shared guest memory cannot be merged".into(),
                false => "it has no private memory (a kernel thread, or it has ended)".into(),
            });
        }
        let pagemap = Pagemap::open(pid).map_err(|error| reason(pid, &error))?;
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
                Err(rustix::io::Errno::NOTTY) => return Err("Linux 6.7 or later is needed (PAGEMAP_SCAN)".into()),
                Err(error) => return Err(reason(pid, &error.into())),
            }
        }
        if fd.has_exited() {
            return Err(gone(pid));
        }
        let merged_by_ksm = kmem::ksm::process_stat(pid).ok().and_then(|stat| stat.merging_pages).unwrap_or(0);
        let spans = widen(&pages, chunk);
        Ok(Process { pid, name: status.name, fd, pages, spans, merged_by_ksm })
    }

    /// Bytes in whole chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.len as u64).sum()
    }

    /// Cuts the memory into pieces of about `piece` bytes: ranges of addresses, each of whole
    /// chunks.
    pub(super) fn pieces(&self, piece: usize) -> Vec<Vec<Range>> {
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

    /// Gives the chunks of a piece to `counter`. Pages that went away meanwhile count as zero when
    /// they are part of a larger chunk, and not at all otherwise.
    ///
    /// # Errors
    ///
    /// Why the process can be read no more.
    pub(super) fn read(
        &self,
        spans: &[Range],
        chunk: usize,
        buffer: &mut Vec<u8>,
        counter: &mut Counter<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<(), String> {
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
                return Err(gone(self.pid)); // whose memory this was is not sure
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

    /// Reads pages one behind the other; strikes those that are gone from `addresses`.
    fn read_packed(&self, addresses: &mut Vec<usize>, buffer: &mut [u8]) -> Result<usize, String> {
        let mut done = 0;
        while done < addresses.len() {
            done +=
                read_pages(self.pid, &addresses[done..], &mut buffer[done * PAGE_SIZE..]).map_err(|e| self.why(e))?;
            if done < addresses.len() {
                addresses.remove(done);
            }
        }
        Ok(done * PAGE_SIZE)
    }

    /// Reads the pages of one chunk that are present; the others are zero, and are not touched.
    fn read_sparse(&self, start: usize, buffer: &mut [u8]) -> Result<usize, String> {
        buffer.fill(0);
        let chunk = Range::new(start, buffer.len());
        let first = self.pages.partition_point(|run| run.end() <= start);
        for run in self.pages[first..].iter().map_while(|run| run.intersect(&chunk)) {
            let addresses: Vec<usize> = (run.start..run.end()).step_by(PAGE_SIZE).collect();
            read_pages(self.pid, &addresses, &mut buffer[run.start - start..]).map_err(|error| self.why(error))?;
        }
        Ok(buffer.len())
    }

    fn why(&self, error: ReadError) -> String {
        match error {
            ReadError::Gone { pid } => gone(pid),
            error => error.to_string(),
        }
    }
}

fn gone(pid: i32) -> String {
    format!("process {pid} has ended meanwhile")
}

fn reason(pid: i32, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!("there is no process {pid}; for a file of that name, write ./{pid}"),
        io::ErrorKind::PermissionDenied => {
            format!(
                "no permission to look at process {pid}; run as root, or as its owner with kernel.yama.ptrace_scope=0"
            )
        }
        _ if error.raw_os_error() == Some(libc::ESRCH) => {
            format!("there is no process {pid}; for a file of that name, write ./{pid}")
        }
        _ => error.to_string(),
    }
}

/// The mappings to look at. A kernel thread has none.
fn areas(pid: i32, guest: bool) -> io::Result<Vec<Range>> {
    let anonymous = |line: &MapLine| {
        line.inode == 0
            && !line.perms.shared
            && !matches!(line.path.as_str(), "[vvar]" | "[vvar_vclock]" | "[vdso]" | "[vsyscall]")
    };
    let mut areas = Vec::new();
    if !guest {
        procfs::for_each_map(Some(pid), |line| {
            if anonymous(line) {
                areas.push(line.range);
            }
        })?;
        return Ok(areas);
    }
    // Where PageONE has merged some of it already, guest RAM is in pieces: so count neighbours as one.
    // Else a neighbour is something else of QEMU's that happens to lie there.
    let mut span: Vec<Range> = Vec::new();
    let mut before = Range::new(0, 0);
    let (mut len, mut merged) = (0, false);
    let mut flush = |span: &mut Vec<Range>, len: usize, merged: bool| {
        span.retain(|area| if merged { len >= GUEST_MIN } else { area.len >= GUEST_MIN });
        areas.append(span);
    };
    procfs::for_each_map(Some(pid), |line| {
        let store = line.path.starts_with("/memfd:pageone");
        let ram = line.perms.read && line.perms.write && !line.perms.exec && !line.perms.shared;
        let ram = ram && (store || anonymous(line) && !line.path.starts_with("[heap"));
        if !ram || before.end() != line.range.start {
            flush(&mut span, std::mem::take(&mut len), std::mem::take(&mut merged));
        }
        before = line.range;
        if ram {
            len += line.range.len;
            merged |= store;
            if !store {
                span.push(line.range);
            }
        } else {
            before = Range::new(0, 0);
        }
    })?;
    flush(&mut span, len, merged);
    Ok(areas)
}

/// Whole chunks that hold the pages, each once.
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
mod tests {
    use super::*;

    #[test]
    fn chunks_hold_all_pages_once() {
        let pages = [Range::new(0x1000, 0x1000), Range::new(0x3000, 0x2000), Range::new(0x9000, 0x1000)];
        assert_eq!(widen(&pages, 4096), pages);
        assert_eq!(widen(&pages, 0x4000), [Range::new(0, 0xc000)]);
        assert_eq!(widen(&pages[..1], 0x2000), [Range::new(0, 0x2000)]);
        assert_eq!(widen(&pages, 0x2000), [Range::new(0, 0x6000), Range::new(0x8000, 0x2000)]);
    }

    #[test]
    fn a_thread_of_ours_has_pages_and_they_can_be_cut() {
        let memory = vec![7u8; 1 << 20];
        let process = Process::open(std::process::id() as i32, false, 8192).unwrap();
        let whole = Range::new(memory.as_ptr().addr().next_multiple_of(8192), 512 << 10);
        assert!(process.spans.iter().any(|span| span.contains(&whole)));
        let pieces = process.pieces(64 << 10);
        assert_eq!(pieces.iter().flatten().map(|range| range.len as u64).sum::<u64>(), process.bytes());
        assert!(pieces.iter().all(|piece| piece.iter().map(|range| range.len).sum::<usize>() <= 64 << 10));
        assert!(pieces.iter().flatten().all(|range| range.start % 8192 == 0 && range.len % 8192 == 0));
    }

    #[test]
    fn what_is_no_process_says_so() {
        let error = Process::open(i32::MAX, false, 4096).unwrap_err();
        assert!(error.contains("no process") && error.contains("./"), "{error}");
        // A process of its own: what other tests allocate in this one may be as large as a guest.
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let open = || Process::open(child.id() as i32, true, 4096);
        while procfs::status(Some(child.id() as i32)).unwrap().name != "sleep" {
            std::thread::yield_now();
        }
        let error = open().unwrap_err();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(error.contains("guest memory"), "{error}");
    }

    /// Also when its number is another process's by then: what counts is the process that was
    /// opened.
    #[test]
    fn a_process_that_has_ended_is_not_counted() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = loop {
            // Until it has become `sleep`.
            let process = Process::open(child.id() as i32, false, 4096).unwrap();
            if process.name == "sleep" {
                break process;
            }
        };
        child.kill().unwrap();
        child.wait().unwrap();
        let index = crate::estimate::index::Index::new(1 << 24);
        let mut counter = Counter::new(&index, 0, 0, 4096);
        let error = process.read(&process.spans, 4096, &mut Vec::new(), &mut counter, |_| {}).unwrap_err();
        assert!(error.contains("has ended"), "{error}");
        assert_eq!(counter.tally.chunks, 0);
    }
}
