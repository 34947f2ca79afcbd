//! Clones that are only tried or verified are gone with their command.

use std::os::unix::process::ExitStatusExt;

use super::*;

/// Whoever is killed while it tries a clone leaves neither its QEMU, nor files for good.
#[test]
fn a_save_that_is_killed_while_it_tries_a_clone_leaves_nothing_that_the_next_one_does_not_sweep() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (_disk, machine) = place.machine_with_disk();
    let (mut qmp, tried, pid) = (machine.qmp(), place.path("tried"), machine.pid().to_string());
    std::fs::create_dir(&tried).unwrap();
    let save = |name: &str| {
        let mut command = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", name]);
        command.env("TMPDIR", &tried).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let left = || std::fs::read_dir(&tried).unwrap().count();
    // QEMU's words name the directory of its monitor's socket.
    let ours = tried.display().to_string();
    let qemus = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let words = all.filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok());
        words.filter(|words| words.contains(&ours)).count()
    };
    for round in 0..3 {
        let is_cut = || {
            let mut running = save("killed").spawn().unwrap();
            // The first time before QEMU is there, where that is met.
            let is_met = || left() > 0 && (round == 0 || qemus() > 0);
            while !is_met() && running.try_wait().unwrap().is_none() {}
            running.kill().unwrap();
            running.wait().unwrap();
            // One that was stored before it was seen is none.
            let names = place.names();
            names.iter().for_each(|name| drop(place.ok(&["snapshot", "rm", "store", name])));
            names.is_empty() && left() > 0
        };
        assert!((0..20).any(|_| is_cut()), "none was killed while it tried a clone");
        eventually("no QEMU of its own runs", Duration::from_secs(30), || (qemus() == 0).then_some(()));
        assert_eq!((status(&mut qmp), left()), ("running".to_string(), 1), "{round}: the one before was swept");
    }
    assert!(save("whole").status().unwrap().success());
    assert_eq!((left(), place.names()), (0, vec!["whole".to_string()]));
    // So it is with a clone that is verified.
    drop(machine);
    let verify = |seconds: &str, signal: i32| {
        let words = ["snapshot", "verify", "store", "whole", "--seconds", seconds, "--files", &ours];
        let mut running = place.command(&words).spawn().unwrap();
        eventually("its clone runs", Duration::from_secs(60), || (qemus() == 2).then_some(()));
        e2e::signal_process(running.id() as i32, signal);
        assert_eq!(running.wait().unwrap().signal(), Some(signal));
        let all = || qemus() + clones::servers(&place).len();
        eventually("all of it ends", Duration::from_secs(30), || (all() == 0).then_some(()));
    };
    verify("600", libc::SIGKILL);
    [libc::SIGHUP, libc::SIGQUIT].into_iter().for_each(|signal| verify("2", signal));
    assert_eq!(left(), 0, "the next one has swept what the killed one left");
}
