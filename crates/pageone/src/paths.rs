//! Where the daemon's sockets and the agent's library are.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

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

/// What an option names, or else a variable of the environment. The variable is not known to clap,
/// whose usage lines show an option that has one as if it had been typed.
pub(crate) fn named(option: Option<&Path>, variable: &str) -> Option<PathBuf> {
    let value = || std::env::var_os(variable).filter(|value| !value.is_empty());
    option.map(Path::to_owned).or_else(|| value().map(PathBuf::from))
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
/// a directory under /tmp could be anyone's. One that does not exist passes. `option`
/// names it.
pub(crate) fn check_owner(dir: &Path, option: &str) -> Result<()> {
    std::fs::symlink_metadata(dir).map_or(Ok(()), |meta| check(dir, &meta, option))
}

fn check(dir: &Path, meta: &Metadata, option: &str) -> Result<()> {
    let says = "it must be a directory of yours (or root's) that no other user can write to: chmod go-w it, or name \
                another directory with";
    ensure!(meta.is_dir() && is_safe(meta), "{} is not safe to use: {says} {option}", dir.display());
    Ok(())
}

fn is_safe(meta: &Metadata) -> bool {
    (meta.uid() == uid() || meta.uid() == 0) && meta.mode() & 0o022 == 0
}

/// Makes a directory of this user, where it is missing.
fn make_own(dir: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    // Only root's daemon is for other users, too.
    let mode = if uid() == 0 { 0o755 } else { 0o700 };
    let created = std::fs::DirBuilder::new().recursive(true).mode(mode).create(dir);
    created.with_context(|| format!("cannot create {}", dir.display()))
}

/// Opens a file in a directory of this user, to append to; makes both where they are missing.
/// Nothing that another user has put there is followed or written to, at whatever moment.
///
/// # Errors
///
/// When the directory or the file belongs to another user, or can be written by one; when the file
/// is a link.
pub(crate) fn open_own(dir: &Path, name: &str) -> Result<std::fs::File> {
    use rustix::fs::{Mode, OFlags};
    let path = dir.join(name);
    make_own(dir)?;
    let cannot = || format!("cannot write {}", path.display());
    // What is checked is what is used: the name may lead elsewhere a moment later.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(dir, flags, Mode::empty()).with_context(cannot)?;
    let directory = std::fs::File::from(opened);
    check(dir, &directory.metadata().with_context(cannot)?, "--dir")?;
    let flags = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&directory, name, flags, Mode::RUSR | Mode::WUSR).with_context(cannot)?;
    let file = std::fs::File::from(file);
    let meta = file.metadata().with_context(cannot)?;
    if !is_safe(&meta) || !meta.is_file() || meta.nlink() != 1 {
        bail!("{} is not safe to write: it must be a file of yours, with one name; remove it", path.display());
    }
    Ok(file)
}

/// The library by which QEMU is loaded once for many clones, which stands beside the agent's.
pub(crate) fn template_library() -> Option<PathBuf> {
    let path = agent_library().ok()?.with_file_name("libpageone_template.so");
    path.is_file().then_some(path)
}

/// Where it is noted what this user's commands stop: in the directory of the sockets, if it is the
/// user's.
fn notes(dir: Option<&Path>) -> Result<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let is_own = |dir: &&Path| std::fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid());
    let dir = dir.filter(is_own).map_or_else(own_directory, Path::to_owned);
    check_owner(&dir, "--dir")?;
    Ok(dir.join("stopped"))
}

/// The words that start a guard.
fn guard_words() -> Result<[std::ffi::OsString; 2]> {
    Ok([std::env::current_exe().context("cannot find this program")?.into(), "guard".into()])
}

/// A process that lets go on what this command is about to stop.
pub(crate) fn guard(dir: Option<&Path>) -> Result<guard::Guard> {
    let mut guard = guard::Guard::start(&guard_words()?)?;
    let noted = notes(dir).and_then(|notes| {
        make_own(notes.parent().unwrap_or(Path::new("/")))?;
        Ok(guard.note_in(&notes)?)
    });
    if let Err(error) = noted {
        output::note!(
            "{error:#}: if this command and its guard are both killed (kill -9) while a guest stands, no later command \
             lets it go on"
        );
    }
    Ok(guard)
}

/// Puts back what commands have left that were killed together with their guards, and says so.
pub(crate) fn mend(dir: Option<&Path>) {
    let Some((notes, words)) = notes(dir).ok().zip(guard_words().ok()) else { return };
    for (pid, mended) in guard::mend(&words, &notes, &snapshot::lock_of, &snapshot::end) {
        let outcome = match mended {
            Ok(true) => "it is put back, and goes on if it ran".into(),
            Ok(false) => "it is being put back".into(),
            Err(error) => format!("{:#}", anyhow::Error::from(error)),
        };
        output::note!("process {pid} was left by a command that was killed together with its guard: {outcome}");
    }
}

/// The library that is loaded into clients: `PAGEONE_AGENT`, else beside this program, else where
/// packages put it.
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_log_is_only_written_where_nobody_else_can_have_put_it() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        let file = open_own(&own, "log").unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(open_own(&own, "log").is_ok(), "again");
        let target = dir.path().join("target");
        std::fs::write(&target, "").unwrap();
        symlink(&target, own.join("link")).unwrap();
        let error = |dir: &Path, name: &str| format!("{:#}", open_own(dir, name).unwrap_err());
        assert!(error(&own, "link").starts_with("cannot write "), "a link to a file");
        std::fs::hard_link(&target, own.join("second")).unwrap();
        assert!(error(&own, "second").contains("is not safe to write: it must be a file of yours"), "a second name");
        symlink(&own, dir.path().join("elsewhere")).unwrap();
        assert!(error(&dir.path().join("elsewhere"), "log").starts_with("cannot write "), "a link to a directory");
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(
            error(&own, "log").contains("is not safe to use: it must be a directory of yours"),
            "anybody can write"
        );
        assert!(check_owner(&own, "--files").unwrap_err().to_string().ends_with("directory with --files"));
        assert_eq!(std::fs::read(&target).unwrap(), b"");
    }
}
