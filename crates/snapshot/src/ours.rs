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
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const NOBODY: u32 = 65534;

    fn allow(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// `None`: only root can give files away.
    fn place() -> Option<tempfile::TempDir> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: only root can give files away");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        allow(dir.path(), 0o711);
        Some(dir)
    }

    #[test]
    fn a_name_is_ours_if_all_on_the_way_to_it_is() {
        let Some(dir) = place() else { return };
        let (links, inner) = (dir.path().join("links"), dir.path().join("links/inner"));
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join("file"), "").unwrap();
        allow(&inner.join("file"), 0o644);
        assert_eq!(foreign(&inner.join("file")).unwrap(), None);
        symlink("links/inner/../inner", dir.path().join("link")).unwrap();
        symlink("ring", dir.path().join("ring")).unwrap();
        assert_eq!(foreign(&dir.path().join("link/file")).unwrap(), None);
        assert!(foreign(&dir.path().join("ring")).is_err());
        chown(&links, Some(NOBODY), None).unwrap();
        assert_eq!(foreign(&inner.join("file")).unwrap(), Some(links.clone()));
        assert_eq!(foreign(&dir.path().join("link/file")).unwrap(), Some(links));
    }

    #[test]
    fn a_file_beside_anothers_is_made_with_its_rights() {
        let Some(dir) = place() else { return };
        let (theirs, ours) = (dir.path().join("theirs"), dir.path().join("ours"));
        for path in [&theirs, &ours] {
            std::fs::create_dir(path).unwrap();
        }
        chown(&theirs, Some(NOBODY), None).unwrap();
        let nobody = Account { uid: NOBODY, gid: NOBODY, groups: Vec::new(), capabilities: 0 };
        let make = |path: PathBuf| {
            make_beside(&path, &nobody, || std::fs::write(&path, "")).map(|()| std::fs::metadata(&path).unwrap().uid())
        };
        assert_eq!((make(theirs.join("one")).unwrap(), make(ours.join("one")).unwrap()), (NOBODY, 0));
        // Through a link of theirs root would write where they may not.
        symlink(&ours, theirs.join("link")).unwrap();
        assert!(make(theirs.join("link/two")).is_err());
        symlink(ours.join("three"), theirs.join("three")).unwrap();
        assert!(make(theirs.join("three")).is_err() && !ours.join("three").exists());
    }
}
