use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::FileType;

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
    // Nor is a FIFO of its, which would be waited for.
    std::fs::remove_file(&lock).unwrap();
    rustix::fs::mknodat(CWD, &lock, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    chown(&lock, Some(65534), None).unwrap();
    let fifo = take().map(drop);
    guest.kill().unwrap();
    guest.wait().unwrap();
    assert!(first.is_ok() && matches!(second, Err(UndoError::Busy(_))) && matches!(linked, Err(UndoError::Lock(_))));
    assert!(matches!(fifo, Err(UndoError::Lock(_))));
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

/// A guest with an image over its disk, as its command was killed when QEMU had opened that.
struct Covered {
    dir: tempfile::TempDir,
    live: PathBuf,
    overlay: Overlay,
    task: Task,
    /// How many jobs QEMU has: there is one from its beginning to its end.
    jobs: Arc<AtomicUsize>,
    /// Each command that QEMU was told, and whether the disk's name was the base's then.
    told: Arc<Mutex<Vec<(String, bool)>>>,
}

impl Covered {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let live = dir.path().join("disk.qcow2");
        crate::qcow2::create(&live, 1 << 20, None, 0o600).unwrap();
        let disk = Running::of_device("d0", &live);
        let mut overlay = disk.overlay("one", &[]);
        disk.make(&mut overlay, &Account::of(std::process::id()).unwrap()).unwrap();
        let (socket, overlays) = (dir.path().join("none"), vec![overlay.clone()]);
        let task = Task { socket, pid: 1, ran: true, bandwidth: 0, overlays, downtime: None };
        Self { dir, live, overlay, task, jobs: Arc::default(), told: Arc::default() }
    }

    /// QEMU. `commits`: whether it can; `full`: whether the guest stands at its first write to the
    /// image.
    fn qemu(&self, commits: bool, full: bool) -> Monitor {
        let (runs, jobs, node) = (AtomicBool::new(false), self.jobs.clone(), self.overlay.writes_by().to_owned());
        let (told, live, has_image) = (self.told.clone(), self.live.clone(), AtomicBool::new(true));
        let inode = |name: &Path| std::fs::metadata(name).unwrap().ino();
        let base = inode(self.overlay.stored());
        crate::fake::qemu(move |command| {
            told.lock().unwrap().push((command.to_owned(), inode(&live) == base));
            let writes_there = has_image.load(Ordering::Relaxed);
            match command {
                "cont" | "stop" => runs.store(command == "cont" && !(full && writes_there), Ordering::Relaxed),
                "block-commit" => jobs.store(1, Ordering::Relaxed),
                "block-job-complete" => {
                    jobs.store(0, Ordering::Relaxed);
                    has_image.store(!commits, Ordering::Relaxed);
                }
                _ => {}
            }
            let (job, node) = (json!({ "device": node, "ready": true }), json!({ "node-name": node }));
            match command {
                "query-status" if runs.load(Ordering::Relaxed) => json!({ "status": "running" }),
                "query-status" => json!({ "status": if full && writes_there { "io-error" } else { "paused" } }),
                "query-block" if writes_there => json!([{ "device": "d0", "inserted": node }]),
                "query-block-jobs" => json!(vec![job; jobs.load(Ordering::Relaxed)]),
                // A long chain's is longer than a message may be.
                "query-named-block-nodes" => json!("x".repeat(64 << 20)),
                _ => json!([]),
            }
        })
    }

    /// Whether the disk's name was the base's, each time that QEMU was told this.
    fn when(&self, name: &str) -> Vec<bool> {
        let told = self.told.lock().unwrap();
        told.iter().filter(|(command, _)| command == name).map(|(_, is_base)| *is_base).collect()
    }

    fn files(&self) -> Vec<std::ffi::OsString> {
        std::fs::read_dir(self.dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect()
    }
}

/// The guest runs only while its disk's name is that of the image that it writes to. QEMU is
/// told to open files only while each has the name by which QEMU knows it.
#[test]
fn a_disk_has_its_name_before_its_guest_goes_on_and_the_base_has_it_while_qemu_opens_it() {
    let guest = Covered::new();
    guest.task.undo(&mut guest.qemu(true, false), &Guard::thread()).unwrap();
    assert_eq!(guest.when("cont"), [false, true], "at once, and when all is in the base");
    assert_eq!((guest.when("block-commit"), guest.when("block-job-complete")), (vec![true], vec![true]));
    assert_eq!(guest.when("stop"), [false], "while it is committed the live image has the name");
    assert_eq!(guest.when("closefd").len(), 1, "nobody waits for a stream that never begins");
    assert_eq!(guest.files(), ["disk.qcow2"]);
}

/// A job that fails is gone, as one that has ended.
#[test]
fn what_qemu_did_not_put_back_is_not_taken_for_put_back() {
    let guest = Covered::new();
    let error = guest.task.undo(&mut guest.qemu(false, false), &Guard::thread()).unwrap_err();
    assert!(matches!(error, MonitorError::NotPutBack(_)), "{error}");
    assert!(error.to_string().starts_with("QEMU did not put back what was written to disk d0, whose"), "{error}");
    assert_eq!(guest.when("cont"), [false, false], "the disk's name is the image's that the guest writes to");
    assert!(guest.overlay.stored().exists());
    // The next try.
    guest.task.undo(&mut guest.qemu(true, false), &Guard::thread()).unwrap();
    assert_eq!(guest.files(), ["disk.qcow2"]);
}

#[test]
fn a_guest_whose_disk_is_full_goes_on_when_what_it_wrote_is_put_back() {
    let guest = Covered::new();
    let mut qmp = guest.qemu(true, true);
    guest.task.cancel(&mut qmp).unwrap();
    guest.task.undo_settings(&mut qmp, &|_| {}).unwrap();
    assert_eq!(qmp.state().unwrap(), "running");
    assert_eq!(guest.files(), ["disk.qcow2"]);
}

/// Whoever had told QEMU to end it was killed: QEMU ends it when it comes to it.
#[test]
fn a_job_that_ends_gives_the_base_its_name_before_the_guest_goes_on() {
    let guest = Covered::new();
    guest.jobs.store(1, Ordering::Relaxed);
    guest.task.go_on(&mut guest.qemu(true, false)).unwrap();
    assert_eq!(guest.when("cont"), [true]);
    assert_eq!(guest.files(), ["disk.qcow2"]);
}

/// QEMU ends while it has the base's name open: when it begins a commit, and when it ends one. The
/// guard sees it, or was killed, too. Nobody has an image that was used since.
#[test]
fn a_disk_has_all_that_was_written_when_qemu_ends_while_it_is_put_back() {
    let all =
        [(true, false, false), (false, false, false), (true, true, false), (false, true, false), (true, true, true)];
    for (was_written, is_late, is_used) in all {
        let guest = Covered::new();
        let names = std::fs::read_dir(guest.dir.path()).unwrap().flatten();
        let image = names.map(|entry| entry.path()).find(|path| *path == guest.overlay.image).unwrap();
        let inode = |name: &Path| std::fs::metadata(name).unwrap().ino();
        let (base, new) = (inode(&guest.live), inode(&image));
        if was_written {
            // A word of its table.
            let image = File::options().write(true).open(image).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&image, &[1], 3 << 16).unwrap();
        }
        std::fs::set_permissions(guest.overlay.stored(), PermissionsExt::from_mode(0o400)).unwrap();
        if is_used {
            let later = std::time::SystemTime::now() + PATIENCE;
            File::open(&guest.live).unwrap().set_modified(later).unwrap();
        }
        let task = serde_json::to_value(&guest.task).unwrap();
        if is_late {
            end(&task)
        } else {
            assert!(put_back(&task, &|| true))
        }
        assert_eq!(inode(&guest.live), if was_written && !is_used { new } else { base });
        assert_eq!(guest.overlay.stored().exists(), was_written, "an image that has nothing goes");
        assert!(is_used || std::fs::metadata(&guest.live).unwrap().mode() & 0o777 == 0o600);
    }
}
