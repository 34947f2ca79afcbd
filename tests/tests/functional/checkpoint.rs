//! `pageone checkpoint` and `pageone restore`: a client that writes, a stopped process, real
//! guests.

mod clients;
mod pools;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use e2e::{Daemon, Guest, program, signal_process, skipped};
use kmem::pidfd::PidFd;
use kmem::{procfs, sched};
use serde_json::Value;

fn run(dir: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let out = Command::new(program("pageone")).args(args).env("PAGEONE_POOLS", dir.join("names")).output().unwrap();
    (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
}

fn ok(dir: &Path, args: &[&str]) -> String {
    let (code, out, err) = run(dir, args);
    assert_eq!(code, Some(0), "{args:?}: {err}");
    out
}

fn make_pool(dir: &Path) {
    ok(dir, &["pool", "create", "store", "--capacity", &dir.join("capacity").display().to_string()]);
}

fn checkpoint(dir: &Path, daemon: Option<&Daemon>, pid: i32, name: &str, more: &[&str]) -> Value {
    let pid = pid.to_string();
    let mut args: Vec<&str> = Vec::new();
    let path = daemon.map(|d| d.dir.path().display().to_string());
    if let Some(path) = &path {
        args.extend(["--dir", path]);
    }
    args.extend(["checkpoint", &pid, "--to", "store", "--name", name, "--json"]);
    args.extend(more);
    let out = ok(dir, &args);
    println!("{out}");
    serde_json::from_str(&out).unwrap()
}

/// Stops a process and takes its checkpoint. In the midst of a window its pages are not in their
/// places, and that is said: then it goes on for a moment, and is stopped again. On a busy machine
/// windows are long.
fn checkpoint_of_stopped(dir: &Path, daemon: &Daemon, pid: i32, name: &str) -> Value {
    let (path, number) = (daemon.dir.path().display().to_string(), pid.to_string());
    e2e::eventually("it stands outside a window", Duration::from_secs(60), || {
        e2e::stop_process(pid);
        let args = ["--dir", &path, "checkpoint", &number, "--to", "store", "--name", name, "--json"];
        let (code, out, err) = run(dir, &args);
        if code == Some(0) {
            return Some(serde_json::from_str(&out).unwrap());
        }
        assert!(err.contains("let it go on for a moment"), "{err}");
        signal_process(pid, libc::SIGCONT);
        None
    })
}

fn restore(dir: &Path, name: &str) -> Vec<u8> {
    use std::os::unix::fs::PermissionsExt;
    let file = dir.join("restored");
    ok(dir, &["restore", "store", name, "--force", "--to", &file.display().to_string()]);
    let mode = file.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "what was in memory is its owner's alone, whatever the umask");
    std::fs::read(file).unwrap()
}

/// Memory of a process, as the restored file has it. A page that a merge window has taken cannot be
/// read this way in that moment (`EIO`).
fn memory(pid: i32, regions: &[(u64, u64)]) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut all = Vec::new();
    for (address, len) in regions {
        let start = all.len();
        all.resize(start + *len as usize, 0);
        for (i, part) in all[start..].chunks_mut(1 << 20).enumerate() {
            let at = *address + ((i as u64) << 20);
            e2e::eventually("the memory can be read", Duration::from_secs(5), || file.read_exact_at(part, at).ok());
        }
    }
    all
}

fn regions(dir: &Path, name: &str) -> Vec<(u64, u64)> {
    let list: Value = serde_json::from_str(&ok(dir, &["pool", "ls", "store", "--json"])).unwrap();
    let found = list.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap();
    found["regions"].as_array().unwrap().iter().map(|r| (r[0].as_u64().unwrap(), r[1].as_u64().unwrap())).collect()
}

/// Pages that differ.
fn differing(a: &[u8], b: &[u8]) -> Vec<usize> {
    assert_eq!(a.len(), b.len());
    let pages = a.chunks(4096).zip(b.chunks(4096)).enumerate();
    pages.filter(|(_, (a, b))| a != b).map(|(page, _)| page).take(8).collect()
}

/// What the pool takes for checkpoints, as `pageone pool du` says.
fn physical(dir: &Path) -> u64 {
    let du: Value = serde_json::from_str(&ok(dir, &["pool", "du", "store", "--json"])).unwrap();
    du["physical_bytes"].as_u64().unwrap()
}

/// A program that fills 64 MiB and then sleeps.
fn sleeper() -> Child {
    sleeping("import time,sys,os\nb=bytearray(os.urandom(1<<20))*64\nprint('ready',flush=True)\ntime.sleep(600)")
}

/// A program of Python that sleeps when it has said that it is ready: from then on its memory stays
/// what it is.
fn sleeping(script: &str) -> Child {
    let mut child = Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
    let state = || procfs::Stat::of(Some(child.id() as i32)).unwrap().state();
    e2e::eventually("it sleeps", Duration::from_secs(60), || (state() == Some('S')).then_some(()));
    child
}

#[test]
fn any_process_can_be_stopped_and_stored() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut child = sleeper();
    let pid = child.id() as i32;
    let (code, _, err) = run(dir.path(), &["checkpoint", &pid.to_string(), "--to", "store"]);
    assert!(code == Some(1) && err.contains("pageone run"), "{err}");
    let first = checkpoint(dir.path(), None, pid, "first", &["--stop"]);
    assert!(first["memory_bytes"].as_u64().unwrap() >= 64 << 20);
    // Each of its megabytes is the same.
    assert!(first["stored_bytes"].as_u64().unwrap() < 16 << 20, "{first}");
    let second = checkpoint(dir.path(), None, pid, "second", &["--stop"]);
    assert!(second["stored_bytes"].as_u64().unwrap() < 1 << 20, "{second}");
    let want = memory(pid, &regions(dir.path(), "first"));
    assert!(restore(dir.path(), "first") == want && restore(dir.path(), "second") == want);
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert!(!stat.contains(") T "), "it runs again");
    ok(dir.path(), &["pool", "rm", "store", "first"]);
    assert!(restore(dir.path(), "second") == want, "what the second needs is still there");
    assert!(ok(dir.path(), &["pool", "check", "store"]).contains("mblocks"));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_checkpoint_leaves_nobody_stopped() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    // One command stops both, and is killed while one or both stand.
    let mut children = [sleeper(), sleeper()];
    let pids = children.each_ref().map(|child| child.id() as i32);
    for wait in [5, 20, 60, 150, 300] {
        let mut command = Command::new(program("pageone"));
        command.arg("checkpoint").args(pids.map(|pid| pid.to_string())).args(["--to", "store", "--stop"]);
        let mut running = command.env("PAGEONE_POOLS", dir.path().join("names")).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        running.kill().unwrap();
        running.wait().unwrap();
        for pid in pids {
            e2e::eventually("the process runs again", Duration::from_secs(5), || {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
                (!stat.contains(") T ")).then_some(())
            });
        }
    }
    checkpoint(dir.path(), None, pids[0], "whole", &["--stop"]);
    assert!(restore(dir.path(), "whole") == memory(pids[0], &regions(dir.path(), "whole")));
    assert!(ok(dir.path(), &["pool", "check", "store"]).contains("mblocks"));
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// What the guard is for: the command is killed while threads of the process go first and stand.
#[test]
fn the_guard_gives_threads_their_policy_back() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let (mut usual, mut own) = (sleeper(), sleeper());
    let [pid, own_pid] = [&usual, &own].map(|child| child.id() as i32);
    // This one's policy is its own choice.
    if sched::go_first(own_pid).is_err() {
        return skipped("real-time policies are not permitted");
    }
    let before = sched::policy(pid).unwrap();
    let guards = [pid, own_pid].map(|pid| {
        let guard = guard::Guard::start(&[program("pageone").into(), "guard".into()]).unwrap();
        guard.watch(guard::Stopped::Signal, pid, &PidFd::open(pid).unwrap(), &[]).unwrap();
        guard
    });
    sched::go_first(pid).unwrap();
    signal_process(pid, libc::SIGSTOP);
    drop(guards);
    assert_eq!((sched::policy(pid), sched::policy(own_pid)), (Ok(before), Ok(sched::FIRST)));
    e2e::eventually("it runs again", Duration::from_secs(5), || (!procfs::is_stopped(pid).unwrap()).then_some(()));
    for child in [&mut usual, &mut own] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn a_process_that_ends_meanwhile_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let daemon = Daemon::start();
    let mut first = daemon.scenario(&["hold", "4096", "1"]);
    first.expect("ready");
    checkpoint(dir.path(), Some(&daemon), first.pid(), "first", &["--max-pause", "500"]);
    let before = physical(dir.path());
    for wait in [100, 200, 400] {
        let mut client = daemon.scenario(&["steps", "131072"]);
        client.expect("ready");
        let (path, pid) = (daemon.dir.path().display().to_string(), client.pid().to_string());
        let mut command = Command::new(program("pageone"));
        command.args(["--dir", &path, "checkpoint", &pid, "--to", "store", "--name", "cut"]);
        let running = command.env("PAGEONE_POOLS", dir.path().join("names")).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        signal_process(client.pid(), libc::SIGKILL);
        let out = running.wait_with_output().unwrap();
        if out.status.success() {
            ok(dir.path(), &["pool", "rm", "store", "cut"]);
        } else {
            let err = String::from_utf8(out.stderr).unwrap();
            assert!(err.contains(&format!("process {pid}")), "{err}");
        }
        // But for what the pool and the file system need to keep account of it; data would be
        // megabytes.
        let after = physical(dir.path());
        assert!(after <= before + (64 << 10), "its space is free at once: {before}, {after}");
    }
    let (len, want) = (4096 * 4096, memory(first.pid(), &regions(dir.path(), "first")));
    assert!(want.len() == len && restore(dir.path(), "first") == want);
}
