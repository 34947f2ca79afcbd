//! Guests whose free pages are recycled are saved, loaded and migrated, while every byte of theirs
//! is checked; and guests without the module report what they free.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use e2e::qmp::{Qmp, make_disk};
use e2e::{Daemon, Guest, eventually, recycler_guests, recycler_words, skipped};

/// A guest, and a monitor of the test's own.
struct Saved {
    guest: Guest,
    qmp: Qmp,
}

/// Starts a guest with a disk for snapshots; `more`: words of QEMU's.
fn start(daemon: &Daemon, kernel: &(String, String), disk: &Path, work: &str, more: &[&str]) -> Saved {
    start_on("pageone", daemon, kernel, disk, work, more)
}

/// The same with another back end.
fn start_on(
    backend: &str,
    daemon: &Daemon,
    kernel: &(String, String),
    disk: &Path,
    work: &str,
    more: &[&str],
) -> Saved {
    let mut command = daemon.run(&["--backend", backend, "--ppr"]);
    command.args(recycler_words(kernel, 192, work)).args(more);
    let socket = disk.with_extension(format!("{}.qmp", Instant::now().elapsed().as_nanos()));
    command.args(Qmp::words(&socket));
    command.arg("-drive").arg(format!("file={},if=none,id=disk", disk.display()));
    command.args(["-device", "virtio-blk-pci,drive=disk"]);
    let guest = Guest::start(command);
    Saved { guest, qmp: Qmp::connect(&socket) }
}

fn state(daemon: &Daemon, pid: i32) -> String {
    let client = daemon.client(pid).unwrap_or_default();
    client["recycling"]["state"].as_str().unwrap_or_default().to_owned()
}

fn recycled(daemon: &Daemon, pid: i32) -> u64 {
    daemon.client(pid).and_then(|c| c["recycling"]["pages_recycled_total"].as_u64()).unwrap_or(0)
}

fn wait_recycled(daemon: &Daemon, guest: &mut Guest, more: u64) {
    let pid = guest.pid();
    let target = recycled(daemon, pid) + more;
    eventually("free pages are taken back", Duration::from_secs(120), || {
        guest.rounds();
        (recycled(daemon, pid) >= target).then_some(())
    });
}

/// `pageone ppr ACTION`; gives what it says. On a machine with much other work QEMU can be late
/// with freeing the device's memory: it is tried again then, as the sentence says, twice at most.
fn ppr(daemon: &Daemon, action: &str, pid: i32) -> Result<(), String> {
    let once = || {
        let out = daemon.pageone(&["ppr", action, &pid.to_string()]).output().unwrap();
        if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
    };
    let is_late = |result: &Result<(), String>| {
        let late = result.as_ref().is_err_and(|why| why.contains("has not freed the memory of the device"));
        late.then(|| println!("{action} {pid} is tried again: {result:?}")).is_some()
    };
    (0..2).fold(once(), |result, _| if is_late(&result) { once() } else { result })
}

fn guests() -> Option<Vec<(String, String)>> {
    recycler_guests().inspect_err(|why| skipped(why)).ok()
}

fn daemon() -> Daemon {
    Daemon::with(&["--merge-period", "1", "--reclaim-period", "0.2"])
}

fn disk(daemon: &Daemon, name: &str) -> PathBuf {
    let path = daemon.dir.path().join(name);
    make_disk(&path);
    path
}

/// What the console of a guest that works for ever must not say.
fn check_console(guest: &mut Guest) {
    guest.rounds();
    let console = guest.console();
    let bad =
        |line: &&String| ["BUG", "WARNING", "Oops", "refused", "still holds"].iter().any(|word| line.contains(word));
    assert!(!console.iter().any(|line| bad(&line)), "{console:#?}");
}

#[test]
fn a_guest_is_saved_loaded_and_migrated_while_recycling_is_paused() {
    save_load_and_migrate("pageone");
}

/// With each back end that recycles.
pub(crate) fn save_load_and_migrate(backend: &str) {
    let Some(kernels) = guests() else { return };
    let start = |daemon: &Daemon, kernel: &(String, String), disk: &Path, work: &str, more: &[&str]| {
        start_on(backend, daemon, kernel, disk, work, more)
    };
    let mut daemon = daemon();
    let disk = disk(&daemon, "disk.qcow2");
    let file = daemon.dir.path().join("state");
    let work = "STAY=1 PPR=1 PPR_ARGS=check=1 WORK=hungry_3600";
    let Saved { mut guest, mut qmp } = start(&daemon, &kernels[0], &disk, work, &[]);
    let pid = guest.pid();
    wait_recycled(&daemon, &mut guest, 2000);
    // A daemon that finds a guest asks QEMU where the RAM lies. That must not keep the device's
    // memory from being freed.
    daemon.kill();
    daemon.restart();
    wait_recycled(&daemon, &mut guest, 500);
    // With the device there is no way to save or to load.
    let why = qmp.monitor("savevm early");
    assert!(why.contains("peer mode"), "{why}");
    let why = qmp.monitor("loadvm early");
    assert!(why.contains("pageone-ppr-pause-first"), "{why}");
    qmp.try_execute("cont", serde_json::json!({})).unwrap();
    let to_file = format!("exec:cat > {}", file.display());
    assert!(qmp.migrate(&to_file).unwrap_err().contains("peer mode"));
    // Saved, with checkers at work.
    ppr(&daemon, "pause", pid).unwrap();
    ppr(&daemon, "pause", pid).expect("twice is no error");
    assert_eq!(state(&daemon, pid), "paused");
    assert_eq!(daemon.client(pid).unwrap()["pages_recycled"], 0, "no page counts as recycled");
    assert_eq!(qmp.monitor("savevm calm"), "");
    guest.pass_rounds(1);
    // Another daemon knows that it is paused, and plugs nothing in by itself.
    daemon.kill();
    daemon.restart();
    eventually("it is still paused", Duration::from_secs(30), || (state(&daemon, pid) == "paused").then_some(()));
    ppr(&daemon, "resume", pid).unwrap();
    ppr(&daemon, "resume", pid).expect("twice is no error");
    wait_recycled(&daemon, &mut guest, 2000);
    // Marks are there now, of memory that is not the snapshot's.
    let why = qmp.monitor("loadvm calm");
    assert!(why.contains("pageone-ppr-pause-first"), "{why}");
    qmp.try_execute("cont", serde_json::json!({})).unwrap();
    guest.pass_rounds(1);
    ppr(&daemon, "pause", pid).unwrap();
    assert_eq!(qmp.monitor("loadvm calm"), "");
    guest.pass_rounds(1);
    ppr(&daemon, "resume", pid).unwrap();
    wait_recycled(&daemon, &mut guest, 2000);
    guest.pass_rounds(2);
    // To a file, and on: a new QEMU gets its device when it has the state.
    ppr(&daemon, "pause", pid).unwrap();
    // Emulated guests that write during a migration lose writes in QEMU 7.2 alone, without us.
    qmp.try_execute("stop", serde_json::json!({})).unwrap();
    qmp.migrate(&to_file).unwrap();
    check_console(&mut guest);
    drop(qmp);
    guest.kill();
    let from_file = format!("exec:cat {}", file.display());
    let Saved { guest: mut moved, mut qmp } = start(&daemon, &kernels[0], &disk, work, &["-incoming", &from_file]);
    eventually("the state has come", Duration::from_secs(60), || {
        let status = qmp.try_execute("query-status", serde_json::json!({})).unwrap();
        (status["status"] != "inmigrate").then_some(())
    });
    qmp.try_execute("cont", serde_json::json!({})).unwrap();
    wait_recycled(&daemon, &mut moved, 2000);
    moved.pass_rounds(2);
    check_console(&mut moved);
    moved.kill();
    // The same from the snapshot of the disk.
    let Saved { guest: mut loaded, .. } = start(&daemon, &kernels[0], &disk, work, &["-loadvm", "calm"]);
    wait_recycled(&daemon, &mut loaded, 2000);
    loaded.pass_rounds(2);
    check_console(&mut loaded);
}

/// `PAGEONE_PLUG_ROUNDS` rounds (`make test-pausing`: 20).
#[test]
fn a_device_that_comes_and_goes_under_load_costs_no_byte() {
    let Some(kernels) = guests() else { return };
    let daemon = daemon();
    let rounds = std::env::var("PAGEONE_PLUG_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3);
    let seconds = 20 + 7 * rounds;
    let work = format!("STAY=1 PPR=1 PPR_ARGS=check=1 WORK=hungry_{seconds}");
    // Both ways of hotplug: on the root bus, and in a port.
    let machines = ["pc", "q35"];
    let mut all: Vec<Saved> = kernels
        .iter()
        .zip(machines)
        .map(|(kernel, machine)| {
            let disk = disk(&daemon, &format!("{machine}.qcow2"));
            start(&daemon, kernel, &disk, &work, &["-machine", machine])
        })
        .collect();
    for Saved { guest, .. } in &mut all {
        wait_recycled(&daemon, guest, 500);
    }
    for round in 0..rounds {
        for Saved { guest, .. } in &mut all {
            let pid = guest.pid();
            ppr(&daemon, "pause", pid).unwrap_or_else(|e| panic!("round {round}: {e}: {:#?}", guest.console()));
            ppr(&daemon, "resume", pid).unwrap_or_else(|e| panic!("round {round}: {e}: {:#?}", guest.console()));
            wait_recycled(&daemon, guest, 1);
        }
    }
    for Saved { guest, .. } in &mut all {
        eventually("the guest has done its work", Duration::from_secs(seconds + 120), || {
            guest.rounds();
            guest.console().iter().any(|line| line.contains("LOAD all done")).then_some(())
        });
        check_console(guest);
        let console = guest.console();
        let says = |text: &str| console.iter().any(|line| line.contains(text));
        assert!(says("PPR-STAT missed 0") && says("PPR unloaded"), "{console:#?}");
        let recycled = recycled(&daemon, guest.pid());
        println!("{}: {rounds} rounds, {recycled} pages recycled", guest.pid());
        assert!(recycled > 5000, "the test proves nothing if nothing is recycled");
    }
}

#[test]
fn a_guest_that_does_not_let_go_is_named_and_goes_on() {
    let Some(kernels) = guests() else { return };
    let daemon = daemon();
    let disk = disk(&daemon, "disk.qcow2");
    // Without ACPI its kernel does not hear that the device is to go.
    let work = "acpi=off PPR=1 STAY=1 WORK=hungry_3600";
    let Saved { mut guest, .. } = start(&daemon, &kernels[0], &disk, work, &[]);
    let pid = guest.pid();
    wait_recycled(&daemon, &mut guest, 500);
    let why = ppr(&daemon, "pause", pid).unwrap_err();
    assert!(why.contains("has not let go of its device within 30 s") && why.contains("acpiphp"), "{why}");
    wait_recycled(&daemon, &mut guest, 100);
    assert_eq!(state(&daemon, pid), "recycling");
    let none = ppr(&daemon, "pause", std::process::id() as i32).unwrap_err();
    assert!(none.contains("is no client"), "{none}");
    let mut client = daemon.scenario(&["recycle", "4096", "3"]);
    client.expect("ready");
    let why = ppr(&daemon, "pause", client.pid()).unwrap_err();
    assert!(why.contains("has no device for free pages"), "{why}");
}

#[test]
fn what_a_guest_without_the_module_frees_returns_and_is_counted() {
    let Some(kernels) = guests() else { return };
    let daemon = daemon();
    let mut command = daemon.run(&["--free-page-reporting"]);
    command.args(recycler_words(&kernels[0], 256, "BALLOON=1 STAY=1 WORK=stretch_120"));
    let mut guest = Guest::start(command);
    let says = |guest: &mut Guest, text: &str| {
        guest.rounds();
        guest.console().iter().any(|line| line.contains(text)).then_some(())
    };
    let resident = |guest: &Guest| kmem::procfs::smaps_rollup(Some(guest.pid())).unwrap().anonymous;
    eventually("the guest has filled memory", Duration::from_secs(120), || says(&mut guest, "LOAD filled"));
    let before = resident(&guest);
    let pages = |guest: &Guest| daemon.client(guest.pid()).and_then(|c| c["pages_discarded_total"].as_u64());
    // What was free at the start has been reported, too.
    let reported = pages(&guest).unwrap();
    eventually("it has freed it", Duration::from_secs(120), || says(&mut guest, "LOAD freed"));
    let freed = 90 << 8;
    eventually("freed memory is counted", Duration::from_secs(60), || {
        pages(&guest).filter(|&pages| pages >= reported + freed)
    });
    eventually("freed memory is back", Duration::from_secs(60), || (resident(&guest) + 80_000 < before).then_some(()));
    let text = daemon.pageone(&["status"]).output().unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("MiB given back by the program itself"), "{text}");
}
