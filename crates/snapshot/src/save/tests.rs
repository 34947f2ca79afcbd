//! What is refused, and why; and failures before a guest is stopped.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use checkpoint::test::Memory;
use checkpoint::{Catalog, Changes, Store};
use mpool::Pool;

use super::*;
use crate::fake;

/// A guest whose QEMU answers questions about these things as given, and all others with
/// nothing.
fn guest(answers: &'static [(&str, &str)]) -> Result<Guest, SaveError> {
    let qmp = fake::qemu(move |asked| {
        let text = answers.iter().find(|(name, _)| *name == asked).map_or("{}", |(_, text)| text);
        serde_json::from_str(text).unwrap()
    });
    let (program, directory) = ("/usr/bin/qemu-system-x86_64".into(), "/".into());
    let description = Description { program, directory, ..Description::default() };
    Guest::ask(1, lock(), qmp, "/nonexistent/guest.qmp".into(), description)
}

fn lock() -> Lock {
    let dir = tempfile::tempdir().unwrap();
    Lock::take(&dir.path().join("guest.qmp"), 1, PATIENCE).unwrap()
}

const RUNS: &[(&str, &str)] = &[
    ("human-monitor-command", "\"Host virtual address for 0x0 (ram) is 0x7f0000000000\""),
    ("query-status", "{ \"status\": \"paused\" }"),
];

fn refused(guest: Result<Guest, SaveError>) -> SaveError {
    guest.map(drop).unwrap_err()
}

#[test]
fn a_process_that_is_no_prepared_guest_is_refused() {
    let error = refused(Guest::open(i32::MAX));
    assert!(matches!(error, SaveError::NoProcess { .. }), "{error}");
    assert!(error.to_string().contains("or not one whose command line may be read: name a guest"), "{error}");
    let error = refused(Guest::open(std::process::id() as i32));
    assert!(matches!(error, SaveError::Unprepared(_)), "{error}");
    assert!(error.to_string().contains("was not prepared, and its command line names no socket of QMP"), "{error}");
    // The shell has the words of a guest with a descriptor that it was given.
    let mut command = Command::new("sh");
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
    assert!(guest(RUNS).is_ok());
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
