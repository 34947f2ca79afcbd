use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

fn nobody() -> Option<Account> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: only root can become another account");
    }
    is_root.then(|| Account { uid: 65534, gid: 65534, groups: vec![7, 8], capabilities: u64::MAX })
}

#[test]
fn a_program_of_another_account_has_its_rights_and_no_way_to_more() {
    let Some(nobody) = nobody() else { return };
    let status = |account: &Account| {
        let mut command = Command::new("cat");
        account.start(command.arg("/proc/self/status"));
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let has = |text: &str, name: &str, value: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), value, "{name}");
    };
    let text = status(&nobody);
    has(&text, "Uid:", "65534 65534 65534 65534");
    has(&text, "Gid:", "65534 65534 65534 65534");
    has(&text, "Groups:", "7 8");
    has(&text, "NoNewPrivs:", "1");
    for set in ["CapPrm:", "CapEff:", "CapAmb:"] {
        has(&text, set, "0000000000000000");
    }
    let mut command = Command::new("sleep");
    nobody.start(command.arg("60"));
    let mut child = command.spawn().unwrap();
    assert_eq!(Account::of(child.id()).unwrap(), Account { capabilities: 0, ..nobody.clone() });
    child.kill().unwrap();
    child.wait().unwrap();
    // Root's has what it was given.
    let text = status(&Account { uid: 0, gid: 0, groups: Vec::new(), capabilities: 1 << 6 });
    has(&text, "Uid:", "0 0 0 0");
    has(&text, "CapEff:", "0000000000000040");
}

#[test]
fn a_program_ends_with_the_thread_that_started_it() {
    let own = Account::of(std::process::id()).unwrap();
    for account in nobody().into_iter().chain([own]) {
        let start = || {
            let mut command = Command::new("sleep");
            account.start(command.arg("60"));
            end_with_caller(&mut command).unwrap().spawn().unwrap()
        };
        let mut child = std::thread::scope(|scope| scope.spawn(start).join()).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(libc::SIGKILL));
    }
}

#[test]
fn files_are_made_and_read_with_the_accounts_rights() {
    let Some(nobody) = nobody() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let (made, secret) = (dir.path().join("made"), dir.path().join("secret"));
    std::fs::write(&secret, "root's").unwrap();
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
    nobody.with_files(|| std::fs::write(&made, "")).unwrap();
    let meta = std::fs::metadata(&made).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (65534, 65534));
    let error = nobody.with_files(|| std::fs::read(&secret)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert!(std::fs::read(&secret).is_ok(), "other threads have kept theirs");
}
