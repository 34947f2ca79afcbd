use super::*;

#[test]
fn what_cannot_be_removed_is_said_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join("pageone-trial-1");
    assert_eq!(remove(&left), None, "it is gone");
    std::fs::create_dir_all(left.join("files")).unwrap();
    let (source, mounted) = (dir.path().join("other"), left.join("files"));
    std::fs::create_dir(&source).unwrap();
    if let Err(error) = rustix::mount::mount_bind(&source, &mounted) {
        return println!("SKIPPED: nothing can be mounted here: {error}");
    }
    let said = remove(&left);
    rustix::mount::unmount(&mounted, rustix::mount::UnmountFlags::DETACH).unwrap();
    let said = said.unwrap();
    assert!(said.starts_with(&format!("{}, of a clone that was tried, cannot be removed (", left.display())), "{said}");
    assert_eq!(remove(&left), None);
}

#[test]
fn what_a_killed_process_left_is_swept_and_what_is_used_or_anothers_stays() {
    let dir = tempfile::tempdir().unwrap();
    let there = |path: &Path| path.symlink_metadata().is_ok();
    let left = dir.path().join("pageone-trial-1");
    std::fs::create_dir_all(left.join("files/more")).unwrap();
    std::fs::write(dir.path().join("pageone-trial-2"), "a file").unwrap();
    std::os::unix::fs::symlink("/", dir.path().join("pageone-trial-3")).unwrap();
    let others = dir.path().join("pageone-trial-4");
    std::fs::create_dir(&others).unwrap();
    let is_root = std::os::unix::fs::chown(&others, Some(65_534), None).is_ok();
    let used = Passing::new(dir.path()).unwrap();
    assert!(!there(&left));
    std::fs::create_dir(used.inner("files")).unwrap();
    let next = Passing::new(dir.path()).unwrap();
    assert!(there(&used.inner("files")) && there(&next.path) && there(&others) == is_root);
    assert_eq!(used.path.metadata().unwrap().mode() & 0o777, 0o711);
    drop((used, next));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2 + usize::from(is_root));
}

#[test]
fn a_program_begins_where_its_account_can_go() {
    let dir = tempfile::tempdir().unwrap();
    let (open, mut command) = (dir.path().join("open"), Command::new("pwd"));
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let nobody = Account { uid: 65_534, gid: 65_534, groups: vec![], capabilities: 0 };
    let _place = begin_in(&mut command, &nobody, &[&open, Path::new("/")]).unwrap();
    assert_eq!(command.output().unwrap().stdout == b"/\n", rustix::process::geteuid().is_root());
}
