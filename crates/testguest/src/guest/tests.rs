use super::*;

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

fn wait_for(guest: &Guest, lines: usize) {
    let until = Instant::now() + Duration::from_secs(60);
    while guest.console().len() < lines {
        assert!(Instant::now() < until, "{:?}", guest.console());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_guest_is_checked_through_its_console() {
    let script = "echo PAGEONE-BOOTED; echo PAGEONE-ROUND 0 PASS checks=2; echo oops >&2; exec sleep 600";
    let mut guest = Guest::start_with_stderr(shell(script)).unwrap();
    wait_for(&guest, 3);
    assert_eq!((guest.verdict(), guest.rounds(), guest.checks()), (Verdict::Pass { round: 0 }, 1, (2, 0)));
    guest.check().unwrap();
    assert!(guest.console_tail().contains("    | oops\n"));
    guest.kill();
    let error = guest.check().unwrap_err().to_string();
    assert!(error.contains(" ended, signal: 9") && error.contains("; its last lines:\n    | "), "{error}");
    assert!(matches!(guest.verdict(), Verdict::Dead(_)));
}

#[test]
fn a_silent_guest_that_works_is_slow_and_not_dead() {
    let seconds = Duration::from_secs;
    assert_eq!(silent(seconds(200), seconds(150)), Verdict::Slow { silent: 200 });
    assert_eq!(silent(seconds(200), seconds(5)), Verdict::Slow { silent: 200 });
    let Verdict::Dead(why) = silent(seconds(200), seconds(2)) else { panic!("an idle guest hangs") };
    assert_eq!(why, "silent for 200 s, and QEMU did nothing meanwhile");
}

#[test]
fn a_wrong_byte_outweighs_the_end() {
    let mut guest = Guest::start(shell("echo PAGEONE-ROUND 4 CORRUPT checks=2 failures=1 file=x")).unwrap();
    wait_for(&guest, 1);
    assert_eq!(guest.verdict(), Verdict::Corrupt { round: 4, file: "x".into() });
    assert!(matches!(guest.check(), Err(Broken::Corrupt { round: 4, .. })));
    assert!(matches!(Guest::start(Command::new("/nonexistent")), Err(StartError::Run { .. })));
}

#[test]
fn a_panic_and_a_lost_process_are_told() {
    let mut guest = Guest::start(shell("echo '[ 1.0] Kernel panic - not syncing: x'; exec sleep 600")).unwrap();
    wait_for(&guest, 1);
    let error = guest.check().unwrap_err().to_string();
    assert!(error.contains("panicked: Kernel panic - not syncing: x"), "{error}");
    // Somebody else has taken its exit status.
    let mut guest = Guest::start(shell("exit")).unwrap();
    let pid = Pid::from_raw(guest.pid());
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
    let error = guest.check().unwrap_err().to_string();
    assert_eq!(error, format!("cannot wait for guest {}", guest.pid()));
}

/// In a process of its own, where a limit hinders no other test.
#[test]
fn a_guest_that_cannot_be_started_says_what_was_missing() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const ALONE: &str = "PAGEONE_TEST_ALONE";
    let name = "guest::tests::a_guest_that_cannot_be_started_says_what_was_missing";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let out = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(out.status.success(), "{out:?}");
        return;
    }
    let limited = |resource: Resource, most: u64| {
        let before = getrlimit(resource);
        setrlimit(resource, Rlimit { current: Some(most), ..before }).unwrap();
        let started = Guest::start(shell("exec sleep 600")).map(drop);
        setrlimit(resource, before).unwrap();
        started.unwrap_err().to_string()
    };
    assert_eq!(limited(Resource::Nofile, 3), "cannot make a guest's console pipe");
    // Enough for a shell, and not for the stack of another thread.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")).unwrap();
    let most = (size.parse::<u64>().unwrap() << 10) + (1 << 20);
    assert_eq!(limited(Resource::As, most), "cannot start a guest's console thread");
}
