//! What is refused, and why; and failures before a guest is stopped.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use checkpoint::test::Memory;
use checkpoint::{Catalog, Changes, Store};
use mpool::Pool;

use super::*;
use crate::fake;

/// A guest whose QEMU answers questions about these things as given, and all others with
/// nothing.
fn guest(answers: &'static [(&str, &str)]) -> Result<Guest, SaveError> {
    let qmp = fake::qemu(move |asked| answer(answers, asked));
    let (program, directory) = ("/usr/bin/qemu-system-x86_64".into(), "/".into());
    let description = Description { program, directory, ..Description::default() };
    Guest::ask(1, lock(), qmp, "/nonexistent/guest.qmp".into(), description)
}

pub(super) fn answer(answers: &[(&str, &str)], asked: &str) -> Value {
    let text = answers.iter().find(|(name, _)| *name == asked).map_or("{}", |(_, text)| text);
    serde_json::from_str(text).unwrap()
}

pub(super) fn lock() -> Lock {
    let dir = tempfile::tempdir().unwrap();
    let own = Account::of(std::process::id()).unwrap();
    Lock::take(&dir.path().join("guest.qmp"), 1, &own, crate::undo::PATIENCE).unwrap()
}

pub(super) const RUNS: &[(&str, &str)] = &[
    ("human-monitor-command", "\"Host virtual address for 0x0 (ram) is 0x7f0000000000\""),
    ("query-status", "{ \"status\": \"paused\" }"),
];

fn refused(guest: Result<Guest, SaveError>) -> SaveError {
    guest.map(drop).unwrap_err()
}

/// A shell that is called as QEMU is, in a directory that all may enter.
fn shell() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let qemu = dir.path().join("qemu-system-x86_64");
    // A child of another test may have open what this process writes: then it cannot be run.
    assert!(Command::new("cp").arg("/bin/sh").arg(&qemu).status().unwrap().success());
    (dir, qemu)
}

/// A shell that has stopped itself, with a monitor in its words on which nobody listens, of this
/// user's; what is said of it when it is to be stored.
fn stored_while_it_is_stopped(qemu: &Path, socket: &Path, user: u32) -> SaveError {
    let mut command = Command::new(qemu);
    command.args(["-p", "-c", "kill -STOP $$", "-qmp"]).arg(format!("unix:{},server=on", socket.display()));
    let mut stopped = command.uid(user).gid(user).spawn().unwrap();
    let pid = stopped.id() as i32;
    while !kmem::procfs::is_stopped(pid).unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = refused(Guest::open(pid));
    stopped.kill().unwrap();
    stopped.wait().unwrap();
    error
}

/// A tenant starts it; it has root's rights, and the tenant's words.
#[test]
fn a_setuid_program_is_no_guest_and_nothing_is_made_where_its_words_say() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root can make a program setuid root");
    }
    let (dir, qemu) = shell();
    let socket = dir.path().join("any");
    for mode in [0o4755, 0o2755] {
        std::fs::set_permissions(&qemu, PermissionsExt::from_mode(mode)).unwrap();
        let error = stored_while_it_is_stopped(&qemu, &socket, 65_534);
        let SaveError::Accounts { source, .. } = &error else { panic!("{error}") };
        assert!(source.to_string().starts_with("it has more than one user or group ("), "{source}");
    }
    // Anybody's program that does not listen there.
    std::fs::set_permissions(&qemu, PermissionsExt::from_mode(0o755)).unwrap();
    let error = stored_while_it_is_stopped(&qemu, &socket, 65_534);
    assert!(matches!(error, SaveError::Qmp(MonitorError::Connect { .. })), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made");
}

#[test]
fn a_process_that_becomes_another_program_is_refused() {
    let (_dir, qemu) = shell();
    let mut command = Command::new(&qemu);
    command.args(["-c", "read line; exec \"$0\" -c 'read line; true' other"]).arg(&qemu).stdin(Stdio::piped());
    let mut shell = command.spawn().unwrap();
    let seen = Seen::of(shell.id() as i32).unwrap();
    seen.look_again().unwrap();
    shell.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let start = Instant::now();
    let error = loop {
        match seen.look_again() {
            Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "it is not seen"),
            Err(error) => break error,
        }
    };
    drop(shell.stdin.take());
    shell.wait().unwrap();
    assert!(matches!(error, SaveError::Another(_)), "{error}");
}

/// As if a tenant's process listened, and then started a program of root's.
#[test]
fn a_monitor_that_another_user_began_to_listen_on_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root can become another user");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let (socket, nobody) = (dir.path().join("qmp"), rustix::fs::Uid::from_raw(65_534));
    let listen = || {
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        UnixListener::bind(&socket).unwrap()
    };
    let _listener = std::thread::scope(|scope| scope.spawn(listen).join().unwrap());
    let (pid, words) = (std::process::id(), vec!["-qmp".into(), format!("unix:{}", socket.display())]);
    let source = crate::record::Source::of(pid).unwrap();
    let seen = Seen { pid: pid as i32, source, program: "/q".into(), directory: "/".into(), words };
    let error = seen.connect(&socket).map(drop).unwrap_err();
    assert!(matches!(error, SaveError::Another(_)), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made");
}

#[test]
fn a_process_that_is_no_prepared_guest_is_refused() {
    let error = refused(Guest::open(i32::MAX));
    assert!(matches!(error, SaveError::NoProcess { .. }), "{error}");
    assert!(error.to_string().contains("or not one whose command line may be read: name a guest"), "{error}");
    let error = refused(Guest::open(std::process::id() as i32));
    assert!(matches!(error, SaveError::NotQemu { .. }), "{error}");
    assert!(error.to_string().contains(", which is no QEMU: name the guest's own process"), "{error}");
    let (_dir, qemu) = shell();
    let mut plain = Command::new(&qemu).args(["-c", "read line; true"]).stdin(Stdio::piped()).spawn().unwrap();
    let error = refused(Guest::open(plain.id() as i32));
    drop(plain.stdin.take());
    plain.wait().unwrap();
    assert!(matches!(error, SaveError::Unprepared(_)), "{error}");
    assert!(error.to_string().contains("was not prepared, and its command line names no socket of QMP"), "{error}");
    // The shell has the words of a guest with a descriptor that it was given.
    let mut command = Command::new(&qemu);
    command.args(["-c", "echo ready; read line; true", "sh", "-chardev"]);
    command.arg(format!("socket,id={},path=/nonexistent/guest.qmp", prepare::MONITOR));
    command.args(["-netdev", "tap,id=n,fd=3"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = command.spawn().unwrap();
    // Before its first word the words may not be there yet.
    shell.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let error = refused(Guest::open(shell.id() as i32));
    drop(shell.stdin.take());
    shell.wait().unwrap();
    assert!(matches!(error, SaveError::Descriptor(_)), "{error}");
    assert!(error.to_string().starts_with("-netdev tap,id=n,fd=3: a clone would not have this"), "{error}");
}

#[test]
fn what_qemu_says_is_in_the_way_is_said() {
    let error = refused(guest(&[("query-migrate", "{ \"blocked-reasons\": [\"one\", \"two\"] }")]));
    assert!(matches!(error, SaveError::Blocked(_)), "{error}");
    assert!(error.to_string().starts_with("this guest cannot be stored, QEMU says: one; two;"), "{error}");
    let error = refused(guest(&[("human-monitor-command", "\"No memory is mapped at address 0x0\"")]));
    assert!(matches!(error, SaveError::Ram), "{error}");
    assert_eq!(
        error.to_string(),
        "QEMU does not say where the guest's RAM is: has the guest started? Wait until \
                                   it has, and try again"
    );
    let disks = vec![Running::of_device("d0", Path::new("/d"))];
    let error = Guest { disks, ..guest(RUNS).unwrap() }.cover(&[]).unwrap_err();
    assert!(matches!(error, SaveError::Disk(DiskError::Changed)), "its disk is gone: {error}");
}

struct NoDaemon;

impl Frozen for NoDaemon {
    fn is_held(&self) -> bool {
        false
    }

    fn changes(&self) -> Option<Changes<'_>> {
        None
    }

    fn lasted(&self) -> Result<bool, Box<dyn Error + Send + Sync>> {
        Ok(true)
    }
}

#[test]
fn without_a_guard_a_guest_is_not_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    // A process that has memory to store.
    let memory = vec![1_u8; 32 << 20];
    let mut source = Source::open(std::process::id() as i32).unwrap();
    let guard = &Guard::start(&["true".into()]).unwrap();
    let ram = checkpoint::Options { stop: false, full: false, max_pause: Duration::ZERO, guard };
    let options = Options { name: "one".into(), ram };
    let (writer, phases) = (store.begin("one").unwrap(), &mut Phases::new());
    let saved = guest(RUNS).unwrap().save(&options, &mut source, &NoDaemon, writer, phases, &mut |_| {});
    let error = saved.map(drop).unwrap_err();
    assert!(matches!(error, SaveError::Undo(UndoError::Guard(_))), "{error}");
    assert_eq!(error.to_string(), "the guard did not start");
    assert!(memory.iter().all(|byte| *byte == 1) && store.view().checkpoints().is_empty());
}

#[test]
fn without_a_pipe_there_is_no_device_stream() {
    let test = || {
        let mut guest = guest(RUNS).unwrap();
        let (socket, name, stream) = ("/nonexistent/guest.qmp".into(), "one".into(), None);
        let task = Task { socket, pid: i32::MAX, ran: false, bandwidth: 0, overlays: Vec::new(), downtime: None };
        let mut pausing = Pausing { guest: &mut guest, guard: &Guard::thread(), task, name, halts: 0, stream };
        kmem::testing::refuse(libc::SYS_pipe2, None, libc::EMFILE);
        pausing.try_halt().unwrap_err()
    };
    // The kernel refuses this thread pipes from then on.
    let error = std::thread::scope(|scope| scope.spawn(test).join().unwrap());
    assert!(matches!(error, SaveError::Stream(_)), "{error}");
    assert_eq!(error.to_string(), "cannot read the device stream");
}

/// It would put back the images of a stored snapshot if the command were killed then.
#[test]
fn nothing_is_stored_while_the_guard_does_not_know_that_the_images_stay() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = store.begin("one").unwrap();
    writer.set_pages(1);
    let (socket, pid) = ("/nonexistent/guest.qmp".into(), std::process::id() as i32);
    let task = Task { socket, pid, ran: false, bandwidth: 0, overlays: Vec::new(), downtime: None };
    let guest = Guest { qmp: fake::qemu(|_| json!({})), ..guest(RUNS).unwrap() };
    let (taken, guard) = (Ok((Taken::default(), Vec::new())), Guard::start(&["true".into()]).unwrap());
    let saved = guest.finish(taken, task, &guard, writer, vec![(0, 4096)], &mut |_| {});
    let error = saved.map(drop).unwrap_err();
    assert!(matches!(error, SaveError::Undo(UndoError::Guard(_))), "{error}");
    assert!(store.view().checkpoints().is_empty());
}

/// A guest is put back when its snapshot is known not to be there, and only then.
#[test]
fn a_guest_whose_snapshot_may_be_there_keeps_the_images_over_its_disks() {
    let outcome = |fails: Option<(u64, bool)>| {
        let memory = Memory::default();
        let pool = Pool::create_on(Arc::new(memory.clone()), Path::new("/pool"), "test").unwrap();
        let store = Store::new(Catalog::open(&pool).unwrap());
        let mut writer = store.begin("one").unwrap();
        writer.set_pages(1);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let qmp = fake::qemu({
            let asked = asked.clone();
            move |command| {
                asked.lock().unwrap().push(command.to_owned());
                json!({})
            }
        });
        let guest = Guest { qmp, ..guest(RUNS).unwrap() };
        let (socket, overlays) = ("/nonexistent/guest.qmp".into(), Vec::new());
        let task = Task { socket, pid: i32::MAX, ran: false, bandwidth: 0, overlays, downtime: None };
        let before = memory.changes();
        if let Some((change, made)) = fails {
            memory.fail(before + change..u64::MAX, made);
        }
        let taken = Ok((Taken::default(), Vec::new()));
        let saved = guest.finish(taken, task, &Guard::thread(), writer, vec![(0, 4096)], &mut |_| {});
        let undone = asked.lock().unwrap().iter().any(|command| command == "migrate-set-parameters");
        let changes = memory.changes() - before;
        drop(store);
        drop(pool);
        let pool = Pool::open_on(Arc::new(memory.copy()), Path::new("/pool"), mpool::OpenOptions::default()).unwrap();
        let there = Catalog::open(&pool).unwrap().find("one").is_ok();
        match saved {
            Ok(_) => assert!(there && !undone, "{fails:?}"),
            Err(error) if error.is_unknown() => assert!(!undone, "{fails:?}: {error}"),
            Err(error) => assert!(!there && undone, "{fails:?}: {error}"),
        }
        (changes, there && !undone)
    };
    let (changes, _) = outcome(None);
    let kept =
        (0..changes).flat_map(|change| [(change, false), (change, true)]).filter(|fails| outcome(Some(*fails)).1);
    assert!(kept.count() > 0, "some are there though their writes failed");
}

/// Whoever has another monitor may stop it, and let it go on, while it is stored.
#[test]
fn a_guest_goes_on_after_a_halt_if_it_ran_before_that() {
    let outcome = |state: &'static str| {
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = told.clone();
        let qmp = fake::qemu(move |asked| {
            heard.lock().unwrap().push(asked.to_owned());
            match asked {
                "query-status" => json!({ "status": state }),
                "query-migrate" => json!({ "status": "completed" }),
                _ => json!({}),
            }
        });
        let mut guest = Guest { qmp, ..guest(RUNS).unwrap() };
        let (socket, pid, name) = ("/nonexistent/guest.qmp".into(), std::process::id() as i32, "one".into());
        let ran = state == "paused";
        let task = Task { socket, pid, ran, bandwidth: 0, overlays: Vec::new(), downtime: None };
        let mut pausing = Pausing { guest: &mut guest, guard: &Guard::thread(), task, name, halts: 0, stream: None };
        let halted = pausing.try_halt();
        pausing.go_on().unwrap();
        let told = told.lock().unwrap().clone();
        let own = |command: &String| ["stop", "cont"].contains(&command.as_str());
        halted.map(|()| told.into_iter().filter(own).collect::<Vec<String>>())
    };
    assert_eq!(outcome("running").unwrap(), ["stop", "cont"]);
    assert_eq!(outcome("paused").unwrap(), [""; 0]);
    let error = outcome("suspended").unwrap_err();
    assert!(matches!(error, SaveError::State(_)), "{error}");
}

#[test]
fn all_images_of_a_guest_that_was_halted_twice_are_protected_and_counted() {
    let (dir, own) = (tempfile::tempdir().unwrap(), std::process::id());
    let live = dir.path().join("disk.qcow2");
    crate::qcow2::create(&live, 1 << 20, None, 0o600).unwrap();
    let qmp = fake::qemu(|asked| if asked == "query-block" { json!([{ "inserted": {} }]) } else { json!({}) });
    let mut guest = Guest { qmp, disks: vec![Running::of_device("d0", &live)], ..guest(RUNS).unwrap() };
    let (socket, pid) = ("/nonexistent/guest.qmp".into(), own as i32);
    let mut task = Task { socket, pid, ran: false, bandwidth: 0, overlays: Vec::new(), downtime: None };
    for _ in 0..2 {
        let mut overlay = guest.disks[0].overlay("one", &task.overlays);
        guest.disks[0].make(&mut overlay, &Account::of(own).unwrap()).unwrap();
        guest.cover(&[overlay.clone()]).unwrap();
        task.overlays.push(overlay);
    }
    guest.reset(&task).unwrap();
    assert_eq!((guest.description.disks[0].own, guest.description.disks[0].layers.len()), (2, 2));
    let mode = |overlay: &Overlay| std::fs::metadata(overlay.stored()).unwrap().permissions().mode() & 0o777;
    assert_eq!(task.overlays.iter().map(mode).collect::<Vec<_>>(), [0o400; 2]);
}
