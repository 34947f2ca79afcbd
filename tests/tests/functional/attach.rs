//! `pageone attach`: programs and guests that were started without the agent.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, Guest, eventually, program, skipped};

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Attaches a process or guest; gives what the command said, and whether it was done.
fn attach(daemon: &Daemon, target: impl ToString) -> (bool, String) {
    let output = daemon.pageone(&["attach", &target.to_string()]).output().unwrap();
    (output.status.success(), text(&output))
}

/// The reason why a process is refused. It must run on.
fn refused(daemon: &Daemon, pid: i32) -> String {
    let (done, said) = attach(daemon, pid);
    assert!(!done, "it was attached: {said}");
    println!("{said}");
    said
}

/// `PAGEONE_ATTACH_ROUNDS`, or 10.
fn many_rounds() -> u32 {
    std::env::var("PAGEONE_ATTACH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(10)
}

fn detach(daemon: &Daemon, target: impl ToString) {
    let output = daemon.pageone(&["detach", &target.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// A program of the kind that is attached, without the agent.
fn events(words: &[&str]) -> Client {
    let mut command = Command::new(program("pageone-test-client"));
    command.arg("events").args(words);
    let mut client = Client::spawn(command);
    client.expect("ready");
    client
}

/// What the descriptors of a process name, but for what its loader opens now and then.
fn descriptors(pid: i32) -> Vec<String> {
    let all = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    // The program may close one meanwhile.
    let names = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| !name.contains("libm.so") && !name.contains("/ld.so.cache"))
        .collect()
}

/// KiB that a process has marked for the kernel's KSM.
fn marked_kib(pid: i32) -> u64 {
    e2e::smaps_kib(pid, "Size", "mg")
}

#[test]
fn a_program_that_runs_is_attached_merges_and_is_detached_again_and_again() {
    let daemon = Daemon::start();
    let mut client = events(&["16384", "4"]);
    let pid = client.pid();
    assert_eq!(marked_kib(pid), 64 << 10);
    let before = descriptors(pid);
    for round in 0..3 {
        let (done, said) = attach(&daemon, pid);
        assert!(done && said.contains("64 MiB"), "{said}");
        daemon.wait_merged(pid, 16_000);
        client.go();
        client.tell("fork");
        client.expect("ok");
        client.tell("rewrite");
        client.expect("ok");
        if round == 0 {
            let (done, said) = attach(&daemon, pid);
            assert!(done && said.contains("is a client already"), "{said}");
        }
        detach(&daemon, pid);
        client.go();
        assert_eq!(marked_kib(pid), 64 << 10, "the program's mark is back");
        // What it shared with the daemon goes when the connection has ended.
        eventually("it is no client, and has no frames and descriptors", Duration::from_secs(60), || {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
            let is_left = !maps.contains("/memfd:pageone") && descriptors(pid) == before;
            (is_left && daemon.client(pid).is_none()).then_some(())
        });
    }
}

#[test]
fn a_guest_that_nobody_prepared_is_attached_and_keeps_every_byte() {
    let words = match Guest::words(192) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::with(&["--merge-period", "1"]);
    let start = |more: &[&str]| {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(more);
        Guest::start(command)
    };
    let sandbox = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];
    const UUID: &str = "5ab1c1a0-3c5f-4a3e-9a0e-0123456789ab";
    let first = format!("first-{}", std::process::id());
    let mut guests = [
        start(&["-name", &format!("guest={first},debug-threads=on")]),
        start(&[&sandbox[..], &["-uuid", UUID]].concat()),
    ];
    for guest in &mut guests {
        guest.pass_rounds(1);
    }
    // By their numbers, and as people call them.
    let called = [guests.each_ref().map(|guest| guest.pid().to_string()), [first.clone(), UUID.to_uppercase()]];
    for called in called {
        for target in &called {
            let (done, said) = attach(&daemon, target);
            assert!(done && said.contains("192 MiB"), "{said}");
        }
        for (guest, target) in guests.iter_mut().zip(&called) {
            daemon.wait_merged(guest.pid(), 15_000);
            guest.pass_rounds(1);
            detach(&daemon, target);
            guest.pass_rounds(1);
        }
    }
    let twin = start(&["-name", &first]);
    let (done, said) = attach(&daemon, &first);
    let pids = [guests[0].pid(), twin.pid()].map(|pid| pid.to_string());
    assert!(
        !done && said.contains("several processes are called") && pids.iter().all(|pid| said.contains(pid)),
        "{said}"
    );
}

#[test]
fn what_cannot_be_attached_is_refused_with_the_reason_and_runs_on() {
    let daemon = Daemon::start();
    let kinds = [
        ("shared", "is shared with other processes or a file"),
        ("inherited", "children inherit its memory"),
        ("locked", "pinned or locked"),
        ("unmarked", "has marked no memory"),
    ];
    for (kind, reason) in kinds {
        let mut client = events(&["1024", "4", kind]);
        let said = refused(&daemon, client.pid());
        assert!(said.contains(reason), "{kind}: {said}");
        client.go();
    }
    assert!(refused(&daemon, 0x3fff_ffff).contains("there is no process"));
    assert!(refused(&daemon, 2).contains("thread of the kernel"));
    let mut early = daemon.scenario(&["events", "1024", "4"]);
    early.expect("ready");
    // Another daemon may be meant, so the program is asked.
    let socket = daemon.dir.path().join("agent.sock");
    let pid = early.pid().to_string();
    let asked = daemon.pageone(&["attach", "--socket", socket.to_str().unwrap(), &pid]).output().unwrap();
    assert!(text(&asked).contains("it has had the agent since its start"), "{}", text(&asked));
    early.go();
    let elsewhere =
        daemon.pageone(&["attach", "--socket", "/no/such/socket", &early.pid().to_string()]).output().unwrap();
    assert!(text(&elsewhere).contains("does not see /no/such/socket"), "{}", text(&elsewhere));
}

#[test]
fn a_client_is_one_already_whatever_its_threads_do() {
    let daemon = Daemon::start();
    // It waits in read(2).
    let mut client = daemon.scenario(&["hold", "1024", "4"]);
    client.expect("ready");
    let pid = client.pid().to_string();
    eventually("it is a client", Duration::from_secs(10), || {
        daemon.client(client.pid()).filter(|client| client["state"] == "merging")
    });
    // Were it waited for, that would take an hour.
    let out = daemon.pageone(&["attach", "--timeout", "3600", &pid]).output().unwrap();
    assert!(out.status.success() && text(&out).contains("is a client already"), "{}", text(&out));
    client.go();
}

/// The loader's own words come by single steps.
#[test]
fn a_library_that_cannot_be_loaded_is_an_error_in_the_loaders_words() {
    let daemon = Daemon::start();
    let mut client = events(&["1024", "4"]);
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("libpageone_agent.so");
    std::fs::write(&library, "no library").unwrap();
    for _ in 0..3 {
        let mut command = daemon.pageone(&["attach", &client.pid().to_string()]);
        let output = command.env("PAGEONE_AGENT", &library).output().unwrap();
        assert!(!output.status.success());
        assert!(
            text(&output).contains("could not load the agent: ") && text(&output).contains("file too short"),
            "{}",
            text(&output)
        );
        client.go();
    }
    assert!(attach(&daemon, client.pid()).0);
    client.go();
}

#[test]
fn a_static_program_is_refused() {
    let busybox = Command::new("busybox").args(["sleep", "60"]).stdin(Stdio::null()).spawn();
    let mut child = match busybox {
        Ok(child) => child,
        Err(why) => return skipped(&format!("there is no busybox: {why}")),
    };
    let daemon = Daemon::start();
    let said = text(&daemon.pageone(&["attach", &child.id().to_string()]).output().unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    if said.contains("ppoll") {
        return skipped("busybox is linked dynamically here");
    }
    assert!(said.contains("statically linked: it loads no libraries"), "{said}");
}

#[test]
fn a_program_that_never_waits_for_events_is_left_as_it_is() {
    let daemon = Daemon::start();
    // It waits in read(2).
    let mut client = Client::spawn({
        let mut command = Command::new(program("pageone-test-client"));
        command.args(["hold", "1024", "4"]);
        command
    });
    client.expect("ready");
    let pid = client.pid();
    let begin = Instant::now();
    let said = text(&daemon.pageone(&["attach", "--timeout", "1", &pid.to_string()]).output().unwrap());
    assert!(said.contains("was not seen to wait for events in 1 s"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(60) * e2e::patience());
    client.go();
    assert!(!std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("pageone_agent"));
}

/// The thread that calls the loader needs nobody to bring it back.
#[test]
fn the_program_goes_on_when_the_attaching_process_is_killed_at_any_moment() {
    let daemon = Daemon::start();
    let mut client = events(&["1024", "4"]);
    let pid = client.pid();
    // The moments are spread over the time that it takes here.
    let begin = Instant::now();
    assert!(attach(&daemon, pid).0);
    let whole = begin.elapsed();
    detach(&daemon, pid);
    let (mut killed, rounds) = (0, 20);
    for round in 0..rounds {
        let mut attaching = daemon.pageone(&["attach", &pid.to_string()]).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole * round / rounds);
        killed += u32::from(attaching.try_wait().unwrap().is_none());
        attaching.kill().unwrap();
        attaching.wait().unwrap();
        client.go();
        if daemon.client(pid).is_some() {
            detach(&daemon, pid);
        }
    }
    println!("{killed} of {rounds} were killed before they had ended");
    assert!(killed > 0);
    eventually("it is attached at last", Duration::from_secs(20), || attach(&daemon, pid).0.then_some(()));
    daemon.wait_merged(pid, 800);
    client.go();
}

/// `PAGEONE_ATTACH_ROUNDS` rounds (`make test-attach`: 1,000) on a program whose threads allocate,
/// load libraries, write and discard, while its first thread polls every millisecond.
#[test]
fn a_busy_program_bears_many_rounds_of_attach_and_detach() {
    let rounds = many_rounds();
    let daemon = Daemon::with(&["--merge-period", "0.05"]);
    let mut client = events(&["2048", "4", "1"]);
    let pid = client.pid();
    let rss = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmSize")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (mut longest, mut total, mut size, mut merged) = (Duration::ZERO, Duration::ZERO, 0, 0);
    for round in 0..rounds {
        let begin = Instant::now();
        let (done, said) = attach(&daemon, pid);
        assert!(done, "round {round}: {said}");
        longest = longest.max(begin.elapsed());
        total += begin.elapsed();
        if round % 10 == 0 {
            daemon.wait_merged(pid, 1000);
            merged += 1;
        }
        if round % 2 == 0 {
            client.go();
        }
        detach(&daemon, pid);
        if round % 2 == 1 {
            client.go();
        }
        if round == 9 {
            size = rss();
        }
    }
    println!(
        "{rounds} rounds, {merged} with merged memory: attached in {:.1} ms on average, {:.1} ms at most; {} KiB more address space since round 10",
        total.as_secs_f64() * 1e3 / f64::from(rounds),
        longest.as_secs_f64() * 1e3,
        rss().saturating_sub(size)
    );
    // What each round left would add up.
    assert!(rounds < 100 || rss() < size + 64 * 1024, "{} KiB, then {}", size, rss());
}

/// A guest, the same: its own checks go on all the time.
#[test]
fn a_busy_guest_bears_many_rounds_of_attach_and_detach() {
    let rounds = many_rounds();
    let words = match Guest::words(192) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::with(&["--merge-period", "0.2"]);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    let mut guest = Guest::start(command);
    guest.pass_rounds(1);
    let before = guest.rounds();
    let mut merged = 0;
    for round in 0..rounds {
        let (done, said) = attach(&daemon, guest.pid());
        assert!(done, "round {round}: {said}");
        if round % 10 == 0 {
            daemon.wait_merged(guest.pid(), 5_000);
        }
        merged += daemon.client(guest.pid()).and_then(|c| c["pages_merged"].as_u64()).unwrap_or(0);
        detach(&daemon, guest.pid());
        guest.rounds();
    }
    guest.pass_rounds(1);
    println!("{rounds} rounds, {merged} pages merged in all, {} rounds of the guest's checks", guest.rounds() - before);
}

#[test]
fn the_agent_is_not_loaded_twice() {
    let daemon = Daemon::start();
    let mut client = events(&["1024", "4"]);
    let pid = client.pid();
    for _ in 0..2 {
        assert!(attach(&daemon, pid).0);
        detach(&daemon, pid);
    }
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let agents =
        maps.lines().filter(|line| line.contains("libpageone_agent.so") && line.contains(" 00000000 ")).count();
    assert_eq!(agents, 1, "{maps}");
    client.go();
}

#[test]
fn a_users_own_daemon_is_roots_to_look_at_and_no_other_users_and_merges_nothing_of_others() {
    use std::os::unix::fs::{PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can become another user");
    }
    // Where every user can read it.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::copy(program("pageone"), dir.path().join("pageone")).unwrap();
    let sockets = dir.path().join("sockets");
    std::fs::create_dir(&sockets).unwrap();
    chown(&sockets, Some(65534), Some(65534)).unwrap();
    let by = |uid: u32, args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={uid}"), "--clear-groups"]).arg(dir.path().join("pageone"));
        command.arg("--dir").arg(&sockets).args(args);
        command
    };
    if !by(0, &["--version"]).output().is_ok_and(|out| out.status.success()) {
        return skipped("no setpriv (util-linux)");
    }
    let mut daemon = by(65534, &["daemon"]).stderr(Stdio::null()).spawn().unwrap();
    eventually("the user's daemon answers root", Duration::from_secs(10), || {
        by(0, &["status"]).output().unwrap().status.success().then_some(())
    });
    let out = by(65533, &["status"]).output().unwrap();
    assert!(!out.status.success() && text(&out).contains("user 65534 has the daemon in"), "{}", text(&out));
    let mut client = events(&["16384", "4"]);
    let out = Command::new(program("pageone"))
        .arg("--dir")
        .arg(&sockets)
        .args(["attach", &client.pid().to_string()])
        .output();
    let said = text(&out.unwrap());
    assert!(said.contains("65534") && !said.contains("is attached"), "{said}");
    assert_eq!(marked_kib(client.pid()), 64 << 10, "nothing is loaded");
    client.go();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}
