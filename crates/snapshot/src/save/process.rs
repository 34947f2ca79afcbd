//! What a guest's process tells of itself.

use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SaveError;
use crate::clone::thread_run_time;
use crate::prepare;
use crate::undo::{Lock, PATIENCE};

/// Time between two looks whether a guest's memory is there.
const LOADING: Duration = Duration::from_millis(20);
/// The name of that thread, which the agent gives it.
const LOADER: &str = "pageone-loader";

/// The words of a process's command line, without its program.
pub(super) fn words_of(pid: i32) -> Result<Vec<String>, SaveError> {
    let words = guests::all_words(Path::new("/"), pid).map_err(|source| SaveError::NoProcess { pid, source })?;
    Ok(words.into_iter().skip(1).collect())
}

/// The socket of a process's QMP monitor.
pub(crate) fn monitor_of(pid: i32) -> Result<Option<PathBuf>, SaveError> {
    let words = words_of(pid)?;
    let directory = std::fs::read_link(format!("/proc/{pid}/cwd"));
    let directory = directory.map_err(|source| SaveError::NoProcess { pid, source })?;
    Ok(prepare::socket(&words).or_else(|| prepare::own_monitor(&words, &directory)))
}

/// Whether the guest's free pages are taken back by an agent: then it has a device that QEMU cannot
/// store, unless that is unplugged.
///
/// # Errors
/// [`SaveError::NoProcess`].
pub fn is_recycled(pid: i32) -> Result<bool, SaveError> {
    words_of(pid).map(|words| prepare::is_recycled(&words))
}

/// Waits until a clone's memory is there, if it is being loaded (`snapshot run --merge`).
///
/// # Errors
/// [`SaveError::Loading`], if the thread that loads it does nothing for this time.
pub fn wait_until_loaded(pid: i32, stuck: Duration) -> Result<(), SaveError> {
    let is_loader =
        |entry: &DirEntry| std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == LOADER);
    let loader = || {
        let all = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        all.flatten().find(is_loader)?.file_name().to_str()?.parse().ok()
    };
    let (mut worked, mut since) = (None, Instant::now());
    while let Some(tid) = loader() {
        let now = thread_run_time(pid, tid).ok();
        if now != worked {
            (worked, since) = (now, Instant::now());
        } else if since.elapsed() > stuck {
            return Err(SaveError::Loading { pid, seconds: stuck.as_secs() });
        }
        std::thread::sleep(LOADING);
    }
    Ok(())
}

/// Waits until a snapshot of the guest that was broken off is put back.
///
/// # Errors
/// If that takes too long, or is not known.
pub fn wait_until_put_back(pid: i32) -> Result<(), SaveError> {
    monitor_of(pid)?.map_or(Ok(()), |socket| Ok(Lock::take(&socket, pid, PATIENCE).map(drop)?))
}

#[cfg(test)]
mod tests;
