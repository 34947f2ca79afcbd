//! Guests that check their own files: stored while they do, and gone on as clones.

use super::*;

/// How often a page server is ended.
const SERVERS_KILLED: u64 = 20;

/// A demo guest with a monitor, which says lines back at its second serial port.
pub(super) fn guest_words(place: &Place) -> Option<Vec<String>> {
    guest_words_of(place, MEMORY)
}

/// The same with this much memory, MiB.
pub(super) fn guest_words_of(place: &Place, mib: u32) -> Option<Vec<String>> {
    let mut words = Guest::words(mib).inspect_err(|why| skipped(why)).ok()?;
    let append = words.iter().position(|word| word == "-append").unwrap();
    words[append + 1] += " PAGEONE_ANSWER=1";
    let path = |name: &str| place.path(name).display().to_string();
    let answers = format!("unix:{},server=on,wait=off", path("answers"));
    // A reset does not end it.
    words.retain(|word| word != "-no-reboot");
    words.extend(Qmp::words(&place.path("guest.qmp")));
    words.extend(["-serial".into(), answers]);
    Some(words)
}

#[test]
fn a_guest_is_stored_while_it_works_and_two_clones_go_on_and_diverge() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut source) = place.guest() else { return };
    let pid = source.pid();
    eventually("a prepared guest is merged", Duration::from_secs(120), || {
        let client = place.daemon.client(pid)?;
        let of = |name: &str| client[name].as_u64().unwrap_or(0);
        (of("pages_merged") + of("pages_zero") > 5000).then_some(())
    });
    place.save(pid, "first");
    source.pass_rounds(1);
    let second = place.save(pid, "second");
    let memory_bytes = second["memory_bytes"].as_u64().unwrap();
    assert_eq!(memory_bytes, u64::from(MEMORY) << 20);
    assert!(second["stored_bytes"].as_u64().unwrap() < memory_bytes / 4, "most of it was stored already: {second}");
    // The source goes on after each, and its clones do without it.
    source.pass_rounds(1);
    source.kill();
    assert_eq!(place.names(), ["first", "second"]);
    let both = place.clones("second", 2, &[]);
    for clone in &both.clones {
        clone.pass_rounds(2);
    }
    // The kernel reads few pages more than they need: nobody asks for huge ones in the RAM.
    for clone in &both.clones {
        let start = format!("{:x}-", ram_of(&mut clone.qmp("guest.qmp")));
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", clone.pid)).unwrap();
        let flags = maps.split("VmFlags:").zip(maps.split("VmFlags:").skip(1));
        let ram = flags.filter(|(mapping, _)| mapping.contains(&start)).map(|(_, flags)| flags.lines().next().unwrap());
        let ram: Vec<&str> = ram.collect();
        assert!(ram.len() == 1 && !ram[0].contains(" hg"), "{ram:?}");
    }
    // Each goes its own way, and is told by a number of its own that it is a clone.
    let [mut one, mut other] = [0, 1].map(|at| both.clones[at].qmp("guest.qmp"));
    let number = |qmp: &mut Qmp| qmp.execute("query-vm-generation-id", json!({}))["guid"].clone();
    assert_ne!(number(&mut one), number(&mut other));
    let bytes = memory_bytes as usize;
    let (a, b) = (ram_of(&mut one), ram_of(&mut other));
    let (a, b) = (memory(both.clones[0].pid, a, bytes), memory(both.clones[1].pid, b, bytes));
    let differing = a.chunks(4096).zip(b.chunks(4096)).filter(|(a, b)| a != b).count();
    println!("{differing} of {} pages differ", bytes / 4096);
    assert!((100..bytes / 4096 / 2).contains(&differing), "{differing} pages differ");
    place.ok(&["snapshot", "rm", "store", "first"]);
    // A clone can be rebooted.
    let before = both.clones[0].output().len();
    one.execute("system_reset", json!({}));
    eventually("the clone boots again", Duration::from_secs(240), || {
        both.clones[0].output()[before..].contains("PAGEONE-BOOTED").then_some(())
    });
    both.clones.iter().for_each(|clone| assert!(clone.runs()));
    drop(both);
    assert_eq!(place.names(), ["second"]);
    assert!(place.fails(&["snapshot", "run", "store", "first"]).contains("nothing in the pool is called"));
    place.ok(&["pool", "check", "store"]);
}

#[test]
fn a_prepared_guest_can_be_rebooted_and_stored_then() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut source) = place.guest() else { return };
    Qmp::connect(&place.path("guest.qmp")).execute("system_reset", json!({}));
    let boots = |guest: &Guest| guest.console().iter().filter(|line| line.contains("PAGEONE-BOOTED")).count();
    eventually("it boots again", Duration::from_secs(240), || (boots(&source) >= 2).then_some(()));
    source.pass_rounds(1);
    place.save(source.pid(), "rebooted");
    let clone = place.clones("rebooted", 1, &[]);
    assert!(clone.clones[0].runs());
    drop(clone);
    source.pass_rounds(1);
}

#[test]
fn a_clones_clock_is_set_by_the_guests_agent_and_verify_asks_it() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut words) = guest_words(&place) else { return };
    let value = |name: &str| words.iter().position(|word| word == name).unwrap() + 1;
    let (kernel, initrd) = (value("-kernel"), value("-initrd"));
    // Debian's 6.1 has the console's driver as a module.
    let cache = Path::new(&words[kernel]).ancestors().nth(3).unwrap().to_owned();
    let mut kernels = std::fs::read_dir(cache.join("kernels")).unwrap().flatten().map(|entry| entry.path());
    let Some(newer) = kernels.find(|path| path.display().to_string().contains("/6.12")) else {
        return skipped("no kernel 6.12 is in the cache: scripts/deps.sh ppr fetches it");
    };
    words[kernel] = newer.join("vmlinuz").display().to_string();
    let Ok(agent) = std::fs::read(cache.join("guest-agent.cpio")) else {
        return skipped("qemu-guest-agent is not in the cache: scripts/deps.sh test fetches it, where apt has it");
    };
    let archive = place.path("initrd");
    std::fs::write(&archive, [std::fs::read(&words[initrd]).unwrap(), agent].concat()).unwrap();
    words[initrd] = archive.display().to_string();
    // A fixed start: without the agent the clones' clocks would be there.
    let socket = place.path("agent").display().to_string();
    words.extend(["-rtc", "base=2001-02-03T04:05:06", "-device", "virtio-serial-pci", "-chardev"].map(String::from));
    words.push(format!("socket,id=qga,path={socket},server=on,wait=off"));
    words.extend(["-device", "virtserialport,chardev=qga,name=org.qemu.guest_agent.0"].map(String::from));
    let mut source = Guest::start(place.prepared(&words));
    source.pass_rounds(1);
    place.save(source.pid(), "one");
    let clock = |line: &str| line.split("PAGEONE-CLOCK ").nth(1)?.trim().parse().ok();
    let seconds = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let before = seconds();
    let slow: Option<u64> = source.console().iter().rev().find_map(|line| clock(line));
    assert!(slow.is_some_and(|clock| clock < before), "{slow:?}");
    source.kill();
    let clones = place.clones("one", 2, &[]);
    for clone in &clones.clones {
        let clock: u64 = eventually("its clock is set", Duration::from_secs(60), || {
            clone.output().lines().filter_map(clock).find(|clock| *clock >= before)
        });
        assert!(clock <= seconds() + 1, "{clock}");
    }
    drop(clones);
    let files = place.path("f").display().to_string();
    let text = place.ok(&["snapshot", "verify", "store", "one", "--files", &files]);
    assert!(text.contains("a guest goes on from it, and its agent answers"), "{text}");
}

#[test]
fn ksm_has_all_memory_of_a_clones_process_if_it_is_asked_for() {
    let Some(place) = place_with_a_machines_snapshot() else { return };
    let is_its = |name: &str, options: &[&str]| {
        let clones = place.clones_with("one", name, 1, options, &[]);
        kmem::ksm::process_stat(clones.clones[0].pid).ok()?.merge_any
    };
    let (plain, ksms) = (is_its("plain", &[]), is_its("ksm", &["--ksm"]));
    let (Some(plain), Some(ksms)) = (plain, ksms) else {
        return skipped("the kernel does not say whether KSM has a process: Linux 6.16 does");
    };
    assert!(!plain && ksms);
}

/// A place with the snapshot `one` of a guest that is gone. `None`: that cannot be tried here.
pub(super) fn place_with_a_snapshot() -> Option<Place> {
    let place = can_run().then(Place::new)?;
    let mut source = place.guest()?;
    place.save(source.pid(), "one");
    source.kill();
    Some(place)
}

/// The same of a machine without a kernel.
pub(super) fn place_with_a_machines_snapshot() -> Option<Place> {
    let place = can_run().then(Place::new)?;
    let machine = place.machine("source", &[]);
    place.save(machine.pid(), "one");
    Some(place)
}

/// The page servers of this test's pool.
pub(super) fn servers(place: &Place) -> Vec<i32> {
    let pool = place.path("capacity").display().to_string();
    let is_one = |pid: &i32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&str> = line.split('\0').collect();
        words.get(1) == Some(&"snapshot-server") && words.get(2) == Some(&&*pool)
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_one).collect()
}

/// Kills the page servers, of which there are this many, and waits for the next ones.
pub(super) fn kill_servers(place: &Place, count: usize) {
    let killed = servers(place);
    assert_eq!(killed.len(), count);
    killed.iter().for_each(|server| e2e::signal_process(*server, libc::SIGKILL));
    eventually("other servers", Duration::from_secs(60), || {
        let now = servers(place);
        (now.len() == count && !now.iter().any(|pid| killed.contains(pid))).then_some(())
    });
}

#[test]
fn clones_wait_for_the_next_page_server_and_see_no_wrong_byte() {
    let Some(place) = place_with_a_snapshot() else { return };
    let both = place.clones("one", 2, &[]);
    let mut before = 0;
    for time in 0..SERVERS_KILLED {
        let server = eventually("a page server", Duration::from_secs(20), || {
            servers(&place).into_iter().find(|pid| *pid != before)
        });
        // The pages that are known already are given back, so that there is something to serve.
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        std::thread::sleep(Duration::from_millis(37 * time % 211));
        match time % 4 {
            3 => e2e::signal_process(both.server.id() as i32, libc::SIGHUP),
            _ => e2e::signal_process(server, libc::SIGKILL),
        };
        before = server;
        assert!(both.clones.iter().all(OneClone::runs));
    }
    let rounds: Vec<usize> = both.clones.iter().map(OneClone::rounds).collect();
    for (clone, before) in both.clones.iter().zip(rounds) {
        clone.pass_rounds(before + 2);
    }
}

/// The leases of this test's pool.
fn leases(place: &Place) -> usize {
    let all = std::fs::read_dir(place.path("capacity")).unwrap().flatten();
    all.filter(|entry| entry.file_name().to_string_lossy().starts_with("lease-")).count()
}

#[test]
fn clones_go_on_while_their_pool_is_written_and_their_snapshot_is_removed() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut source) = place.guest() else { return };
    place.save(source.pid(), "one");
    let both = place.clones("one", 2, &[]);
    // Nothing but the leases keeps what only this snapshot needs.
    place.ok(&["snapshot", "rm", "store", "one"]);
    for time in 0..6 {
        source.pass_rounds(1);
        place.save(source.pid(), &format!("later-{time}"));
        match time {
            2 => drop(place.ok(&["snapshot", "prune", "store", "--keep-last", "1"])),
            3 => drop(place.ok(&["pool", "repack", "store"])),
            _ => {}
        }
        // The next server knows the snapshot by the lease alone.
        let [server] = servers(&place)[..] else { panic!("{:?}", servers(&place)) };
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        e2e::signal_process(server, libc::SIGKILL);
        eventually("another server", Duration::from_secs(60), || {
            servers(&place).into_iter().find(|pid| *pid != server)
        });
        assert!(both.clones.iter().all(OneClone::runs));
    }
    let before: Vec<usize> = both.clones.iter().map(OneClone::rounds).collect();
    for (clone, before) in both.clones.iter().zip(before) {
        clone.pass_rounds(before + 2);
    }
    assert!(place.fails(&["pool", "destroy", "store", "--yes"]).contains("are being read"));
    assert_eq!(leases(&place), 1);
    // Killed, command and server, they leave a file that the next writer removes.
    let [server] = servers(&place)[..] else { panic!("{:?}", servers(&place)) };
    both.clones.iter().for_each(|clone| e2e::signal_process(clone.pid, libc::SIGKILL));
    e2e::signal_process(both.server.id() as i32, libc::SIGKILL);
    e2e::signal_process(server, libc::SIGKILL);
    eventually("they are gone", Duration::from_secs(60), || servers(&place).is_empty().then_some(()));
    let checked = place.ok(&["pool", "check", "store"]);
    println!("{checked}");
    place.save(source.pid(), "last");
    assert_eq!(leases(&place), 0);
    place.ok(&["pool", "check", "store"]);
    let last = place.clones("last", 2, &[]);
    last.clones[0].pass_rounds(1);
}

/// `make soak-snapshots`: a source and eight clones check their files for half an hour, while the
/// page server and the daemon are killed twenty times each.
#[test]
#[ignore = "takes half an hour"]
fn a_source_and_eight_clones_check_their_memory_while_servers_and_daemons_are_killed() {
    if !can_run() {
        return;
    }
    let seconds = std::env::var("PAGEONE_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1800);
    let mut place = Place::new();
    let Some(mut source) = place.guest() else { return };
    place.save(source.pid(), "one");
    let clones = place.clones("one", 8, &[]);
    // Two that are merged, which need no page server.
    let merged = place.clones_with("one", "merged", 2, &["--merge"], &[]);
    let all = || clones.clones.iter().chain(&merged.clones);
    let pause = Duration::from_millis(seconds * 1000 / SERVERS_KILLED);
    for time in 0..SERVERS_KILLED {
        std::thread::sleep(pause / 2);
        place.daemon.kill();
        place.daemon.restart();
        std::thread::sleep(pause / 2);
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        std::thread::sleep(Duration::from_millis(37 * time % 211));
        kill_servers(&place, 1);
        // Each panics if its guest has seen a wrong byte.
        let rounds: Vec<usize> = all().map(OneClone::rounds).collect();
        println!("killed {} times; the source has passed {} rounds, its clones {rounds:?}", time + 1, source.rounds());
        assert!(all().all(OneClone::runs));
    }
    let before: Vec<usize> = all().map(OneClone::rounds).collect();
    source.pass_rounds(1);
    for (clone, before) in all().zip(before) {
        eventually("a clone's round", Duration::from_secs(600), || (clone.rounds() > before).then_some(()));
    }
    println!("SNAPSHOT-SOAK {seconds} s: {SERVERS_KILLED} page servers and daemons killed, 0 wrong bytes");
}

#[test]
fn clones_need_their_page_server_more_than_the_command_and_end_without_a_wrong_byte() {
    let Some(place) = place_with_a_snapshot() else { return };
    let both = place.clones("one", 2, &[]);
    e2e::signal_process(both.server.id() as i32, libc::SIGKILL);
    for clone in &both.clones {
        clone.pass_rounds(1);
    }
    let [server] = servers(&place)[..] else { panic!("{:?}", servers(&place)) };
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    e2e::signal_process(server, libc::SIGKILL);
    for clone in &both.clones {
        eventually("the clone needs a page and ends", Duration::from_secs(240), || {
            clone.rounds(); // Panics if it saw a wrong byte.
            (!clone.runs()).then_some(())
        });
    }
}

/// The lines come as soon as the guests run, which go on until they are ended.
#[test]
fn each_clone_says_in_json_what_it_is_and_so_does_an_archive() {
    if !can_run() {
        return;
    }
    const UUID: &str = "5ab1c1a0-3c5f-4a3e-9a0e-0123456789ab";
    let place = Place::new();
    let source = place.machine("source", &["-name", "web", "-uuid", UUID]);
    place.save(source.pid(), "one");
    for count in [1, 2] {
        let (number, files) = (count.to_string(), place.path(&format!("files-{count}")).display().to_string());
        let args =
            ["snapshot", "run", "store", "one", "--same-random", "--json", "--count", &number, "--files", &files];
        let mut server = place.command(&args).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(server.stdout.take().unwrap()).lines().take(count);
        let mut clones = Vec::new();
        for line in lines {
            let value: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let directory = PathBuf::from(value["directory"].as_str().unwrap());
            let own = directory.file_name().unwrap().to_str().unwrap();
            assert_eq!((&value["name"], &value["uuid"]), (&json!(format!("web-{own}")), &json!(UUID)), "{value}");
            assert!(value["seconds"].as_f64().unwrap() > 0.0);
            clones.push(OneClone { pid: value["pid"].as_i64().unwrap() as i32, directory });
        }
        let all = Clones { server, clones };
        assert_eq!(all.clones.len(), count);
        for clone in &all.clones {
            assert!(clone.runs() && clone.directory.join("output.log").exists());
            assert_eq!(status(&mut clone.qmp("monitor.qmp")), "running");
        }
    }
    let file = place.path("one.tar").display().to_string();
    let written = place.ok(&["snapshot", "export", "store", "one", "-o", &file, "--json"]);
    let out = place.run(&["snapshot", "export", "store", "one", "--json"]);
    assert!(out.status.success() && out.stdout == std::fs::read(&file).unwrap(), "nothing else is in the archive");
    let values = [written.as_bytes(), &out.stderr].map(|said| serde_json::from_slice::<Value>(said).unwrap());
    let value = json!({ "name": "one", "memory_bytes": 64 << 20, "disks": 0 });
    assert_eq!(values, [value.clone(), value]);
}
