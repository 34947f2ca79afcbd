//! KSM's files in a directory, taken and given back.

use std::os::unix::fs::symlink;
use std::path::Path;

use super::*;

/// A number that the kernel lets nobody change.
const FIXED: &str = "/proc/sys/kernel/ngroups_max";

/// Each test looks whether another program sets what it sets, and one starts such a program.
static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

/// Is killed at the end, also if the test fails.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// KSM's files, with what is in them.
fn files(run: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let fixed = std::fs::read_to_string(FIXED).unwrap();
    for (name, text) in [("run", run), ("pages_to_scan", &fixed), ("sleep_millisecs", "20"), ("full_scans", "0")] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn put(dir: &Path, name: &str, text: &str) {
    std::fs::write(dir.join(name), text).unwrap();
}

/// KSM's scanner is this process.
fn take(dir: &Path, effect: Effect) -> Result<Scanner> {
    let ksmd = Ksmd { pid: std::process::id() as i32 };
    Scanner::take_from(Ksm::at(dir).unwrap(), ksmd, effect, &dir.join("kept"))
}

fn get(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(name)).unwrap().trim().to_owned()
}

#[test]
fn what_one_that_was_killed_has_found_is_put_back_unless_somebody_has_set_it_since() {
    let _alone = ALONE.lock();
    let dir = files("2");
    let dir = dir.path();
    put(dir, "pages_to_scan", "100");
    let killed = |pages: u32| {
        let mut scanner = take(dir, Effect::Governed).unwrap();
        let error = take(dir, Effect::Governed).err().unwrap();
        assert!(error.to_string().starts_with("another `pageone ksm advise` governs KSM"), "{error}");
        scanner.set(pages).unwrap();
        // Its lock goes as that of a killed one does, and it puts nothing back.
        scanner.kept = None;
    };
    killed(700);
    killed(800);
    assert_eq!((get(dir, "pages_to_scan"), get(dir, "run")), ("800".into(), "1".into()));
    drop(take(dir, Effect::Governed).unwrap());
    assert_eq!((get(dir, "pages_to_scan"), get(dir, "run")), ("100".into(), "0".into()), "2 would unmerge");
    killed(700);
    put(dir, "pages_to_scan", "50");
    killed(700);
    put(dir, "kept", &(get(dir, "kept") + "700]}"));
    drop(take(dir, Effect::Governed).unwrap());
    assert_eq!(get(dir, "pages_to_scan"), "50");
    put(dir, "kept", "no JSON");
    drop(take(dir, Effect::Governed).unwrap());
    assert_eq!((get(dir, "pages_to_scan"), get(dir, "kept")), ("50".into(), String::new()));
}

#[test]
fn a_scanner_that_is_stopped_or_cannot_be_read_or_set_says_so() {
    let _alone = ALONE.lock();
    let text = |error: anyhow::Error| error.to_string();
    let dir = files("0");
    let error = text(take(dir.path(), Effect::DryRun).err().unwrap());
    assert!(error.starts_with("KSM is stopped (run is 0), so there is nothing to see"), "{error}");
    assert_eq!(std::fs::read_to_string(dir.path().join("run")).unwrap(), "0");
    std::fs::remove_file(dir.path().join("run")).unwrap();
    symlink(FIXED, dir.path().join("run")).unwrap();
    assert_eq!(text(take(dir.path(), Effect::Governed).err().unwrap()), "cannot start KSM");
    std::fs::remove_file(dir.path().join("pages_to_scan")).unwrap();
    symlink(FIXED, dir.path().join("pages_to_scan")).unwrap();
    let error = take(dir.path(), Effect::Governed).err().unwrap();
    assert_eq!(Code::of(&error), Code::HostLacks);
    assert!(text(error).starts_with("KSM's settings can't be written: "));

    let dir = files("1");
    put(dir.path(), "sleep_millisecs", "0");
    let error = text(take(dir.path(), Effect::Governed).err().unwrap());
    assert!(error.starts_with("ksmd never sleeps, so no CPU limit can hold"), "{error}");
    put(dir.path(), "sleep_millisecs", "20");
    let mut scanner = take(dir.path(), Effect::Governed).unwrap();
    scanner.read().unwrap();
    put(dir.path(), "full_scans", "many");
    assert_eq!(text(scanner.read().unwrap_err()), "cannot read KSM's statistics");
    put(dir.path(), "full_scans", "1");
    let ksmd = std::mem::replace(&mut scanner.ksmd, Ksmd { pid: i32::MAX });
    assert_eq!(text(scanner.read().unwrap_err()), "cannot read the CPU time of ksmd");
    scanner.ksmd = ksmd;
    std::fs::remove_file(dir.path().join("pages_to_scan")).unwrap();
    symlink(FIXED, dir.path().join("pages_to_scan")).unwrap();
    assert_eq!(text(scanner.set(7).unwrap_err()), "cannot set KSM's pages_to_scan");
}

#[test]
fn a_setting_that_another_program_changed_ends_it() {
    let _alone = ALONE.lock();
    let dir = files("1");
    let scanner = take(dir.path(), Effect::Governed).unwrap();
    scanner.check_writers().unwrap();
    let error = || {
        let error = scanner.check_writers().unwrap_err();
        assert_eq!(Code::of(&error), Code::SecondDaemon);
        error.to_string()
    };
    put(dir.path(), "run", "0");
    assert!(error().starts_with("another program stopped KSM (run); two governors would fight"), "{}", error());
    put(dir.path(), "pages_to_scan", "7");
    assert!(error().starts_with("another program changed pages_to_scan to 7"), "{}", error());
    put(dir.path(), "advisor_mode", "none [scan-time]");
    assert!(error().contains("advisor was switched on"), "{}", error());
    let other = || {
        let error = take(dir.path(), Effect::DryRun).err().unwrap();
        assert_eq!(Code::of(&error), Code::SecondDaemon);
        error.to_string()
    };
    assert!(other().starts_with("the kernel's own advisor sets pages_to_scan; switch it off"), "{}", other());
    put(dir.path(), "advisor_mode", "[none] scan-time");
    let program = dir.path().join("ksmtuned");
    // A child of another test may have open what this process writes: then it cannot be run.
    assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
    let tuned = Killed(std::process::Command::new(program).arg("60").spawn().unwrap());
    // It has its name a moment after the parent goes on.
    let name = format!("/proc/{}/comm", tuned.0.id());
    while std::fs::read_to_string(&name).unwrap() != "ksmtuned\n" {
        std::thread::yield_now();
    }
    // A name alone stops nobody.
    put(dir.path(), "run", "1");
    take(dir.path(), Effect::DryRun).unwrap();
    assert!(error().contains(" sets pages_to_scan; stop it with `systemctl stop ksmtuned`"), "{}", error());
}
