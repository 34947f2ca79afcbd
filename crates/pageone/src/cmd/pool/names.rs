//! Pools by their names, and waiting for those that others have open.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use checkpoint::serve::ServeError;
use mpool::{Access, OpenOptions, Pool, PoolError, Registry, Sign};

use crate::paths;

/// How long a program that has the pool open may take to serve readers, or to end.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// How long a program lets those go first that come back.
const COURTESY: Duration = Duration::from_secs(1);
/// How long a checkpoint waits for a program that does not store one.
const MOMENT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 10 });
/// What is said of a program that has the pool open and is waited for without end.
const GIVES: &str = "waiting until that gives it to others, or has stored; Ctrl-C ends waiting";
/// Time between two attempts to open a pool.
pub(super) const RETRY: Duration = Duration::from_millis(20);

/// The directory of the pools' names.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Names {
    /// Directory of the pools' names [environment: PAGEONE_POOLS] [default: /var/lib/pageone/pools
    /// for root, else ~/.local/state/pageone/pools]
    #[arg(long, value_name = "DIR")]
    pools: Option<PathBuf>,
}

impl Names {
    /// The directory.
    pub(crate) fn directory(&self) -> PathBuf {
        let own = || match std::env::var_os("HOME") {
            Some(home) if !rustix::process::geteuid().is_root() => Path::new(&home).join(".local/state/pageone/pools"),
            _ => "/var/lib/pageone/pools".into(),
        };
        paths::named(self.pools.as_deref(), "PAGEONE_POOLS").unwrap_or_else(own)
    }

    /// The registry.
    pub(crate) fn registry(&self) -> Registry {
        Registry::new(self.directory())
    }

    /// Finds a pool by its name or path.
    pub(crate) fn find<'a>(&self, name: &'a str) -> Result<Found<'a>> {
        Ok(Found { name, path: self.registry().find(name)?, uuid: None })
    }

    /// Opens a pool by its name or path.
    pub(crate) fn open(&self, name: &str, access: Access) -> Result<Pool> {
        self.find(name)?.open(access).map_err(|error| explain(name, error))
    }

    /// The same; waits as [`Found::open_soon`] does.
    pub(crate) fn open_soon(&self, name: &str, access: Access) -> Result<Pool> {
        self.find(name)?.open_soon(access)
    }

    /// Reads a pool by its name or path: with `own`, or, while another program stores a checkpoint
    /// in it, with `served`, which gives `None` if nobody serves.
    pub(crate) fn read<T>(
        &self,
        name: &str,
        own: impl FnOnce(Pool) -> Result<T>,
        served: impl Fn(&Path) -> Result<Option<T>, ServeError>,
    ) -> Result<T> {
        let (mut found, mut read, mut until, mut said) = (self.find(name)?, None, PATIENCE, false);
        let path = found.path.clone();
        let opened = found.open_behind(Access::Shared, Comes::New, |waited, busy| {
            let works = works(&path);
            if works {
                until = waited + PATIENCE;
            }
            if works && waited > PATIENCE && !std::mem::replace(&mut said, true) {
                used_by(name, &busy).iter().for_each(|used| output::note!("{used}: {GIVES}"));
            }
            match served(&path) {
                // The other program begins or ends just now, or lets others have the pool.
                Ok(None) | Err(ServeError::Broken) if waited < until => Ok(()),
                Ok(None) => Err(explain(name, busy)),
                // The error ends the waiting, and nobody sees it.
                Ok(answer) => {
                    read = answer;
                    Err(busy)
                }
                Err(e) => Err(e.into()),
            }
        });
        read.map_or_else(|| own(opened?), Ok)
    }
}

/// Who opens a pool that others have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Comes {
    /// One that lets those go first, for a moment, who come back.
    New,
    /// One that has closed it for others, and comes back.
    Back,
}

/// A pool that was found by its name, once: a command that opens it several times has always the
/// same one, whatever gets its name or its directory meanwhile.
pub(crate) struct Found<'a> {
    pub(super) name: &'a str,
    pub(super) path: PathBuf,
    /// Its identity, since it was open.
    uuid: Option<[u8; 16]>,
}

impl Found<'_> {
    fn open(&mut self, access: Access) -> Result<Pool> {
        let pool = Pool::open(&self.path, OpenOptions { access, ..OpenOptions::default() })?;
        let uuid = pool.props().uuid;
        ensure!(
            *self.uuid.get_or_insert(uuid) == uuid,
            "{} is another pool now: {} was removed meanwhile, and nothing is done to what has its place",
            self.path.display(),
            self.name
        );
        Ok(pool)
    }

    /// Opens it when others have closed it, and tells them that this program waits. `goes_on` is
    /// asked meanwhile, with the time since then, and why it cannot be opened.
    pub(super) fn open_behind(
        &mut self,
        access: Access,
        comes: Comes,
        mut goes_on: impl FnMut(Duration, anyhow::Error) -> Result<()>,
    ) -> Result<Pool> {
        let (start, mut waits) = (Instant::now(), None);
        let returns = self.path.join(Sign::Returns.file());
        loop {
            let yields = comes == Comes::New && start.elapsed() < COURTESY && !holders(&returns).is_empty();
            let opened = if yields { Err(PoolError::Busy(self.path.clone()).into()) } else { self.open(access) };
            let busy = match opened {
                Err(busy) if matches!(busy.downcast_ref(), Some(PoolError::Busy(_))) => busy,
                opened => return opened,
            };
            waits = waits.or_else(|| Sign::Waits.give(&self.path).ok());
            goes_on(start.elapsed(), busy)?;
            std::thread::sleep(RETRY);
        }
    }

    /// Opens it. Waits for programs that store into it or give it to others as long as they do, and
    /// a moment for others.
    pub(crate) fn open_soon(&mut self, access: Access) -> Result<Pool> {
        let (name, path) = (self.name, self.path.clone());
        let (mut until, mut said) = (MOMENT, false);
        self.open_behind(access, Comes::New, |waited, busy| {
            let works = works(&path);
            if waited > PATIENCE && !std::mem::replace(&mut said, true) {
                let used = used_by(name, &busy).unwrap_or_else(|| format!("pool {name} is in use"));
                output::note!("{used}: {}", if works { GIVES } else { "waiting until that ends" });
            }
            if works {
                until = waited + MOMENT;
            }
            if waited > until {
                match checkpoint::serve::list(&path) {
                    Ok(None) => return Err(explain(name, busy)),
                    // It stores checkpoints, or has ended just now.
                    Ok(Some(_)) | Err(ServeError::Broken | ServeError::Failed(_)) => until = waited + MOMENT,
                    Err(e) => return Err(e.into()),
                }
            }
            Ok(())
        })
    }
}

/// Says who has a busy pool open, and what to do.
fn explain(name: &str, error: anyhow::Error) -> anyhow::Error {
    match used_by(name, &error) {
        Some(used) => error.context(format!("{used}; try again when that has ended")),
        None => error,
    }
}

/// Who has a busy pool open.
pub(super) fn used_by(name: &str, error: &anyhow::Error) -> Option<String> {
    let Some(PoolError::Busy(path)) = error.downcast_ref() else { return None };
    #[cfg(test)]
    tests::ASKED.with(|asked| asked.set(asked.get() + 1));
    let pid = holders(path).first().copied();
    Some(format!("pool {name} is used by {}", pid.map_or("another program".into(), named)))
}

/// A process with its command, and what to do if it is stopped.
pub(super) fn named(pid: i32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = words.split(|byte| *byte == 0).take(3).map(String::from_utf8_lossy).collect();
    let stopped =
        if is_stopped(pid) { format!(", which is stopped: `kill -CONT {pid}` lets it go on") } else { String::new() };
    format!("process {pid} ({}){stopped}", words.join(" ").trim())
}

fn is_stopped(pid: i32) -> bool {
    kmem::procfs::is_stopped(pid).unwrap_or(false)
}

/// Whether a program that has a pool open ends, or gives it to others, some time
/// ([`Sign::Works`]).
fn works(path: &Path) -> bool {
    let working = holders(&path.join(Sign::Works.file()));
    !working.is_empty() && holders(path).iter().any(|pid| working.contains(pid) && !is_stopped(*pid))
}

/// The processes that have a lock of this file (`flock(2)`), in ascending order. Those of other PID
/// namespaces are not known.
pub(super) fn holders(path: &Path) -> Vec<i32> {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    std::fs::metadata(path).map(|meta| listed(&locks, meta.dev(), meta.ino())).unwrap_or_default()
}

/// The same of the file with this number, by `/proc/locks`.
fn listed(locks: &str, dev: u64, ino: u64) -> Vec<i32> {
    let file = format!("{:02x}:{:02x}:{ino}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&&*file)).then(|| words[4].parse().ok())?
    };
    let mut all: Vec<i32> = locks.lines().filter_map(of).collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests;
