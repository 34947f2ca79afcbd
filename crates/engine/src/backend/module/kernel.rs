//! What the kernel does for files: a mount by its path, and the calls as the merge uses them.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kmem::pageonefs::{Ask, Bits, Entry, File as Listed, Harvest, MountInfo, OpenError, Stats};
use rustix::io::Errno;
use wire::Run;

use crate::sync::Mutex;

/// Calls on the files of a mount, as [`kmem::pageonefs::Mount`] has them. The tests have a model.
pub(crate) trait Kernel: Send + Sync {
    fn harvest(&self, id: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno>;
    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno>;
    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno>;
    /// Calls `punched` with what became holes, after each run. Pages that are pinned stay, and
    /// others may.
    fn punch(&self, id: u64, runs: &[Run], punched: &mut dyn FnMut(Run)) -> Result<(), Errno>;

    /// Keeps the mount open over some calls, which cost less then. It cannot be unmounted
    /// meanwhile.
    fn hold(&self) -> Option<Held> {
        None
    }
}

pub(crate) type Held = Arc<kmem::pageonefs::Mount>;

#[derive(Default)]
pub(crate) struct MountPoint {
    pub(crate) path: PathBuf,
    pub(crate) device: u64,
    /// Empty if it shares with no other mount.
    pub(crate) domain: String,
    /// While somebody has it open.
    pub(super) open: Mutex<Weak<kmem::pageonefs::Mount>>,
}

impl MountPoint {
    pub(crate) fn new(info: MountInfo) -> Result<Self, OpenError> {
        let mount = kmem::pageonefs::Mount::open(&info.path)?;
        Ok(Self { domain: mount.domain().into(), path: info.path, device: info.device, ..Self::default() })
    }

    pub(crate) fn name(&self) -> String {
        if self.domain.is_empty() { self.path.display().to_string() } else { self.domain.clone() }
    }

    /// Opens its root for one call, unless somebody has it open.
    fn open(&self) -> Result<Held, Errno> {
        let mut open = self.open.lock();
        if let Some(held) = open.upgrade() {
            return Ok(held);
        }
        match kmem::pageonefs::Mount::open(&self.path) {
            // Another file system may have been mounted there since.
            Ok(mount) if mount.device() == self.device => {
                let held = Arc::new(mount);
                *open = Arc::downgrade(&held);
                Ok(held)
            }
            Ok(_) => Err(Errno::NODEV),
            Err(OpenError::Open { errno, .. }) => Err(errno),
            Err(_) => Err(Errno::NODEV),
        }
    }

    /// Has the daemon told of news.
    pub(crate) fn notify(&self, news: BorrowedFd<'_>) -> Result<(), Errno> {
        self.open()?.notify(Some(news))
    }

    pub(crate) fn files(&self) -> Result<Vec<Listed>, Errno> {
        self.open()?.files()
    }

    /// A part of what is still merged.
    pub(crate) fn make_plain(&self, id: u64) -> Result<(), Errno> {
        self.open()?.make_plain(id)
    }

    pub(crate) fn stats(&self) -> Result<Stats, Errno> {
        self.open()?.stats()
    }
}

impl Kernel for MountPoint {
    fn harvest(&self, id: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        self.open()?.harvest(id, start, of, bits)
    }

    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        self.open()?.digest(ask, out)
    }

    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        self.open()?.merge(id, entries)
    }

    fn punch(&self, id: u64, runs: &[Run], punched: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        let mount = self.open()?;
        let mut held = Vec::new();
        in_time(runs, PATIENCE, |run| {
            held.resize(run.len.div_ceil(64) as usize, 0);
            mount.punch(id, u64::from(run.page.0), u64::from(run.len), &mut held)?;
            holes(run, &held, punched);
            Ok(())
        })
    }

    fn hold(&self) -> Option<Held> {
        self.open().ok()
    }
}

/// How long runs are punched, while the guest waits for some of these pages.
const PATIENCE: Duration = Duration::from_millis(100);

/// Each call may wait some milliseconds for a task that is throttled. What it does not come to
/// stays.
fn in_time(runs: &[Run], most: Duration, mut punch: impl FnMut(Run) -> Result<(), Errno>) -> Result<(), Errno> {
    let begin = Instant::now();
    runs.iter().take_while(|_| begin.elapsed() <= most).try_for_each(|&run| punch(run))
}

/// The parts of a run without a bit.
fn holes(run: Run, held: &[u64], punched: &mut dyn FnMut(Run)) {
    let is_held = |at: u32| held[(at / 64) as usize] >> (at % 64) & 1 == 1;
    let mut begin = 0;
    for at in (0..run.len).filter(|&at| is_held(at)).chain([run.len]) {
        if begin < at {
            punched(Run::new(run.page + begin, at - begin));
        }
        begin = at + 1;
    }
}

#[cfg(test)]
mod tests {
    use wire::PageNo;

    use super::*;

    #[test]
    fn runs_that_take_long_leave_the_rest() {
        let runs: Vec<Run> = (0..50).map(|page| Run::new(PageNo(2 * page), 1)).collect();
        let punched = |most| {
            let mut punched = Vec::new();
            let punch = |run| {
                std::thread::sleep(Duration::from_millis(2));
                punched.push(run);
                Ok(())
            };
            in_time(&runs, most, punch).unwrap();
            punched
        };
        assert_eq!(punched(Duration::from_secs(1000)), runs);
        let some = punched(Duration::from_millis(5));
        assert!(!some.is_empty() && some.len() <= 3 && runs.starts_with(&some), "{some:?}");
        assert_eq!(in_time(&runs, Duration::MAX, |_| Err(Errno::BUSY)), Err(Errno::BUSY));
    }

    #[test]
    fn what_was_punched_lies_between_what_stayed() {
        let parts = |held: &[u64]| {
            let mut parts = Vec::new();
            holes(Run::new(PageNo(1000), 70), held, &mut |run| parts.push((run.page.0 - 1000, run.len)));
            parts
        };
        assert_eq!(parts(&[0, 0]), [(0, 70)]);
        assert_eq!(parts(&[1, 1 << 5]), [(1, 68)]);
        assert_eq!(parts(&[0b1010, 1]), [(0, 1), (2, 1), (4, 60), (65, 5)]);
        assert_eq!(parts(&[!0, !0]), []);
    }
}
