//! What only root and the caller can change, and files beside those of others.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kmem::account::Account;
use rustix::io::Errno;

/// Permissions of groups and of all to write, and the one by which only owners remove files.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// Links that are followed, as the kernel does.
const MOST_LINKS: usize = 40;

fn is_owned_by_others(meta: &Metadata) -> bool {
    meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw()
}

/// Whether others than root and the caller own a file, or may write to it.
fn is_foreign(meta: &Metadata) -> bool {
    is_owned_by_others(meta) || meta.mode() & OTHERS_WRITE != 0
}

/// What others than root and the caller can change, of this file and of all directories and links
/// on the way to it. If nothing, its name leads to it as long as these two want.
pub(crate) fn foreign(path: &Path) -> io::Result<Option<PathBuf>> {
    let parts = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let (mut rest, mut at, mut links) = (parts(&std::path::absolute(path)?), PathBuf::from("/"), 0);
    while let Some(next) = rest.pop() {
        if next == ".." {
            at.pop();
            continue;
        }
        let here = at.join(next);
        let meta = std::fs::symlink_metadata(&here)?;
        // In such a directory, as /tmp, what belongs to root and the caller stays.
        let stays = !rest.is_empty() && meta.mode() & STICKY != 0 && meta.uid() == 0;
        let is_link = meta.is_symlink();
        // A link has no permissions of its own.
        if if is_link { is_owned_by_others(&meta) } else { !stays && is_foreign(&meta) } {
            return Ok(Some(here));
        }
        if !is_link {
            at = here;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        rest.extend(parts(&at.join(std::fs::read_link(&here)?)));
        at = "/".into();
    }
    Ok(None)
}

/// Makes a file beside another one, which an account has: as that account would, so that no link of
/// its leads root elsewhere. Where it may not, as the caller, if only that and root can change the
/// directory.
pub(crate) fn make_beside<T: Send>(
    file: &Path,
    account: &Account,
    make: impl Fn() -> io::Result<T> + Sync,
) -> io::Result<T> {
    let is_ours = || matches!(foreign(file.parent().unwrap_or(Path::new("."))), Ok(None));
    match account.with_files(&make) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_ours() => make(),
        made => made,
    }
}

/// What others can change of a pool's directory and what is in it.
pub(crate) fn foreign_pool(directory: &Path) -> io::Result<Option<PathBuf>> {
    if let Some(what) = foreign(directory)? {
        return Ok(Some(what));
    }
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        match entry.metadata() {
            Ok(meta) if is_foreign(&meta) => return Ok(Some(entry.path())),
            // A lease, for example, goes with its reader.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
