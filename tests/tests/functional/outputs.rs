//! Where the commands write: a pipe that nobody reads ends each of them as it ends `cat`, and a
//! full device is an error that says so.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use e2e::{Daemon, program};

/// Commands that answer nothing on standard output, those whose answer needs a QEMU, and those that
/// end with another program: `run`.
const SILENT: [&str; 9] = ["daemon", "run", "attach", "detach", "record", "report", "restore", "snapshot", "help"];

/// The commands, as `pageone --help` lists them.
fn listed() -> BTreeSet<String> {
    let help = Command::new(program("pageone")).arg("--help").output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    let lines = text.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // What a description goes on with stands further in.
    lines
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

/// A pipe whose reader has ended.
fn closed() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn every_command_ends_quietly_on_a_closed_pipe_and_with_an_error_on_a_full_device() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "1024", "1", "3"]);
    client.expect("ready");
    let pid = client.pid().to_string();
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    std::fs::write(dir.join("memory"), vec![7; 1 << 20]).unwrap();
    let mut count = 0;
    let mut run = |args: &[&str], out: Stdio| -> Output {
        count += 1;
        let name = format!("kept-{count}");
        let args: Vec<&str> = args.iter().map(|word| if *word == "NAME" { &name } else { *word }).collect();
        let mut command = daemon.pageone(&args);
        command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).stdin(Stdio::null()).stdout(out);
        command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
    };
    for args in [
        &["pool", "create", "store", "--capacity", "./pool"][..],
        &["checkpoint", "--to", "store", "--name", "NAME", &pid],
        &["record", "-o", "seen.rec", "--for", "1"],
    ] {
        let out = run(args, Stdio::piped());
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    let cases: [&[&str]; 23] = [
        &["--help"],
        &["--version"],
        &["pool", "--help"],
        &["doctor"],
        &["doctor", "--json"],
        &["config", "sample"],
        &["status"],
        &["status", "--json"],
        &["top", "--batch", "--count", "1"],
        &["replay", "--batch", "seen.rec"],
        &["metrics"],
        &["dirty", "--count", "1"],
        &["ksm", "status"],
        &["estimate", "memory"],
        &["estimate", "--json", "memory"],
        &["pool", "list"],
        &["pool", "show", "store"],
        &["pool", "ls", "store"],
        &["pool", "check", "store"],
        &["snapshot", "ls", "store"],
        &["checkpoint", "--to", "store", "--name", "NAME", &pid],
        &["checkpoint", "--json", "--to", "store", "--name", "NAME", &pid],
        &["pool", "repack", "store"],
    ];
    let mut seen: BTreeSet<String> = SILENT.map(str::to_owned).into();
    let mut wrong = Vec::new();
    for args in cases {
        seen.insert(args[0].to_owned());
        let broken = run(args, closed());
        let said = String::from_utf8_lossy(&broken.stderr).into_owned();
        if broken.status.signal() != Some(libc::SIGPIPE) || said.contains("pageone: ") || said.contains("panicked") {
            wrong.push(format!("{args:?} into a closed pipe: {} {said}", broken.status));
        }
        let broken = run(args, full());
        let said = String::from_utf8_lossy(&broken.stderr).into_owned();
        if broken.status.code() != Some(1) || !said.contains("cannot write to standard output: No space left") {
            wrong.push(format!("{args:?} on a full device: {} {said}", broken.status));
        }
        // Standard error is of no consequence.
        let mut command = daemon.pageone(args);
        let quiet = command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).stdout(Stdio::null());
        let ended = quiet.stderr(full()).status().unwrap();
        if ended.code().is_none_or(|code| code > 1) {
            wrong.push(format!("{args:?} with a full device for errors: {ended}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let missing: Vec<String> = listed().into_iter().filter(|command| !seen.contains(command)).collect();
    assert_eq!(missing, ["demo", "ppr"], "each of them needs a guest with KVM or a device");
}

#[test]
fn an_output_file_is_private_replaces_a_file_by_force_alone_and_nothing_else_ever() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "1024", "1", "3"]);
    client.expect("ready");
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let run = |args: &[&str]| -> (Option<i32>, String) {
        let mut command = daemon.pageone(args);
        let out = command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let ok = |args: &[&str]| assert_eq!(run(args).0, Some(0), "{args:?}: {}", run(args).1);
    ok(&["pool", "create", "store", "--capacity", "./pool"]);
    ok(&["checkpoint", "--to", "store", "--name", "kept", &client.pid().to_string()]);
    ok(&["record", "-o", "seen.rec", "--for", "1"]);
    assert_eq!(dir.join("seen.rec").metadata().unwrap().mode() & 0o777, 0o600);
    symlink("target", dir.join("link")).unwrap();
    std::fs::create_dir(dir.join("below")).unwrap();
    // What comes before the name of the file.
    let commands: [&[&str]; 4] = [
        &["restore", "store", "kept", "--to"],
        &["report", "seen.rec", "-o"],
        &["report", "seen.rec", "--json"],
        &["record", "--for", "1", "-o"],
    ];
    for command in commands {
        let to = |more: &[&'static str]| -> Vec<&str> { command.iter().chain(more).copied().collect() };
        std::fs::write(dir.join("out.part"), "mine").unwrap();
        ok(&to(&["out"]));
        assert_eq!(dir.join("out").metadata().unwrap().mode() & 0o777, 0o600, "{command:?}");
        std::fs::write(dir.join("out"), "old").unwrap();
        let (code, said) = run(&to(&["out"]));
        assert!(code == Some(1) && said.contains("--force replaces it"), "{command:?}: {said}");
        assert_eq!(std::fs::read(dir.join("out")).unwrap(), b"old");
        ok(&to(&["out", "--force"]));
        assert_ne!(std::fs::read(dir.join("out")).unwrap(), b"old");
        assert_eq!(std::fs::read(dir.join("out.part")).unwrap(), b"mine");
        ok(&to(&["/dev/null", "--force"]));
        assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        for other in ["link", "below"] {
            let (code, said) = run(&to(&[other, "--force"]));
            assert!(code == Some(1) && said.contains("nothing replaces"), "{command:?} {other}: {said}");
        }
        std::fs::remove_file(dir.join("out")).unwrap();
    }
    // The standard output is written on where it is, whatever it is, and nothing else is put there.
    let memory = {
        ok(&["restore", "store", "kept", "--to", "out"]);
        std::fs::read(dir.join("out")).unwrap()
    };
    for (given, before) in [("", ""), ("before", "before")] {
        std::fs::write(dir.join("out"), given).unwrap();
        let out = File::options().append(!given.is_empty()).write(true).open(dir.join("out")).unwrap();
        let mut command = daemon.pageone(&["restore", "store", "kept", "--to", "/dev/stdout"]);
        command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).stdout(out);
        assert!(command.status().unwrap().success());
        assert!(std::fs::read(dir.join("out")).unwrap() == [before.as_bytes(), &memory].concat());
    }
    std::fs::remove_file(dir.join("out")).unwrap();
    let mut left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["below", "link", "names", "out.part", "pool", "seen.rec"]);
}

#[test]
fn what_others_have_named_reaches_neither_a_terminal_nor_the_log_as_a_control_sequence() {
    const NAME: &str = "a\x1b[2Jb\u{202e}c";
    let daemon = Daemon::start();
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let program = dir.join(NAME);
    std::fs::copy(e2e::program("pageone-test-client"), &program).unwrap();
    let mut command = daemon.run(&[]);
    command.arg(&program).args(["hold", "1024", "1", "3"]);
    let mut client = e2e::Client::spawn(command);
    client.expect("ready");
    let pid = client.pid().to_string();
    std::fs::write(dir.join(format!("{NAME}.rec")), "x").unwrap();
    let recording = format!("{NAME}.rec");
    assert!(Command::new("tar").args(["-cf", "members.tar", &recording]).current_dir(dir).status().unwrap().success());
    let cases: [&[&str]; 17] = [
        &["pool", "create", "store", "--capacity", "./pool"],
        &["checkpoint", "--to", "store", "--name", NAME, &pid],
        &["pool", "ls", "store"],
        &["pool", "ls", "store", "--json"],
        &["restore", "store", NAME, "--to", NAME],
        &["snapshot", "ls", NAME],
        &["status"],
        &["status", "--json"],
        &["top", "--batch", "--count", "1"],
        &["metrics"],
        &["dirty", "--count", "1"],
        &["doctor", &pid],
        &["estimate", NAME],
        &["estimate", "nothing\x1b[2J"],
        &["replay", &recording],
        &["snapshot", "import", "store", "members.tar"],
        &["run", "--", "nothing\x1b[2J"],
    ];
    let harmful = |text: &str| text.chars().any(|c| c != '\n' && c != '\t' && c.is_control() || c == '\u{202e}');
    let mut wrong = Vec::new();
    for args in cases {
        let mut command = daemon.pageone(args);
        let out = command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).output().unwrap();
        for said in [out.stdout, out.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()) {
            if harmful(&said) {
                wrong.push(format!("{args:?}: {said:?}"));
            }
        }
    }
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains(&pid), "{log}");
    if harmful(&log) {
        wrong.push(format!("the log: {log:?}"));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
