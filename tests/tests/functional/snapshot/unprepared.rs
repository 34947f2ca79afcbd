//! Guests that were not started by `pageone run --snapshots`, but have a monitor: QEMU's live
//! migration stores them.

use std::time::Instant;

use kmem::testing::KernelKey;

use super::*;

/// QEMU emulates the guest.
pub(super) const TCG: &str = "tcg,tb-size=16";

/// What can run a guest here: only an emulated one stands while it is sent.
pub(super) fn accelerators() -> Vec<&'static str> {
    let kvm = testguest::try_kvm().map(|()| "kvm").inspect_err(|why| skipped(&why.to_string()));
    [TCG].into_iter().chain(kvm).collect()
}

/// A guest that PageONE did not start. The first monitor is for PageONE, the second for the test.
fn start(place: &Place, words: &[String]) -> Machine {
    let monitor = place.path("test.qmp");
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg("-qmp").arg(format!("unix:{},server=on,wait=off", place.path("own.qmp").display()));
    command.args(Qmp::words(&monitor)).stdin(Stdio::null()).process_group(0);
    let machine = Machine { child: command.spawn().unwrap(), monitor };
    assert_eq!(status(&mut machine.qmp()), "running");
    machine
}

/// A machine without an operating system, with a disk.
fn machine(place: &Place) -> Machine {
    let disk = place.path("disk.qcow2");
    e2e::qmp::make_disk(&disk);
    let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
    let words = "qemu-system-x86_64 -accel tcg,tb-size=16 -cpu qemu64,-cx16 -m 64 -display none -nodefaults -device \
                 VGA,vgamem_mb=16 -device virtio-blk-pci,drive=d0 -drive";
    let words: Vec<String> = words.split(' ').map(String::from).chain([drive]).collect();
    start(place, &words)
}

/// One with 48 MiB of RAM in which no page is like another: more than waits to be stored.
pub(super) fn full_machine(place: &Place, accelerator: &str, more: &[&str]) -> Machine {
    let noise = place.path("noise");
    let mut random = goes_on::Random::new();
    let words: Vec<u8> = (0..6 << 20).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect();
    std::fs::write(&noise, words).unwrap();
    let loaded = format!("loader,file={},addr=0x1000000,force-raw=on", noise.display());
    let words = "qemu-system-x86_64 -cpu qemu64,-cx16,-pni -m 128 -display none -nodefaults -accel";
    let words = words.split(' ').chain([accelerator, "-device", &loaded]).chain(more.iter().copied());
    let words: Vec<String> = words.map(String::from).collect();
    start(place, &words)
}

/// QEMU waits in the middle of its stream, where it may answer no monitor.
#[test]
fn a_guest_goes_on_while_the_command_that_reads_its_stream_is_stopped() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = full_machine(&place, TCG, &[]);
    let (pid, mut qmp) = (machine.pid().to_string(), machine.qmp());
    let is_running = |qmp: &mut Qmp| status(qmp) == "running";
    for number in 0..40 {
        let name = format!("stopped-{number}");
        let save = ["snapshot", "save", &pid, "--to", "store", "--name", &name];
        let mut command = place.command(&save).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while is_running(&mut qmp) && command.try_wait().unwrap().is_none() {}
        e2e::signal_process(command.id() as i32, libc::SIGSTOP);
        eventually("the guest runs", Duration::from_secs(60), || is_running(&mut qmp).then_some(()));
        e2e::signal_process(command.id() as i32, libc::SIGCONT);
        let out = command.wait_with_output().unwrap();
        if !out.status.success() {
            let text = String::from_utf8_lossy(&out.stderr);
            assert!(text.contains("the guest was let go on"), "{text}");
            eventually("nothing is left to do", Duration::from_secs(60), || {
                let done = qmp.execute("query-migrate", json!({}));
                (is_running(&mut qmp) && done["status"] != "active").then_some(())
            });
            place.save(machine.pid(), "whole");
            return assert_eq!(place.names(), ["whole"]);
        }
        place.ok(&["snapshot", "rm", "store", &name]);
    }
    panic!("no save was stopped while its guest stood");
}

/// Nobody reads QEMU's stream any more, and the guard keeps it open.
#[test]
fn a_guest_whose_pool_is_full_goes_on_at_once() {
    if !can_run() {
        return;
    }
    for accelerator in accelerators() {
        let place = Place::new();
        let small = full::Small::new(&place, "small", 24);
        place.ok(&["pool", "create", "small", "--capacity", &small.0.join("pool").display().to_string()]);
        let machine = full_machine(&place, accelerator, &[]);
        let (pid, start) = (machine.pid().to_string(), Instant::now());
        let save = ["snapshot", "save", &pid, "--to", "small", "--name", "no"];
        let mut command = place.command(&save).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the save ends", Duration::from_secs(30), || command.try_wait().unwrap());
        println!("{accelerator}: {:.1?}", start.elapsed());
        assert!(start.elapsed() < guard::PROMISE / 2);
        let out = command.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains("pool small is full"), "{text}");
        assert_eq!(status(&mut machine.qmp()), "running");
        assert_eq!(place.ok(&["snapshot", "ls", "small", "--json"]).trim(), "[]");
    }
}

#[test]
fn a_guest_that_was_not_prepared_is_stored_by_a_migration_and_its_clones_go_on() {
    if !can_run() {
        return;
    }
    let place = Place::with_pool(true);
    let Ok(words) = Guest::words(MEMORY).inspect_err(|why| skipped(why)) else { return };
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg("-qmp").arg(format!("unix:{},server=on,wait=off", place.path("own.qmp").display()));
    let mut source = Guest::start(command);
    source.pass_rounds(1);
    let pid = source.pid().to_string();
    let save = |name: &str| {
        let out = place.run(&["snapshot", "save", &pid, "--to", "store", "--name", name, "--json"]);
        let (said, text) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        println!("{said}{text}");
        assert!(
            out.status.success() && text.contains("was not prepared: QEMU sends all of its RAM, 192 MiB"),
            "{text}"
        );
        serde_json::from_str::<Value>(&said).unwrap()
    };
    // More than a small pool has room for.
    let small = full::Small::new(&place, "small", 48);
    place.ok(&["pool", "create", "small", "--capacity", &small.0.join("pool").display().to_string()]);
    let text = place.fails(&["snapshot", "save", &pid, "--to", "small", "--name", "no"]);
    assert!(text.contains("snapshot no was not stored") && text.contains("pool small is full"), "{text}");
    assert_eq!(place.ok(&["snapshot", "ls", "small", "--json"]).trim(), "[]");
    source.pass_rounds(1);
    save("first");
    let second = save("second");
    let memory_bytes = second["memory_bytes"].as_u64().unwrap();
    assert_eq!(memory_bytes, u64::from(MEMORY) << 20);
    assert!(second["stored_bytes"].as_u64().unwrap() < memory_bytes / 4, "most of it was stored already: {second}");
    assert!(second["stream_bytes"].as_u64().unwrap() < memory_bytes / 10, "RAM is in the device stream: {second}");
    source.pass_rounds(1);
    source.kill();
    assert_eq!(place.names(), ["first", "second"]);
    // What serves clones finds the pool's key, in the kernel's keyrings too.
    let key = KernelKey::new("user", "clones", &[8; 32]);
    if let Some(key) = &key {
        place.ok(&["pool", "key", "store", "--kernel-key", key.name()]);
        std::fs::remove_file(place.path("key")).unwrap();
    }
    let both = place.clones("second", 2, &[]);
    for clone in &both.clones {
        clone.pass_rounds(2);
    }
    drop(both);
    place.ok(&["pool", "check", "store"]);
}

#[test]
fn its_disks_are_those_of_the_pause_and_a_snapshot_that_fails_or_is_killed_leaves_it_running() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = machine(&place);
    let pid = machine.pid().to_string();
    let mut qmp = machine.qmp();
    let settings = |qmp: &mut Qmp| {
        ["query-migrate-parameters", "query-migrate-capabilities"].map(|question| qmp.execute(question, json!({})))
    };
    let before = settings(&mut qmp);
    let images = || {
        let all = std::fs::read_dir(place.dir.path()).unwrap().flatten();
        all.filter(|entry| entry.path().extension().is_some_and(|end| end == "qcow2")).count()
    };
    let set = |qmp: &mut Qmp, state: bool| {
        let all = json!({ "capabilities": [{ "capability": "xbzrle", "state": state }] });
        qmp.execute("migrate-set-capabilities", all);
    };
    set(&mut qmp, true);
    let save = ["snapshot", "save", &pid, "--to", "store", "--name", "none"];
    assert!(place.fails(&save).contains("the guest's migration capability xbzrle is on"));
    set(&mut qmp, false);
    // Twelve moments of a snapshot; how long one takes differs from machine to machine.
    let (mut killed, mut whole, mut wait, mut step) = (0, 0, Duration::ZERO, Duration::from_millis(13));
    while killed < 12 {
        let name = format!("cut-{killed}-{whole}");
        let save = ["snapshot", "save", &pid, "--to", "store", "--name", &name];
        let mut running = place.command(&save).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(wait);
        running.kill().unwrap();
        if running.wait().unwrap().success() {
            (wait, step, whole) = (Duration::ZERO, step / 2, whole + 1);
            assert!(whole < 20, "only {killed} of its snapshots could be killed");
            continue;
        }
        (wait, killed) = (wait + step, killed + 1);
        eventually("the guest runs as before", Duration::from_secs(60), || {
            // One that is killed while the record is written keeps its image.
            let all = qmp.execute("query-block", json!({}));
            let next = |image: &Value| Some(image["backing-image"].clone()).filter(|image| !image.is_null());
            let chain = std::iter::successors(Some(all[0]["inserted"]["image"].clone()), next).count();
            (status(&mut qmp) == "running" && settings(&mut qmp) == before && images() == chain).then_some(())
        });
    }
    println!("killed {killed} times, {whole} snapshots came before that");
    qmp.monitor("qemu-io d0 \"write -P 7 1M 64k\"");
    place.save(machine.pid(), "whole");
    assert_eq!(status(&mut qmp), "running");
    assert_eq!(settings(&mut qmp), before);
    qmp.monitor("qemu-io d0 \"write -P 8 1M 64k\"");
    for clone in &place.clones("whole", 2, &[]).clones {
        let mut qmp = clone.qmp("test.qmp");
        assert_eq!(disks::byte(&disks::image(&mut qmp)), 7);
        assert_eq!(status(&mut qmp), "running");
    }
    place.ok(&["pool", "check", "store"]);
}

#[test]
fn a_guest_that_stands_still_is_stored_and_stands_still_afterwards() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = machine(&place);
    machine.qmp().execute("stop", json!({}));
    place.save(machine.pid(), "still");
    assert_ne!(status(&mut machine.qmp()), "running");
    machine.qmp().execute("cont", json!({}));
    assert_eq!(status(&mut machine.qmp()), "running");
    place.save(machine.pid(), "running");
}

/// QEMU would forget that it sleeps, and so never wake it.
#[test]
fn a_guest_that_sleeps_is_refused_and_wakes_afterwards() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    for machine in [machine(&place), place.machine("prepared", &[])] {
        let (pid, mut qmp) = (machine.pid().to_string(), machine.qmp());
        // The firmware sets the ports of ACPI; the guest says there that it sleeps (S3).
        eventually("it sleeps", Duration::from_secs(60), || {
            qmp.monitor("o /w 0x604 0x2400");
            (status(&mut qmp) == "suspended").then_some(())
        });
        let text = place.fails(&["snapshot", "save", &pid, "--to", "store", "--name", "asleep"]);
        assert!(text.contains("the guest is suspended; neither it nor clones of it would go on"), "{text}");
        qmp.execute("system_wakeup", json!({}));
        eventually("it wakes", Duration::from_secs(20), || (status(&mut qmp) == "running").then_some(()));
        assert!(place.names().is_empty());
    }
}
