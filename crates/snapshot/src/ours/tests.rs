//! Whose files are.

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
