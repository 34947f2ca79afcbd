//! What lies in the pool: full, damaged, shared.

use super::*;

/// How often what may come too late is tried.
const LIMIT: Duration = Duration::from_secs(300);

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
    let sleeper = || sleeping("import time,sys,os\nb=os.urandom(70<<20)\nprint('ready',flush=True)\ntime.sleep(600)");
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
    // Of two at once that do not fit together one is stored.
    ok(dir.path(), &["pool", "rm", "store", "second"]);
    let (first, second) = (one.id().to_string(), two.id().to_string());
    let (code, out, err) = run(dir.path(), &["checkpoint", &first, &second, "--to", "store", "--stop"]);
    assert!(code == Some(1) && err.contains("1 of 2") && err.contains("is full"), "{out}{err}");
    assert_eq!(out.lines().count(), 1, "{out}{err}");
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
    let spoil = |file: &Path| {
        std::fs::File::options().write(true).open(file).unwrap().write_all_at(b"F", at as u64).unwrap();
    };
    spoil(&list);
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0], "the second file has all of it");
    spoil(&list.with_extension("copy"));
    assert_eq!(differing(&restore(dir.path(), "second"), &want), [0; 0]);
    let (code, _, err) = run(dir.path(), &["restore", "store", "first", "--force", "--to", &to.display().to_string()]);
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

#[test]
fn two_commands_at_once_store_into_one_pool_one_after_the_other() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let (mut children, names) = ([sleeper(), sleeper(), sleeper()], ["one", "two", "three"]);
    let start = |(child, name): (&Child, &&str)| {
        let mut command = Command::new(program("pageone"));
        command.args(["checkpoint", &child.id().to_string(), "--to", "store", "--stop", "--name", name]);
        command.env("PAGEONE_POOLS", dir.path().join("names")).stderr(Stdio::piped()).spawn().unwrap()
    };
    let storing: Vec<Child> = children.iter().zip(&names).map(start).collect();
    for storing in storing {
        let out = storing.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    for (child, name) in children.iter().zip(names) {
        let want = memory(child.id() as i32, &regions(dir.path(), name));
        assert_eq!(differing(&restore(dir.path(), name), &want), [0; 0], "{name}");
    }
    children.iter_mut().for_each(|child| {
        child.kill().unwrap();
        child.wait().unwrap();
    });
}

#[test]
fn several_processes_are_stored_by_one_command_and_others_read_meanwhile() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("no python3");
    }
    let dir = tempfile::tempdir().unwrap();
    make_pool(dir.path());
    let large = || {
        sleeping(
            "import time,os\nb=[os.urandom(1<<20) for _ in range(200)]\nprint('ready',flush=True)\ntime.sleep(600)",
        )
    };
    let mut small = sleeper();
    let mut all = [large(), large()];
    checkpoint(dir.path(), None, small.id() as i32, "first", &["--stop"]);
    let want = memory(small.id() as i32, &regions(dir.path(), "first"));
    let store_all = || {
        // One of them is no process, and one is killed meanwhile.
        let mut ends = large();
        let pids = [all[0].id().to_string(), ends.id().to_string(), "no-such-program".into(), all[1].id().to_string()];
        let mut command = Command::new(program("pageone"));
        command.arg("checkpoint").args(&pids).args(["--to", "store", "--stop", "--json"]);
        command.env("PAGEONE_POOLS", dir.path().join("names")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut storing = command.spawn().unwrap();
        let start = Instant::now();
        while !procfs::is_stopped(ends.id() as i32).unwrap_or(true) && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        ends.kill().unwrap();
        ends.wait().unwrap();
        let mut meanwhile = 0;
        while storing.try_wait().unwrap().is_none() {
            assert_eq!(differing(&restore(dir.path(), "first"), &want), [0; 0]);
            assert!(ok(dir.path(), &["pool", "ls", "store"]).contains("first"));
            meanwhile += 1;
        }
        println!("{meanwhile} restores meanwhile");
        let out = storing.wait_with_output().unwrap();
        let (lines, err) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        let stored: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (out.status.code(), pids, stored, err)
    };
    let (code, pids, stored, err) = e2e::eventually("one is killed before it is stored", LIMIT, || {
        let done = store_all();
        if done.2.len() < 3 {
            return Some(done);
        }
        // This thread got no CPU for that time.
        for stored in &done.2 {
            ok(dir.path(), &["pool", "rm", "store", stored["name"].as_str().unwrap()]);
        }
        None
    });
    assert!(err.contains("no process is called no-such-program") && err.contains("2 of 4"), "{err}");
    assert!(err.contains(&format!("pageone: {}: checkpoint ", pids[1])), "{err}");
    assert_eq!((code, stored.len()), (Some(1), 2));
    for child in &all {
        let is_of = |name: &&str| name.contains(&format!("-{}-", child.id()));
        let name = stored.iter().map(|stored| stored["name"].as_str().unwrap()).find(is_of).unwrap();
        let want = memory(child.id() as i32, &regions(dir.path(), name));
        assert_eq!(differing(&restore(dir.path(), name), &want), [0; 0], "{name}");
    }
    ok(dir.path(), &["pool", "rm", "store", "first"]);
    let used: Value = serde_json::from_str(&ok(dir.path(), &["pool", "du", "store", "--json"])).unwrap();
    assert!(used["checkpoints"][0]["alone_bytes"].as_u64().unwrap() > 190 << 20, "{used}");
    println!("{}{}", ok(dir.path(), &["pool", "du", "store"]), ok(dir.path(), &["pool", "repack", "store"]));
    ok(dir.path(), &["pool", "check", "store"]);
    for child in all.iter_mut().chain([&mut small]) {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
