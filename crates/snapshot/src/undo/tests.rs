use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::disks::Running;

#[test]
fn a_lock_that_an_earlier_version_made_as_root_is_taken() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root has guests of others");
    }
    let nobody = Account { uid: 65534, gid: 65534, groups: Vec::new(), capabilities: 0 };
    let dir = tempfile::tempdir().unwrap();
    let (socket, lock) = (dir.path().join("1.qmp"), dir.path().join("1.qmp.lock"));
    std::fs::write(&lock, "").unwrap();
    std::fs::set_permissions(&lock, PermissionsExt::from_mode(0o600)).unwrap();
    chown(dir.path(), Some(65534), None).unwrap();
    let mut command = Command::new("sleep");
    nobody.start(command.arg("600"));
    let mut guest = command.spawn().unwrap();
    let pid = guest.id() as i32;
    let take = || Lock::take(&socket, pid, &nobody, Duration::ZERO);
    let (first, second) = (take(), take().map(drop));
    // A link of the tenant's to a file of root's is none.
    std::fs::rename(&lock, dir.path().join("other")).unwrap();
    std::os::unix::fs::symlink("other", &lock).unwrap();
    let linked = take().map(drop);
    guest.kill().unwrap();
    guest.wait().unwrap();
    assert!(first.is_ok() && matches!(second, Err(UndoError::Busy(_))) && matches!(linked, Err(UndoError::Lock(_))));
}

#[test]
fn a_guest_that_is_being_put_back_is_not_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("1.qmp");
    let own = Account::of(std::process::id()).unwrap();
    let take = |limit| Lock::take(&socket, 1, &own, limit);
    let lock = take(Duration::ZERO).unwrap();
    let task = Task { socket: socket.clone(), pid: 1, ran: false, bandwidth: 0, overlays: Vec::new(), downtime: None };
    let guard = Guard::thread();
    task.watch(&guard, &crate::fake::qemu(|_| json!({})), &lock, None).unwrap();
    drop(lock);
    let error = take(Duration::from_millis(100)).map(drop).unwrap_err();
    assert!(error.to_string().starts_with("another snapshot of process 1 is being taken"), "{error}");
    guard.done();
    assert!(take(PATIENCE).is_ok());
}

/// The guest runs only while its disk's name is that of the image that it writes to. QEMU is
/// told to open files only while each has the name by which QEMU knows it.
#[test]
fn a_disk_has_its_name_before_its_guest_goes_on_and_the_base_has_it_while_qemu_opens_it() {
    let dir = tempfile::tempdir().unwrap();
    let live = dir.path().join("disk.qcow2");
    crate::qcow2::create(&live, 1 << 20, None, 0o600).unwrap();
    let disk = Running::of_device("d0", &live);
    let overlay = disk.overlay("one");
    disk.make(&overlay, &Account::of(std::process::id()).unwrap()).unwrap();
    let (socket, overlays) = (dir.path().join("none"), vec![overlay.clone()]);
    let task = Task { socket, pid: 1, ran: true, bandwidth: 0, overlays, downtime: None };
    let (runs, jobs, seen) = (AtomicBool::new(false), AtomicUsize::new(0), Arc::new(Mutex::new(Vec::new())));
    let (node, all, stored) = (overlay.writes_by().to_owned(), seen.clone(), overlay.stored().to_owned());
    let qmp = &mut crate::fake::qemu(move |command| {
        let inode = |name: &Path| std::fs::metadata(name).map(|meta| meta.ino()).ok();
        all.lock().unwrap().push((command.to_owned(), inode(&live) == inode(&stored)));
        match command {
            "cont" | "stop" => runs.store(command == "cont", Ordering::Relaxed),
            // There is one from its beginning to its end.
            "block-commit" => jobs.store(1, Ordering::Relaxed),
            "block-job-complete" => jobs.store(0, Ordering::Relaxed),
            _ => {}
        }
        let job = json!({ "device": "pageone-undo", "ready": true });
        match command {
            "query-status" => json!({ "status": if runs.load(Ordering::Relaxed) { "running" } else { "paused" } }),
            "query-block" => json!([{ "device": "d0", "inserted": { "node-name": node } }]),
            "query-block-jobs" => json!(vec![job; jobs.load(Ordering::Relaxed)]),
            "query-named-block-nodes" => json!([]),
            _ => json!({}),
        }
    });
    // As the command was killed when QEMU had opened the new image.
    task.undo(qmp, &Guard::thread()).unwrap();
    let when = |name: &str| -> Vec<bool> {
        let seen = seen.lock().unwrap();
        seen.iter().filter(|(command, _)| command == name).map(|(_, is_base)| *is_base).collect()
    };
    assert_eq!(when("cont"), [false, true], "at once, and when all is in the base");
    assert_eq!((when("block-commit"), when("block-job-complete")), (vec![true], vec![true]));
    assert_eq!(when("stop"), [false], "while it is committed the live image has the name");
    let left = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["disk.qcow2"]);
}
