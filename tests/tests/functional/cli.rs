//! The command line: bad input gets a clear message with the remedy and a documented exit code, and
//! the started program runs in any case.

use std::process::{Command, Output};

use e2e::{Daemon, program, skipped};

fn pageone(dir: &std::path::Path, args: &[&str]) -> Output {
    Command::new(program("pageone")).arg("--dir").arg(dir).args(args).output().unwrap()
}

fn error(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn an_unknown_process_is_no_client() {
    let daemon = Daemon::start();
    let out = daemon.pageone(&["detach", "1"]).output().unwrap();
    assert_eq!(out.status.code(), Some(4));
    assert!(error(&out).contains("process 1") && error(&out).contains("pageone status"), "{}", error(&out));
}

#[test]
fn without_a_daemon_status_says_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["status"][..], &["detach", "1"]] {
        let out = pageone(dir.path(), args);
        assert_eq!(out.status.code(), Some(3));
        assert!(error(&out).contains("pageone daemon"), "{}", error(&out));
    }
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let daemon = Daemon::start();
    let out = pageone(daemon.dir.path(), &["daemon"]);
    assert_eq!(out.status.code(), Some(6));
    assert!(error(&out).contains("another daemon") && error(&out).contains("--dir"), "{}", error(&out));
    daemon.status();
}

#[test]
fn a_wrong_configuration_is_named_by_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pageone.toml");
    for (text, words) in [
        ("threads = 1\nmerge_perod = 2\n", vec!["line 2", "merge_perod"]),
        ("merge_period = -1\n", vec!["merge_period", "-1"]),
        ("[domains.x]\nuids = \"all\"\n", vec!["line 2", "uids"]),
        ("= nonsense", vec!["line 1"]),
    ] {
        std::fs::write(&file, text).unwrap();
        let out = pageone(dir.path(), &["daemon", "--config", file.to_str().unwrap()]);
        assert_eq!(out.status.code(), Some(5), "{text}");
        for word in words.iter().chain(&["pageone.toml"]) {
            assert!(error(&out).contains(word), "{word}: {}", error(&out));
        }
    }
    let out = pageone(dir.path(), &["daemon", "--config", "/nonexistent.toml"]);
    assert_eq!(out.status.code(), Some(5));
    assert!(error(&out).contains("/nonexistent.toml"), "{}", error(&out));
    let out = pageone(dir.path(), &["daemon", "--merge-period", "0"]);
    assert_eq!(out.status.code(), Some(5));
}

#[test]
fn a_program_without_guest_memory_runs_as_ever() {
    let daemon = Daemon::start();
    let out = daemon.run(&[]).args(["echo", "hello"]).output().unwrap();
    assert_eq!((out.stdout.as_slice(), out.status.code()), (&b"hello\n"[..], Some(0)));
    assert_eq!(error(&out), "");
    assert!(daemon.status()["domains"].as_array().unwrap().is_empty());
}

#[test]
fn without_permission_the_program_runs_and_is_told_why_it_is_not_merged() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can become nobody");
    }
    if std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|v| v.trim() == "1") {
        return skipped("here every account may use userfaultfd");
    }
    let Ok(setpriv) = Command::new("setpriv").arg("--version").output() else {
        return skipped("no setpriv (util-linux)");
    };
    assert!(setpriv.status.success());
    // Where nobody can read it.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["pageone", "libpageone_agent.so"] {
        std::fs::copy(program(name), dir.path().join(name)).unwrap();
    }
    let nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]);
        command.arg(dir.path().join("pageone")).args(args).env("XDG_RUNTIME_DIR", "/nonexistent").output().unwrap()
    };
    let out = nobody(&["run", "--", "sh", "-c", "echo hello; exit 3"]);
    assert_eq!((out.stdout.as_slice(), out.status.code()), (&b"hello\n"[..], Some(3)), "{}", error(&out));
    assert!(error(&out).contains("runs without merging") && error(&out).contains("userfaultfd"), "{}", error(&out));
    let out = nobody(&["doctor"]);
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().find(|l| l.contains("userfaultfd")).unwrap();
    assert!(line.starts_with("  BLOCKS") && line.contains("/dev/userfaultfd"), "{line}");
}

#[test]
fn doctor_is_content_where_merging_works() {
    // The one process that is looked at is no guest: others may run here, and be in any state.
    let own = std::process::id().to_string();
    let out = pageone(tempfile::tempdir().unwrap().path(), &["doctor", "--json", &own]);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let host = report["host"].as_array().unwrap();
    assert!(!host.is_empty() && host.iter().all(|c| c["verdict"] != "blocks"), "{report}");
    assert_eq!(report["guests"][0]["pid"].to_string(), own);
    assert_eq!((out.status.code(), &report["guests"][0]["checks"][0]["verdict"]), (Some(1), &"blocks".into()));
}

#[test]
fn doctor_shows_commands_and_runs_none_unasked() {
    let before = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let out = pageone(tempfile::tempdir().unwrap().path(), &["doctor", "--fix", &std::process::id().to_string()]);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let is_low = before.trim().parse::<u64>().unwrap() < kmem::procfs::ADVISED_MAP_COUNT as u64;
    assert_eq!(text.contains("\nsysctl -w vm.max_map_count="), is_low, "{text}");
    assert_eq!(std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap(), before);
    let out = pageone(tempfile::tempdir().unwrap().path(), &["doctor", "--fix", "--apply"]);
    assert_eq!(out.status.code(), Some(2), "{}", error(&out));
}

/// As execvp(3) finds programs, and with the exit codes of a shell.
#[test]
fn a_program_that_cannot_be_started_starts_nothing_else() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let place = |name: &str| path.path().join(name);
    for name in ["first", "second"] {
        std::fs::create_dir(place(name)).unwrap();
    }
    std::fs::write(place("first/denied"), "").unwrap();
    std::fs::write(place("first/echo"), "").unwrap();
    symlink("/bin/echo", place("second/echo")).unwrap();
    std::fs::write(place("first/script"), "#!/nonexistent/perl -w\n").unwrap();
    std::fs::set_permissions(place("first/echo"), std::fs::Permissions::from_mode(0o644)).unwrap();
    std::fs::set_permissions(place("first/script"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let own = dir.path().join("run");
    let run = |name: &str| {
        let mut command = Command::new(program("pageone"));
        command.arg("--dir").arg(&own).args(["run", "--", name]).env("PATH", place("first")).output().unwrap()
    };
    for (name, code, why) in [
        ("/nonexistent", 127, "it is not there, nor in PATH: give its path"),
        ("nonexistent", 127, "it is not there, nor in PATH: give its path"),
        ("", 127, "it is not there, nor in PATH: give its path"),
        ("script", 127, "its first line names the interpreter /nonexistent/perl, which is not there"),
        ("denied", 126, "Permission denied (os error 13)"),
        ("/etc", 126, "permission denied"),
        ("/etc/passwd", 126, "Permission denied (os error 13)"),
    ] {
        let out = run(name);
        assert_eq!(out.status.code(), Some(code), "{name}: {}", error(&out));
        assert_eq!(error(&out), format!("pageone: cannot run {name}: {why}\n"));
        assert!(!own.exists(), "{name}: a daemon was started");
    }
    // The first of this name is passed by.
    let daemon = Daemon::start();
    let path = std::env::join_paths([place("first"), place("second")]).unwrap();
    let out = daemon.run(&[]).args(["echo", "hello"]).env("PATH", path).output().unwrap();
    assert_eq!((out.stdout.as_slice(), out.status.code()), (&b"hello\n"[..], Some(0)), "{}", error(&out));
}

#[test]
fn what_the_environment_says_is_not_shown_as_if_it_were_typed() {
    let usage = |variables: &[(&str, &str)], words: &[&str]| {
        let out = Command::new(program("pageone")).args(words).envs(variables.iter().copied()).output().unwrap();
        (out.status.code(), error(&out))
    };
    let set = [("PAGEONE_DIR", "/nonexistent"), ("PAGEONE_POOLS", "/nonexistent")];
    for words in [&["attach"][..], &["checkpoint"], &["pool", "show"], &["snapshot", "rm"], &["status", "--no"]] {
        assert_eq!(usage(&[], words), usage(&set, words), "{words:?}");
        assert_eq!(usage(&[], words).0, Some(2));
    }
    // It is heard all the same, and what is typed comes first.
    assert!(usage(&set, &["status"]).1.contains("/nonexistent"));
    assert!(usage(&set, &["--dir", "/neither", "status"]).1.contains("/neither"));
    assert_eq!(usage(&[("PAGEONE_DIR", "")], &["status"]), usage(&[], &["status"]));
    let help = Command::new(program("pageone")).args(["pool", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("PAGEONE_DIR") && help.contains("PAGEONE_POOLS"), "{help}");
}

#[test]
fn status_fits_a_terminal_and_is_whole_elsewhere() {
    let daemon = Daemon::start();
    let longest =
        |out: Output| String::from_utf8(out.stdout).unwrap().lines().map(|line| line.trim_end().chars().count()).max();
    let on_terminal = |option: &str| {
        let (program, dir) = (program("pageone"), daemon.dir.path());
        let line = format!("stty cols 60; {} --dir {} status {option}", program.display(), dir.display());
        Command::new("script").args(["-qec", &line, "/dev/null"]).output()
    };
    let Ok(narrow) = on_terminal("") else { return skipped("no script (util-linux)") };
    assert!(longest(narrow) <= Some(60));
    assert!(longest(on_terminal("--wide").unwrap()) > Some(100));
    assert!(longest(daemon.pageone(&["status"]).output().unwrap()) > Some(100));
}

#[test]
fn run_starts_a_daemon_where_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program("pageone"));
    command
        .arg("--dir")
        .arg(dir.path())
        .args(["run", "--"])
        .arg(program("pageone-test-client"))
        .args(["hold", "4096", "2"]);
    command.stderr(std::process::Stdio::null());
    let mut client = e2e::Client::spawn(command);
    client.expect("ready");
    let status = e2e::eventually("the started daemon knows the client", std::time::Duration::from_secs(10), || {
        let out = pageone(dir.path(), &["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
        (status["domains"][0]["clients"][0]["pid"] == client.pid()).then_some(status)
    });
    assert_eq!(status["merge_period_seconds"], 20.0);
    client.go();
    assert_eq!(client.finish(), Some(0));
    // It would end by itself in a minute; its process is the one that holds the lock.
    let locks =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|p| p.file_name().to_str()?.parse::<i32>().ok());
    let own = dir.path().to_str().unwrap().to_string();
    for pid in locks {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&own) && pid != std::process::id() as i32 {
            e2e::signal_process(pid, libc::SIGTERM);
        }
    }
}

#[test]
fn a_daemon_that_is_stopped_is_said_not_to_answer() {
    let daemon = Daemon::start();
    let pid = rustix::process::Pid::from_raw(daemon.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let out = daemon.pageone(&["status"]).output().unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert_eq!(out.status.code(), Some(3));
    assert!(error(&out).contains("the daemon does not answer in time: it is stopped"), "{}", error(&out));
}

#[test]
fn a_daemon_that_run_starts_keeps_nothing_of_its_caller() {
    let dir = tempfile::tempdir().unwrap();
    // A script that holds a lock, as many do.
    let script = "exec 9>\"$0/lock\"; flock 9; setsid \"$1\" --dir \"$0/daemon\" run -- true";
    let out = Command::new("sh").args(["-c", script]).arg(dir.path()).arg(program("pageone")).output().unwrap();
    let daemon = std::fs::read_dir("/proc").unwrap().flatten().find_map(|process| {
        let pid: i32 = process.file_name().to_str()?.parse().ok()?;
        let words = std::fs::read(process.path().join("cmdline")).ok()?;
        let dir = dir.path().join("daemon").into_os_string().into_string().unwrap();
        let words: Vec<_> = words.split(|&byte| byte == 0).collect();
        (words.contains(&dir.as_bytes()) && words.contains(&&b"daemon"[..])).then_some(pid)
    });
    let daemon = daemon.unwrap_or_else(|| panic!("no daemon: {}", error(&out)));
    let free = Command::new("flock").arg("-n").arg(dir.path().join("lock")).arg("true").status().unwrap().success();
    let session = rustix::process::getsid(rustix::process::Pid::from_raw(daemon)).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(daemon).unwrap(), rustix::process::Signal::TERM)
        .unwrap();
    assert!(out.status.success(), "{}", error(&out));
    assert!(free, "it holds the script's lock");
    assert_eq!(session.as_raw_nonzero().get(), daemon, "it is in another's session");
}
