//! Checkpoints of clients and guests, while the daemon merges them.

use super::*;

#[test]
fn a_daemon_that_ends_meanwhile_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "65536", "1"]);
    client.expect("ready");
    let (path, pid) = (daemon.dir.path().display().to_string(), client.pid().to_string());
    let mut seen = Vec::new();
    let mut take = |attempt: usize, wait: Option<Duration>| {
        let mut command = Command::new(program("pageone"));
        let name = format!("cut-{attempt}");
        command.args(["--dir", &path, "checkpoint", &pid, "--to", "store", "--name", &name]);
        let running = command.env("PAGEONE_POOLS", dir.path().join("names")).stderr(Stdio::piped()).spawn().unwrap();
        if let Some(wait) = wait {
            std::thread::sleep(wait);
            daemon.kill();
        }
        let out = running.wait_with_output().unwrap();
        if wait.is_some() {
            daemon.restart();
            // Before that the command knows of no daemon.
            e2e::eventually("the client is back", Duration::from_secs(20), || daemon.client(client.pid()));
        }
        seen.push(String::from_utf8(out.stderr).unwrap());
        out.status.code() == Some(1) && seen.last().is_some_and(|err| err.contains("take the checkpoint again"))
    };
    // The first one stores everything, and takes longer. A new daemon has no change log: the others
    // read everything.
    take(0, Some(Duration::ZERO));
    take(1, None);
    take(2, Some(Duration::ZERO));
    let begin = Instant::now();
    take(3, None);
    let whole = begin.elapsed();
    // Too early the command knows of no daemon yet, too late it is done: all of its time is tried.
    let noticed = (4..34).any(|attempt| take(attempt, Some(whole.mul_f64(attempt as f64 * 0.618 % 1.0))));
    assert!(noticed, "{seen:?}");
    checkpoint(dir.path(), Some(&daemon), client.pid(), "whole", &["--max-pause", "500"]);
    client.go();
}

#[test]
fn clients_are_stored_at_once_while_they_run() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let daemon = Daemon::start();
    let mut clients = [1, 2, 3].map(|_| daemon.scenario(&["hold", "16384", "1"]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    let path = daemon.dir.path().display().to_string();
    let pids: Vec<String> = clients.iter().map(|client| client.pid().to_string()).collect();
    let mut args = vec!["--dir", &path, "checkpoint", "--to", "store", "--max-pause", "1000", "--json"];
    args.extend(pids.iter().map(String::as_str));
    for _ in 0..2 {
        let out = ok(dir.path(), &args);
        println!("{out}");
        let stored: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for client in &clients {
            let is_of = |stored: &&Value| stored["name"].as_str().unwrap().contains(&format!("-{}-", client.pid()));
            let stored = stored.iter().find(is_of).unwrap();
            let name = stored["name"].as_str().unwrap();
            let want = memory(client.pid(), &regions(dir.path(), name));
            assert_eq!(differing(&restore(dir.path(), name), &want), [0; 0], "{name}");
            assert_eq!(procfs::is_stopped(client.pid()).ok(), Some(false));
            let usual = |thread: i32| sched::policy(thread).is_ok_and(sched::is_usual);
            assert!(procfs::threads(client.pid()).unwrap().into_iter().all(usual), "no priority stays");
        }
        // Names have the second.
        std::thread::sleep(Duration::from_millis(1100));
    }
    clients.iter_mut().for_each(|client| client.go());
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
    let alike: u64 = client.hear().trim_start_matches("alike ").parse().unwrap();
    client.expect("ok");
    assert!(alike > 1000, "little could merge: {alike} pages");
    // Nearly all, what was written during a checkpoint too.
    let merged = |daemon: &Daemon| daemon.client(client.pid()).unwrap()["pages_merged"].as_u64().unwrap();
    e2e::eventually("it merges on", Duration::from_secs(20), || (merged(&daemon) >= alike * 95 / 100).then_some(()));
    println!("{} pages are merged, {alike} are like another", merged(&daemon));
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
    // Stopped, so that it can be compared; the pages written since the first checkpoint are all
    // that is new.
    let second = checkpoint(dir.path(), Some(&daemon), guest.pid(), "second", &["--max-pause", "500"]);
    assert!(second["stored_bytes"].as_u64() < first["stored_bytes"].as_u64(), "{first} {second}");
    let third = checkpoint_of_stopped(dir.path(), &daemon, guest.pid(), "third");
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

#[test]
fn what_has_not_changed_is_not_read_again_and_what_has_is_never_missed() {
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["steps", "16384"]);
    client.expect("ready");
    checkpoint(dir.path(), Some(&daemon), client.pid(), "c0", &["--max-pause", "2000"]);
    let (mut unchanged, mut i) = (0, 0);
    // Merging changes pages, too: how soon it has ended differs from machine to machine.
    while i < 12 || unchanged < 4 {
        i += 1;
        assert!(i < 80, "mostly, next to nothing has changed: {unchanged} times");
        client.tell("step");
        client.expect("ok");
        // Now it merges, now it has merged, now it has not begun. A slow machine takes longer.
        std::thread::sleep(Duration::from_millis([0, 250, 1500][i % 3]) * (1 + e2e::patience() / 4));
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
