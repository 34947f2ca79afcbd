//! Recycling: what a guest marks as free is taken back, and nothing else.

use std::time::Duration;

use e2e::{Client, Daemon, Guest, eventually, recycler_guests, recycler_words, skipped};
use serde_json::Value;

fn recycled_total(daemon: &Daemon, pid: i32) -> u64 {
    daemon.client(pid).and_then(|c| c["recycling"]["pages_recycled_total"].as_u64()).unwrap_or(0)
}

/// Resident anonymous memory of a process, in KiB.
fn resident(client: &Client) -> u64 {
    kmem::procfs::smaps_rollup(Some(client.pid())).unwrap().anonymous
}

fn daemon() -> Daemon {
    Daemon::with(&["--merge-period", "0.2", "--reclaim-period", "0.2"])
}

#[test]
fn pages_that_a_program_marks_come_back_and_no_others() {
    let daemon = daemon();
    let mut client = daemon.scenario(&["recycle", "8192", "3"]);
    client.expect("ready");
    // Merged pages among them: a quarter of the contents is distinct.
    daemon.wait_merged(client.pid(), 8192);
    let before = resident(&client);
    client.tell("free");
    client.expect("ok");
    let status = eventually("every marked page is recycled", Duration::from_secs(20), || {
        let client = daemon.client(client.pid())?;
        let is_all = client["recycling"]["pages_recycled_total"].as_u64()? >= 4096;
        (is_all && client["pages_recycled"] == 4096 && client["pages_merged"] == 4096).then_some(client)
    });
    assert_eq!(status["recycling"]["pages_recycled_total"], 4096, "{status}");
    assert!(resident(&client) <= before + 1024, "{} KiB and now {}", before, resident(&client));
    let text = daemon.pageone(&["status"]).output().unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("free pages: 16 MiB taken back of 32"), "{text}");
    client.tell("take");
    client.expect("ok");
    eventually("pages in use are no recycled pages", Duration::from_secs(20), || {
        (daemon.client(client.pid())?["pages_recycled"] == 0).then_some(())
    });
}

#[test]
fn unmerged_memory_is_given_back() {
    let daemon = Daemon::with(&["--merge-period", "60", "--reclaim-period", "0.2"]);
    let mut client = daemon.scenario(&["recycle", "8192", "3"]);
    client.expect("ready");
    let before = resident(&client);
    client.tell("free");
    client.expect("ok");
    eventually("half of the memory is back", Duration::from_secs(20), || {
        (resident(&client) + 15_000 < before).then_some(())
    });
    // A restarted daemon takes the pool over.
    client.tell("take");
    client.expect("ok");
}

#[test]
fn pages_in_use_are_never_taken_while_the_daemon_comes_and_goes() {
    let mut daemon = daemon();
    let mut client = daemon.scenario(&["recycle", "8192", "0"]);
    client.expect("ready");
    client.tell("work");
    for round in 0..3 {
        eventually("recycling", Duration::from_secs(60), || {
            (recycled_total(&daemon, client.pid()) > 2000).then_some(())
        });
        if round < 2 {
            daemon.kill();
            daemon.restart();
        }
    }
    client.tell("enough");
    println!("{}", client.hear());
    client.expect("ok");
    println!("{}", daemon.client(client.pid()).unwrap());
}

#[test]
fn ram_that_others_map_is_not_recycled_and_says_what_to_do() {
    if std::process::Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        return skipped("there is no qemu-system-x86_64: run 'scripts/deps.sh demo'");
    }
    let daemon = daemon();
    let mut command = daemon.run(&["--ppr"]);
    // It never runs anything: what counts is where its RAM lies.
    command.args(
        "qemu-system-x86_64 -accel tcg,tb-size=16 -cpu qemu64,-cx16 -m 64 -nodefaults -no-user-config -S".split(' '),
    );
    command.args(
        "-display none -object memory-backend-memfd,id=ram,size=64M,share=on -machine memory-backend=ram".split(' '),
    );
    command.stderr(std::process::Stdio::piped());
    let mut guest = command.stdin(std::process::Stdio::null()).spawn().unwrap();
    let why = eventually("it is refused", Duration::from_secs(60), || {
        let client = daemon.client(guest.id() as i32)?;
        assert_ne!(client["recycling"]["state"], "recycling");
        client["recycling"]["why"].as_str().map(str::to_string)
    });
    guest.kill().unwrap();
    let said = guest.wait_with_output().unwrap().stderr;
    assert!(why.contains("share=on") && why.contains("free-page-reporting"), "{why}");
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("not taken back") && said.contains("memory-backend-memfd"), "{said}");
}

#[test]
fn a_hostile_program_hurts_itself_only() {
    let daemon = daemon();
    let mut good = daemon.scenario(&["recycle", "4096", "6"]);
    let mut bad = daemon.scenario(&["recycle", "4096", "6"]);
    good.expect("ready");
    bad.expect("ready");
    good.tell("work");
    bad.tell("hostile");
    for client in [&mut good, &mut bad] {
        println!("{}", client.hear());
        client.expect("ok");
    }
    good.tell("free");
    good.expect("ok");
    bad.tell("free");
    bad.expect("ok");
    let is = |pid, state: &str| {
        let of = |client: &Value| client["recycling"]["state"] == *state;
        daemon.client(pid).as_ref().is_some_and(of).then_some(())
    };
    eventually("the program that overwrote the header is dropped", Duration::from_secs(20), || {
        is(bad.pid(), "dropped")
    });
    is(good.pid(), "recycling").unwrap();
    let before = recycled_total(&daemon, good.pid());
    good.tell("take");
    good.expect("ok");
    good.tell("free");
    good.expect("ok");
    eventually("the other goes on", Duration::from_secs(20), || {
        (recycled_total(&daemon, good.pid()) >= before + 2000).then_some(())
    });
    // It is merged all the same.
    is(bad.pid(), "dropped").unwrap();
    assert_eq!(daemon.client(bad.pid()).unwrap()["state"], "merging");
}

/// Seconds of checksummed work in a guest: 45, or ten minutes in the soak.
fn work_seconds() -> u64 {
    if std::env::var_os("PAGEONE_SOAK_SECONDS").is_some() { 600 } else { 45 }
}

/// Starts a guest of this kernel whose free pages are recycled.
fn guest(daemon: &Daemon, kernel: &(String, String), work: &str) -> Guest {
    let mut command = daemon.run(&["--ppr"]);
    // What the daemon, or a reboot, would do to QEMU has to end the test, and so does anything that
    // it says.
    command.args(recycler_words(kernel, 256, &format!("STAY=1 {work}")));
    Guest::start(command)
}

/// Waits until the guest has done all of its work, every round of it right; gives the module's
/// statistics. Where its host has held pages for longer than a second it marks nothing until the
/// host lets go, and says so: how often depends on the host's speed.
pub(crate) fn finish(guest: &mut Guest, seconds: u64) -> impl Fn(&str) -> u64 + use<> {
    let done = |guest: &mut Guest| {
        guest.rounds();
        guest.console().iter().any(|line| line.contains("LOAD all done")).then_some(())
    };
    eventually("the guest has done its work", Duration::from_secs(seconds + 90), || done(guest));
    let console = guest.console();
    for line in &console {
        let bad = ["BUG", "WARNING", "refused", "still holds"].iter().any(|word| line.contains(word));
        assert!(!bad, "{console:#?}");
    }
    println!("the host has held pages {} times", console.iter().filter(|line| line.contains("has held")).count());
    assert!(console.iter().any(|line| line.contains("PPR unloaded")), "{console:#?}");
    move |name| {
        let value = |line: &String| line.trim().strip_prefix("PPR-STAT ")?.strip_prefix(name)?.trim().parse().ok();
        console.iter().find_map(value).unwrap_or_else(|| panic!("no {name} in {console:#?}"))
    }
}

/// Makes a guest's agent as slow as it can be: it runs when nothing else wants to.
fn slow_down(pid: i32) {
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.trim() == "pageone-agent" {
            let tid = task.file_name().into_string().unwrap();
            let chrt = std::process::Command::new("chrt").args(["--idle", "--pid", "0", &tid]).status().unwrap();
            assert!(chrt.success());
            return;
        }
    }
    panic!("process {pid} has no agent");
}

#[test]
fn guests_of_every_kernel_keep_every_byte_while_their_free_pages_are_taken() {
    let kernels = match recycler_guests() {
        Ok(kernels) => kernels,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::with(&["--merge-period", "1", "--reclaim-period", "0.2"]);
    let seconds = work_seconds();
    let work = format!("PPR=1 PPR_ARGS=check=1 WORK=hungry_{seconds}");
    // One guest of each kernel works, the first with a host that is as slow as can be; one more
    // loads and unloads the module.
    let mut guests: Vec<Guest> = kernels.iter().map(|kernel| guest(&daemon, kernel, &work)).collect();
    guests.push(guest(&daemon, &kernels[0], &format!("{work} CHURN=50")));
    let slow = guests[0].pid();
    let recycles = || daemon.client(slow).is_some_and(|c| c["recycling"]["state"] == "recycling");
    eventually("the agent is there", Duration::from_secs(30), || recycles().then_some(()));
    slow_down(slow);
    for (number, guest) in guests.iter_mut().enumerate() {
        let stat = finish(guest, seconds);
        let client = daemon.client(guest.pid()).unwrap();
        println!("{}: {client}", guest.pid());
        println!("waits {} of {} leaves, longest {} us", stat("waits"), stat("leaves"), stat("wait_longest_ns") / 1000);
        assert_eq!(stat("missed"), 0, "an allocation was not seen");
        let recycled = client["recycling"]["pages_recycled_total"].as_u64().unwrap();
        assert!(recycled > 5_000, "guest {number}: the test proves nothing if nothing is recycled: {client}");
        assert!(guest.rounds() > 1);
    }
}

#[test]
fn a_hostile_guest_hurts_itself_only() {
    let kernels = match recycler_guests() {
        Ok(kernels) => kernels,
        Err(why) => return skipped(&why),
    };
    let mut daemon = Daemon::with(&["--merge-period", "0.5", "--reclaim-period", "0.2"]);
    let mut good = guest(&daemon, &kernels[0], "PPR=1 PPR_ARGS=check=1 WORK=hungry_20");
    let bad = guest(&daemon, &kernels[0], "WORK=fuzz_12");
    eventually("the hostile guest has begun", Duration::from_secs(60), || {
        bad.console().iter().any(|line| line.contains("LOAD fuzz pools=1")).then_some(())
    });
    // It zeroes its own memory, and may die or hang of it, with or without a word; while it lives,
    // it spoils the header in the end, and is dropped (`a_hostile_program_hurts_itself_only` has
    // that for certain).
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let mut seen = "hanging".to_string();
    while std::time::Instant::now() < deadline {
        let state = daemon.client(bad.pid()).map(|c| c["recycling"]["state"].as_str().unwrap_or("").to_string());
        let state = state.unwrap_or_else(|| "dead".into());
        let hangs =
            bad.console().iter().any(|line| line.contains("panic") || line.contains("Oops") || line.contains("fault"));
        if state == "dropped" || state == "dead" || hangs {
            seen = state;
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("the hostile guest is {seen}");
    let stat = finish(&mut good, 20);
    assert_eq!(stat("missed"), 0);
    let client = daemon.client(good.pid()).unwrap();
    assert_eq!(client["recycling"]["state"], "recycling");
    assert!(client["recycling"]["pages_recycled_total"].as_u64() > Some(1_000), "{client}");
    drop(good);
    drop(bad);
    assert_eq!(daemon.stop(), Some(0), "the daemon is well");
}
