//! Pools by their names, and waiting for those that others have open.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use checkpoint::serve::ServeError;
use mpool::{Access, OpenOptions, Pool, PoolError, Registry};

use crate::paths;

/// How long a program that has the pool open may take to serve readers, or to end.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// How long a checkpoint waits for a program that does not store one.
const MOMENT: Duration = Duration::from_secs(10);
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
        let (mut found, mut read) = (self.find(name)?, None);
        let path = found.path.clone();
        let opened = found.open_behind(Access::Shared, |waited, busy| {
            match served(&path) {
                // The other program begins or ends just now.
                Ok(None) | Err(ServeError::Broken) if waited < PATIENCE => Ok(()),
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
        mut goes_on: impl FnMut(Duration, anyhow::Error) -> Result<()>,
    ) -> Result<Pool> {
        let (start, mut waits) = (Instant::now(), None);
        loop {
            let busy = match self.open(access) {
                Err(busy) if matches!(busy.downcast_ref(), Some(PoolError::Busy(_))) => busy,
                opened => return opened,
            };
            waits = waits.or_else(|| Pool::await_turn(&self.path).ok());
            goes_on(start.elapsed(), busy)?;
            std::thread::sleep(RETRY);
        }
    }

    /// Opens it. Waits for programs that store checkpoints in it, as long as they do, and a moment
    /// for others.
    pub(crate) fn open_soon(&mut self, access: Access) -> Result<Pool> {
        let (name, path) = (self.name, self.path.clone());
        let (mut until, mut said) = (MOMENT, false);
        self.open_behind(access, |waited, busy| {
            if waited > PATIENCE && !said {
                output::note!("pool {name} is in use: waiting until the program that has it open ends");
                said = true;
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
    let words = pid.and_then(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok()).unwrap_or_default();
    let words: Vec<_> = words.split(|byte| *byte == 0).take(3).map(String::from_utf8_lossy).collect();
    let who = pid.map_or("another program".into(), |pid| format!("process {pid} ({})", words.join(" ").trim()));
    Some(format!("pool {name} is used by {who}"))
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
