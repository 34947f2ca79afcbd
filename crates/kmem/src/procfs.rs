//! `/proc`: mappings, status, memory use and CPU time of processes; memory and release of the
//! system.
//!
//! Functions take the number of a process, or `None` for this process. They fail as reading the
//! file does: with `NotFound` or `ESRCH` where the process is gone, with `PermissionDenied` where
//! it belongs to another user. Sources: `proc(5)` and its pages for single files.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

mod direct_io;
mod maps;
mod stat;

pub use direct_io::{Descriptor, descriptors, unpinned_io};
pub use maps::{MapLine, Maps, Perms, count_maps, for_each_map};
pub use stat::Stat;

fn path(pid: Option<i32>, file: &str) -> String {
    match pid {
        Some(pid) => format!("/proc/{pid}/{file}"),
        None => format!("/proc/self/{file}"),
    }
}

/// A file's text, mostly in one call: of a file whose length is unknown the standard library takes
/// 32 bytes first, and twice as many each time. A daemon with 1,000 clients notices.
fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::with_capacity(4096);
    File::open(path)?.take(u64::MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn invalid(what: impl Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} is not understood"))
}

/// Calls `each` with name and value of every line `name: value`. The value has no surrounding
/// blanks.
fn fields(text: &str, mut each: impl FnMut(&str, &str)) {
    for line in text.lines() {
        if let Some((name, value)) = line.split_once(':') {
            each(name, value.trim());
        }
    }
}

/// The number at the start of a value; 0 without one.
fn number(value: &str) -> u64 {
    value.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Some of `/proc/PID/status`. A value that a kernel thread or an older kernel does not have is 0.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// The command's name, up to 15 bytes.
    pub name: String,
    /// Thread group: the number of the process.
    pub tgid: i32,
    /// Effective user.
    pub uid: u32,
    /// Locked memory, KiB.
    pub vm_lck_kib: u64,
    /// Pinned memory, KiB (io_uring, VFIO and RDMA count here; O_DIRECT does not).
    pub vm_pin_kib: u64,
    /// Resident memory, KiB.
    pub vm_rss_kib: u64,
    /// The most that there has been at once, KiB.
    pub vm_hwm_kib: u64,
    /// Resident shared memory, KiB.
    pub rss_shmem_kib: u64,
    /// Number of threads.
    pub threads: u64,
    /// Whether `no_new_privs` is set.
    pub no_new_privs: bool,
    /// Seccomp: 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
}

/// The status of a process.
pub fn status(pid: Option<i32>) -> io::Result<Status> {
    Ok(parse_status(&read_to_string(path(pid, "status"))?))
}

/// An open `/proc/thread-self/status`. It tells of the same thread for ever, also where `/proc`
/// cannot be reached any more, because this process has changed its root directory.
#[derive(Debug)]
pub struct StatusFile(File);

impl StatusFile {
    /// Opens the status of the calling thread. Values of memory are those of its process.
    ///
    /// # Errors
    ///
    /// `NotFound`: `/proc` is not mounted.
    pub fn of_thread() -> io::Result<Self> {
        Ok(Self(File::open("/proc/thread-self/status")?))
    }

    /// What it says now.
    ///
    /// # Errors
    ///
    /// `ESRCH`: the thread has ended. `InvalidData`: the kernel says nothing of its memory.
    pub fn read(&self) -> io::Result<Status> {
        let mut text = Vec::with_capacity(4096);
        let mut part = [0; 4096];
        loop {
            match self.0.read_at(&mut part, text.len() as u64)? {
                0 => break,
                len => text.extend_from_slice(&part[..len]),
            }
        }
        let text = String::from_utf8_lossy(&text);
        // A thread that is ending has no memory any more.
        if !text.contains("\nVmPin:") {
            return Err(invalid("a status without VmPin"));
        }
        Ok(parse_status(&text))
    }
}

impl AsFd for StatusFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether every thread of a process is stopped, by a signal or by a tracer. The first thread may
/// be stopped while others still run on to the point where they stop.
pub fn is_stopped(pid: i32) -> io::Result<bool> {
    let mut stopped = false;
    for thread in threads(pid)? {
        let stat = match Stat::of_thread(Some(pid), thread) {
            Ok(stat) => stat,
            // The thread has ended.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => continue,
            Err(e) => return Err(e),
        };
        match stat.state() {
            Some('T' | 't') => stopped = true,
            Some('Z' | 'X') => {}
            _ => return Ok(false),
        }
    }
    Ok(stopped)
}

/// The numbers of a process's threads.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        all.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(all)
}

fn parse_status(text: &str) -> Status {
    let mut status = Status::default();
    fields(text, |name, value| match name {
        "Name" => status.name = value.to_owned(),
        "Tgid" => status.tgid = number(value) as i32,
        // Real, effective, saved, file system.
        "Uid" => status.uid = value.split_whitespace().nth(1).and_then(|uid| uid.parse().ok()).unwrap_or(0),
        "VmLck" => status.vm_lck_kib = number(value),
        "VmPin" => status.vm_pin_kib = number(value),
        "VmHWM" => status.vm_hwm_kib = number(value),
        "VmRSS" => status.vm_rss_kib = number(value),
        "RssShmem" => status.rss_shmem_kib = number(value),
        "Threads" => status.threads = number(value),
        "NoNewPrivs" => status.no_new_privs = number(value) != 0,
        "Seccomp" => status.seccomp = number(value) as u32,
        _ => {}
    });
    status
}

/// `/proc/PID/smaps_rollup`: the memory of a process in KiB, summed over its mappings.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct SmapsRollup {
    /// Resident memory.
    pub rss: u64,
    /// Resident memory; each shared page is divided by the number of processes that map it.
    pub pss: u64,
    /// Mapped by this process alone, unchanged since it was read from its file.
    pub private_clean: u64,
    /// Mapped by this process alone, changed.
    pub private_dirty: u64,
    /// Mapped by several processes, unchanged.
    pub shared_clean: u64,
    /// Mapped by several processes, changed.
    pub shared_dirty: u64,
    /// Anonymous memory.
    pub anonymous: u64,
    /// Anonymous memory in huge pages that the page tables map as such.
    pub anon_huge_pages: u64,
    /// Anonymous memory in swap.
    pub swap: u64,
}

/// The memory of a process. The kernel walks all of its page tables, which takes about 1 ms for 100
/// MiB of resident memory.
pub fn smaps_rollup(pid: Option<i32>) -> io::Result<SmapsRollup> {
    Ok(parse_smaps_rollup(&read_to_string(path(pid, "smaps_rollup"))?))
}

fn parse_smaps_rollup(text: &str) -> SmapsRollup {
    let mut rollup = SmapsRollup::default();
    fields(text, |name, value| {
        let field = match name {
            "Rss" => &mut rollup.rss,
            "Pss" => &mut rollup.pss,
            "Private_Clean" => &mut rollup.private_clean,
            "Private_Dirty" => &mut rollup.private_dirty,
            "Shared_Clean" => &mut rollup.shared_clean,
            "Shared_Dirty" => &mut rollup.shared_dirty,
            "Anonymous" => &mut rollup.anonymous,
            "AnonHugePages" => &mut rollup.anon_huge_pages,
            "Swap" => &mut rollup.swap,
            _ => return,
        };
        *field = number(value);
    });
    rollup
}

/// Some of `/proc/meminfo`, in KiB.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct MemInfo {
    /// All memory that the kernel manages.
    pub total_kib: u64,
    /// Unused memory.
    pub free_kib: u64,
    /// The kernel's estimate of the memory that can be used without swapping.
    pub available_kib: u64,
    /// Page cache, with shared memory.
    pub cached_kib: u64,
    /// Shared memory: memfds, tmpfs, shared anonymous mappings.
    pub shmem_kib: u64,
    /// Anonymous pages mapped by programs.
    pub anon_pages_kib: u64,
    /// The kernel's own objects.
    pub slab_kib: u64,
    /// Page tables.
    pub page_tables_kib: u64,
    /// Swap space.
    pub swap_total_kib: u64,
    /// Unused swap space.
    pub swap_free_kib: u64,
    /// Memory that has failed (hwpoison). Kernels that cannot handle that do not count it.
    pub corrupted_kib: u64,
}

/// The memory of the system.
pub fn meminfo() -> io::Result<MemInfo> {
    Ok(parse_meminfo(&read_to_string("/proc/meminfo")?))
}

fn parse_meminfo(text: &str) -> MemInfo {
    let mut info = MemInfo::default();
    fields(text, |name, value| {
        let field = match name {
            "MemTotal" => &mut info.total_kib,
            "MemFree" => &mut info.free_kib,
            "MemAvailable" => &mut info.available_kib,
            "Cached" => &mut info.cached_kib,
            "Shmem" => &mut info.shmem_kib,
            "AnonPages" => &mut info.anon_pages_kib,
            "Slab" => &mut info.slab_kib,
            "PageTables" => &mut info.page_tables_kib,
            "SwapTotal" => &mut info.swap_total_kib,
            "SwapFree" => &mut info.swap_free_kib,
            "HardwareCorrupted" => &mut info.corrupted_kib,
            _ => return,
        };
        *field = number(value);
    });
    info
}

fn number_in(file: &str) -> io::Result<u64> {
    read_to_string(file)?.trim().parse().map_err(|_| invalid(file))
}

/// The value of [`max_map_count`] that large guests are advised to have: 16 times the default.
pub const ADVISED_MAP_COUNT: usize = 1 << 20;

/// `vm.max_map_count`: the most mappings that a process may have.
pub fn max_map_count() -> io::Result<usize> {
    number_in("/proc/sys/vm/max_map_count").map(|count| count as usize)
}

/// `kernel.yama.ptrace_scope`: whether processes of one user may look at each other. 0: they may;
/// 1: only at their children; 2: only with CAP_SYS_PTRACE; 3: none may. `None`: the kernel has no
/// Yama, which is like 0.
pub fn ptrace_scope() -> Option<u32> {
    number_in("/proc/sys/kernel/yama/ptrace_scope").ok().map(|scope| scope as u32)
}

/// The running kernel: major and minor version and the whole release, such as `(6, 18, "6.18.44")`.
/// A version that cannot be read is 0.
pub fn kernel_release() -> (u32, u32, String) {
    let release = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let (major, minor) = parse_release(&release);
    (major, minor, release)
}

fn parse_release(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The CPU time that all threads of a process have used, in user and kernel mode; usually in steps
/// of 10 ms.
pub fn cpu_time(pid: i32) -> io::Result<Duration> {
    let stat = Stat::of(Some(pid))?;
    let ticks = stat.field(14)?.saturating_add(stat.field(15)?);
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Page faults of a process that needed no disk (`minflt`), those of threads that have ended too.
pub fn minor_faults(pid: i32) -> io::Result<u64> {
    Stat::of(Some(pid))?.field(10)
}

/// When a process started, in clock ticks after boot. With its number this tells it from all others
/// without keeping a descriptor of it.
///
/// # Errors
///
/// `NotFound` or `ESRCH`: the process is gone.
pub fn start_time(pid: i32) -> io::Result<u64> {
    Stat::of(Some(pid))?.field(22)
}

/// A file to be read line by line. The buffer is as large as the piece that the kernel fills at
/// once for such files.
fn lines_of(file: &str) -> io::Result<BufReader<File>> {
    Ok(BufReader::with_capacity(16 << 10, File::open(file)?))
}

#[cfg(test)]
mod tests;
