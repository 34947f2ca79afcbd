//! `pageone checkpoint` and `pageone restore`: a client that writes, a stopped process, real
//! guests.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use e2e::{Daemon, Guest, program, signal_process, skipped};
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
/// places, and that is said: then it goes on for a moment, and is stopped again.
fn checkpoint_of_stopped(dir: &Path, daemon: &Daemon, pid: i32, name: &str) -> Value {
    let (path, number) = (daemon.dir.path().display().to_string(), pid.to_string());
    for _ in 0..5 {
        signal_process(pid, libc::SIGSTOP);
        let args = ["--dir", &path, "checkpoint", &number, "--to", "store", "--name", name, "--json"];
        let (code, out, err) = run(dir, &args);
        if code == Some(0) {
            return serde_json::from_str(&out).unwrap();
        }
        assert!(err.contains("let it go on for a moment"), "{err}");
        signal_process(pid, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("process {pid} was stopped within a window five times");
}

fn restore(dir: &Path, name: &str) -> Vec<u8> {
    let file = dir.join("restored");
    ok(dir, &["restore", "store", name, "--to", &file.display().to_string()]);
    std::fs::read(file).unwrap()
}

/// Memory of a process, as the restored file has it.
fn memory(pid: i32, regions: &[(u64, u64)]) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut all = Vec::new();
    for (address, len) in regions {
        let start = all.len();
        all.resize(start + *len as usize, 0);
        file.read_exact_at(&mut all[start..], *address).unwrap();
    }
    all
}

fn regions(dir: &Path, name: &str) -> Vec<(u64, u64)> {
    let list: Value = serde_json::from_str(&ok(dir, &["pool", "ls", "store", "--json"])).unwrap();
    let found = list.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap();
    found["regions"].as_array().unwrap().iter().map(|r| (r[0].as_u64().unwrap(), r[1].as_u64().unwrap())).collect()
}

/// A program that fills 64 MiB and then sleeps.
fn sleeper() -> std::process::Child {
    let script = "import time,sys,os\nb=bytearray(os.urandom(1<<20))*64\nprint('ready',flush=True)\ntime.sleep(600)";
    let mut child = Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
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
    let mut child = sleeper();
    let pid = child.id() as i32;
    for wait in [5, 20, 60, 150] {
        let mut command = Command::new(program("pageone"));
        command.args(["checkpoint", &pid.to_string(), "--to", "store", "--stop", "--name", "killed"]);
        let mut running = command.env("PAGEONE_POOLS", dir.path().join("names")).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        running.kill().unwrap();
        running.wait().unwrap();
        e2e::eventually("the process runs again", Duration::from_secs(5), || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            (!stat.contains(") T ")).then_some(())
        });
        let _ = run(dir.path(), &["pool", "rm", "store", "killed"]);
    }
    checkpoint(dir.path(), None, pid, "whole", &["--stop"]);
    assert!(restore(dir.path(), "whole") == memory(pid, &regions(dir.path(), "whole")));
    child.kill().unwrap();
    child.wait().unwrap();
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
    let mut guard = Command::new(program("pageone"));
    guard.arg("checkpoint-guard").args([pid, own_pid].map(|pid| pid.to_string()));
    let mut guard = guard.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(guard.stdout.as_mut().unwrap()), &mut line).unwrap();
    assert_eq!(line, "ready\n");
    sched::go_first(pid).unwrap();
    signal_process(pid, libc::SIGSTOP);
    drop(guard.stdin.take());
    assert!(guard.wait().unwrap().success());
    assert_eq!((sched::policy(pid), sched::policy(own_pid)), (Ok(before), Ok(libc::SCHED_FIFO)));
    e2e::eventually("it runs again", Duration::from_secs(5), || (!procfs::is_stopped(pid).unwrap()).then_some(()));
    for child in [&mut usual, &mut own] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn a_daemon_that_ends_meanwhile_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "65536", "1"]);
    client.expect("ready");
    let (path, pid) = (daemon.dir.path().display().to_string(), client.pid().to_string());
    let mut seen = Vec::new();
    // Too early the command knows of no daemon yet, too late it is done.
    let noticed = [100, 30, 300, 1000].into_iter().any(|wait| {
        let mut command = Command::new(program("pageone"));
        let name = format!("cut-{wait}");
        command.args(["--dir", &path, "checkpoint", &pid, "--to", "store", "--name", &name]);
        let running = command.env("PAGEONE_POOLS", dir.path().join("names")).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        daemon.kill();
        let out = running.wait_with_output().unwrap();
        daemon.restart();
        seen.push(String::from_utf8(out.stderr).unwrap());
        out.status.code() == Some(1) && seen.last().is_some_and(|err| err.contains("take the checkpoint again"))
    });
    assert!(noticed, "{seen:?}");
    checkpoint(dir.path(), Some(&daemon), client.pid(), "whole", &["--max-pause", "500"]);
    client.go();
}

#[test]
fn memory_merges_on_after_a_checkpoint_and_no_frame_is_kept_for_nobody() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["churn", "8192", "8"]);
    client.expect("ready");
    client.tell("go");
    for i in 0..6 {
        let done = checkpoint(dir.path(), Some(&daemon), client.pid(), &format!("c{i}"), &["--max-pause", "2000"]);
        assert_eq!(done["memory_bytes"], 8192 * 4096, "also of what the agent had in hand");
        std::thread::sleep(Duration::from_millis(500));
    }
    client.expect("ok");
    // Nearly all that was not discarded: what was written during a checkpoint too.
    let merged = |daemon: &Daemon| daemon.client(client.pid()).unwrap()["pages_merged"].as_u64().unwrap();
    e2e::eventually("it merges on", Duration::from_secs(20), || (merged(&daemon) > 5500).then_some(()));
    drop(client);
    e2e::eventually("the store is empty", Duration::from_secs(30), || {
        daemon.status()["domains"].as_array()?.iter().all(|d| d["segments"] == 0).then_some(())
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn guests_are_stored_while_they_run() {
    let words = match Guest::words(256) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let daemon = Daemon::start();
    let mut command = daemon.run(&[]);
    command.args(&words);
    let mut guest = Guest::start(command);
    guest.pass_rounds(2);
    let first = checkpoint(dir.path(), Some(&daemon), guest.pid(), "first", &["--max-pause", "500"]);
    guest.pass_rounds(1);
    // Stopped, so that it can be compared; the pages written since the first checkpoint are all that is
    // new.
    let second = checkpoint(dir.path(), Some(&daemon), guest.pid(), "second", &["--max-pause", "500"]);
    assert!(second["stored_bytes"].as_u64() < first["stored_bytes"].as_u64(), "{first} {second}");
    signal_process(guest.pid(), libc::SIGSTOP);
    let third = checkpoint(dir.path(), Some(&daemon), guest.pid(), "third", &[]);
    let want = memory(guest.pid(), &regions(dir.path(), "third"));
    let got = restore(dir.path(), "third");
    assert_eq!(got.len(), want.len(), "{third}");
    let pages = got.chunks(4096).zip(want.chunks(4096)).enumerate();
    let differ: Vec<usize> = pages.filter(|(_, (got, want))| got != want).map(|(page, _)| page).collect();
    let few = &differ[..differ.len().min(8)];
    let zeros = |bytes: &[u8], page: usize| bytes[page * 4096..][..4096].iter().all(|&b| b == 0);
    let kinds: Vec<_> = few.iter().map(|&page| (zeros(&got, page), zeros(&want, page))).collect();
    assert!(differ.is_empty(), "{} pages, {few:?}, zeros (stored, guest) {kinds:?}: {third}", differ.len());
    signal_process(guest.pid(), libc::SIGCONT);
    guest.pass_rounds(1);
    assert!(daemon.client(guest.pid()).is_some(), "the daemon goes on");
}

/// Pages that differ.
fn differing(a: &[u8], b: &[u8]) -> Vec<usize> {
    assert_eq!(a.len(), b.len());
    let pages = a.chunks(4096).zip(b.chunks(4096)).enumerate();
    pages.filter(|(_, (a, b))| a != b).map(|(page, _)| page).take(8).collect()
}

#[test]
fn what_has_not_changed_is_not_read_again_and_what_has_is_never_missed() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["steps", "16384"]);
    client.expect("ready");
    checkpoint(dir.path(), Some(&daemon), client.pid(), "c0", &["--max-pause", "2000"]);
    let mut unchanged = 0;
    for i in 1..13 {
        client.tell("step");
        client.expect("ok");
        // Now it merges, now it has merged, now it has not begun.
        std::thread::sleep(Duration::from_millis([0, 250, 1500][i % 3]));
        if i % 4 == 0 {
            checkpoint(dir.path(), Some(&daemon), client.pid(), &format!("running-{i}"), &["--max-pause", "2000"]);
        }
        let name = format!("c{i}");
        let done = checkpoint_of_stopped(dir.path(), &daemon, client.pid(), &name);
        unchanged += u64::from(done["pages_unchanged"].as_u64().unwrap() > 10_000);
        let want = memory(client.pid(), &regions(dir.path(), &name));
        assert_eq!(differing(&restore(dir.path(), &name), &want), [0; 0], "{done}");
        signal_process(client.pid(), libc::SIGCONT);
    }
    assert!(unchanged >= 4, "mostly, next to nothing has changed: {unchanged} times");
    let full = checkpoint(dir.path(), Some(&daemon), client.pid(), "full", &["--full", "--max-pause", "2000"]);
    assert_eq!(full["pages_unchanged"], 0);
    // A mark is of one pool, of one daemon, and of one checkpoint that is there.
    ok(dir.path(), &["pool", "rm", "store", "full"]);
    let gone = checkpoint(dir.path(), Some(&daemon), client.pid(), "gone", &["--max-pause", "2000"]);
    assert_eq!(gone["pages_unchanged"], 0);
    daemon.kill();
    daemon.restart();
    let other = checkpoint(dir.path(), Some(&daemon), client.pid(), "other", &["--max-pause", "2000"]);
    assert_eq!(other["pages_unchanged"], 0);
    client.tell("step");
    client.expect("ok");
}

#[test]
fn only_one_checkpoint_of_a_process_is_taken_at_a_time() {
    use std::io::{BufRead, Write};
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "4096", "1"]);
    client.expect("ready");
    let (path, pid) = (daemon.dir.path().display().to_string(), client.pid().to_string());
    let refused = || {
        let (code, _, err) =
            run(dir.path(), &["--dir", &path, "checkpoint", &pid, "--to", "store", "--name", "second"]);
        assert!(code == Some(1) && err.contains("another checkpoint"), "{err}");
    };
    // Another one clears the notes of writes that this one relies on: by the page map,
    let pagemap = std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap();
    rustix::fs::flock(&pagemap, rustix::fs::FlockOperation::LockExclusive).unwrap();
    refused();
    drop(pagemap);
    // and by the daemon.
    e2e::eventually("the daemon knows it", Duration::from_secs(20), || daemon.client(client.pid()));
    let mut holding = std::os::unix::net::UnixStream::connect(daemon.dir.path().join("control.sock")).unwrap();
    writeln!(holding, "{{\"hold\":{pid}}}").unwrap();
    let mut answer = String::new();
    std::io::BufReader::new(&holding).read_line(&mut answer).unwrap();
    assert!(answer.contains("held"), "{answer}");
    refused();
    drop(holding);
    checkpoint(dir.path(), Some(&daemon), client.pid(), "second", &["--max-pause", "500"]);
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
        // But for what the pool and the file system need to keep account of it; data would be megabytes.
        let after = physical(dir.path());
        assert!(after <= before + (64 << 10), "its space is free at once: {before}, {after}");
    }
    let (len, want) = (4096 * 4096, memory(first.pid(), &regions(dir.path(), "first")));
    assert!(want.len() == len && restore(dir.path(), "first") == want);
}

#[test]
fn a_full_pool_is_said_and_can_be_emptied() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("capacity");
    std::fs::create_dir(&small).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=100m", "none"]).arg(&small).output().unwrap();
    if !mount.status.success() {
        return skipped("mounting is not permitted");
    }
    let mounted = Mounted(&small);
    make_pool(dir.path());
    let sleeper = || {
        let script = "import time,sys,os\nb=os.urandom(48<<20)\nprint('ready',flush=True)\ntime.sleep(600)";
        let mut child = Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
        child
    };
    let (mut one, mut two) = (sleeper(), sleeper());
    checkpoint(dir.path(), None, one.id() as i32, "first", &["--stop"]);
    let before = physical(dir.path());
    let pid = two.id().to_string();
    for _ in 0..2 {
        let (code, _, err) = run(dir.path(), &["checkpoint", &pid, "--to", "store", "--stop", "--name", "second"]);
        assert!(code == Some(1) && err.contains("is full") && err.contains("pool rm"), "{err}");
        assert!(physical(dir.path()) <= before + (64 << 10), "what was stored of it is free again");
    }
    let want = memory(one.id() as i32, &regions(dir.path(), "first"));
    assert_eq!(differing(&restore(dir.path(), "first"), &want), [0; 0]);
    // Nothing is left at all; a checkpoint can still be removed.
    let rest = std::fs::File::create(small.join("rest")).unwrap();
    let mut rest = std::io::BufWriter::with_capacity(4096, rest);
    while std::io::Write::write_all(&mut rest, &[1; 4096]).is_ok() {}
    ok(dir.path(), &["pool", "rm", "store", "first"]);
    drop(rest);
    std::fs::remove_file(small.join("rest")).unwrap();
    checkpoint(dir.path(), None, two.id() as i32, "second", &["--stop"]);
    let want = memory(two.id() as i32, &regions(dir.path(), "second"));
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0]);
    for child in [&mut one, &mut two] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    drop(mounted);
}

/// A mounted file system.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        assert!(Command::new("umount").args(["--lazy"]).arg(self.0).status().unwrap().success());
    }
}

#[test]
fn damage_is_named_and_no_wrong_memory_comes_of_it() {
    use std::os::unix::fs::FileExt;
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut child = sleeper();
    let pid = child.id() as i32;
    checkpoint(dir.path(), None, pid, "first", &["--stop"]);
    let want = memory(pid, &regions(dir.path(), "first"));
    // A page that the process has.
    let data = dir.path().join("capacity/data");
    let bytes = std::fs::read(&data).unwrap();
    let page = (1 << 20..want.len()).step_by(4096).find(|&at| want[at..at + 4096].iter().any(|&b| b != 0)).unwrap();
    let at = bytes.chunks(4096).position(|block| *block == want[page..page + 4096]).unwrap() * 4096;
    let file = std::fs::File::options().write(true).open(&data).unwrap();
    file.write_all_at(&[!bytes[at + 7]], at as u64 + 7).unwrap();
    let to = dir.path().join("restored");
    let (code, _, err) = run(dir.path(), &["restore", "store", "first", "--to", &to.display().to_string()]);
    assert!(
        code == Some(1) && err.contains("checkpoint first in pool store is damaged") && err.contains("pool rm"),
        "{err}"
    );
    assert!(!to.exists() && !to.with_extension("part").exists(), "no part of a memory");
    // The next one does not rely on that page.
    checkpoint(dir.path(), None, pid, "second", &["--stop"]);
    let want = memory(pid, &regions(dir.path(), "second"));
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0]);
    // The list itself: everything that it still shows is right, and nothing is changed any more.
    let list = dir.path().join("capacity/mdc-0000000000000001-0");
    let bytes = std::fs::read(&list).unwrap();
    let at = bytes.windows(5).position(|w| w == b"first").unwrap();
    std::fs::File::options().write(true).open(&list).unwrap().write_all_at(b"F", at as u64).unwrap();
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0]);
    let (code, _, err) = run(dir.path(), &["restore", "store", "first", "--to", &to.display().to_string()]);
    assert!(code == Some(1) && err.contains("list of checkpoints in pool store is damaged"), "{err}");
    for args in [
        &["checkpoint", &pid.to_string(), "--to", "store", "--stop", "--name", "third"][..],
        &["pool", "rm", "store", "second"],
    ] {
        let (code, _, err) = run(dir.path(), args);
        assert!(code == Some(1) && err.contains("is damaged") && err.contains("new pool"), "{err}");
    }
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0]);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// What the pool takes for checkpoints, as `pageone pool du` says.
fn physical(dir: &Path) -> u64 {
    let du: Value = serde_json::from_str(&ok(dir, &["pool", "du", "store", "--json"])).unwrap();
    du["physical_bytes"].as_u64().unwrap()
}

#[test]
fn guests_of_one_image_share_what_they_have_in_common() {
    let words = match Guest::words(512) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let daemon = Daemon::start();
    let start = || {
        let mut command = daemon.run(&[]);
        command.args(&words);
        Guest::start(command)
    };
    let mut guests = vec![start()];
    guests[0].pass_rounds(2);
    let take =
        |guest: &Guest, name: &str| checkpoint(dir.path(), Some(&daemon), guest.pid(), name, &["--max-pause", "1000"]);
    take(&guests[0], "first");
    let one = physical(dir.path());
    let again = take(&guests[0], "again");
    let idle = physical(dir.path()) - one;
    guests.extend((1..4).map(|_| start()));
    guests.iter_mut().for_each(|guest| guest.pass_rounds(2));
    for (i, guest) in guests.iter().enumerate().skip(1) {
        take(guest, &format!("guest-{i}"));
    }
    let four = physical(dir.path()) - idle;
    println!(
        "one guest of 512 MiB {} MiB; the same again {:.1} MiB, {:.2} s, {:.0} ms paused; four guests {:.2} times one",
        one >> 20,
        idle as f64 / f64::from(1 << 20),
        again["seconds"].as_f64().unwrap(),
        again["pause_ms"].as_f64().unwrap(),
        four as f64 / one as f64
    );
    assert!(idle * 20 <= 512 << 20, "a second checkpoint took {idle} bytes");
    assert!(four * 10 <= one * 16, "four guests take {four} bytes, one {one}");
}
