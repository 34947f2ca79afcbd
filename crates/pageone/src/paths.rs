//! Where the daemon's sockets and the agent's library are.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The directory of the system's daemon.
const SYSTEM: &str = "/run/pageone";

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The directory of this user's own daemon.
pub(crate) fn own_directory() -> PathBuf {
    if uid() == 0 {
        return SYSTEM.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| Path::new(d).is_absolute()) {
        Some(runtime) => Path::new(&runtime).join("pageone"),
        None => format!("/tmp/pageone-{}", uid()).into(),
    }
}

/// The directories where a daemon that serves this user may be, the best first.
pub(crate) fn candidates(dir: Option<PathBuf>) -> Vec<PathBuf> {
    if let Some(dir) = dir {
        return vec![dir];
    }
    let mut all = vec![PathBuf::from(SYSTEM)];
    if own_directory() != all[0] {
        all.push(own_directory());
    }
    all
}

/// Checks that a directory belongs to this user or to root and that no other user can write to it:
/// a directory under /tmp could be anyone's. One that does not exist passes.
///
/// # Errors
///
/// When it is not safe to use.
pub(crate) fn check_owner(dir: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = std::fs::symlink_metadata(dir) else {
        return Ok(());
    };
    if !meta.is_dir() || (meta.uid() != uid() && meta.uid() != 0) || meta.mode() & 0o022 != 0 {
        bail!(
            "{} is not safe to use: it must be a directory of yours (or root's) that no other user can write to",
            dir.display()
        );
    }
    Ok(())
}

/// The library that is loaded into clients: `PAGEONE_AGENT`, else beside this program, else where
/// packages put it.
///
/// # Errors
///
/// When it is in none of these places.
pub(crate) fn agent_library() -> Result<PathBuf> {
    const NAME: &str = "libpageone_agent.so";
    let mut places: Vec<PathBuf> = std::env::var_os("PAGEONE_AGENT").map(PathBuf::from).into_iter().collect();
    if let Ok(program) = std::env::current_exe()
        && let Some(beside) = program.parent()
    {
        places.extend([beside.join(NAME), beside.join("../lib/pageone").join(NAME)]);
    }
    places.extend(["/usr/lib/pageone", "/usr/local/lib/pageone"].map(|d| Path::new(d).join(NAME)));
    for place in &places {
        if let Ok(path) = place.canonicalize() {
            return Ok(path);
        }
    }
    let list: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
    bail!(
        "the agent's library is in none of {}; build it with `cargo build --release -p agent`, or set PAGEONE_AGENT",
        list.join(", ")
    )
}
