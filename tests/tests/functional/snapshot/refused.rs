//! What cannot be stored or run is refused with a sentence, before anything is stopped.

use super::*;

/// What a command says some of whose system calls fail, as these options of strace say. `None`:
/// there is no strace.
pub(super) fn with_failing_calls(place: &Place, options: &[&str], args: &[&str]) -> Option<String> {
    let mut strace = Command::new("strace");
    let command = place.command(args);
    strace.args(["-f", "-qq", "-o", "/dev/null"]).args(options).arg(command.get_program()).args(command.get_args());
    match strace.env("PAGEONE_POOLS", place.path("names")).output() {
        Ok(out) => Some(String::from_utf8_lossy(&out.stderr).into_owned()),
        Err(e) => {
            skipped(&format!("no system call can be made to fail: strace is not here ({e}); scripts/deps.sh test"));
            None
        }
    }
}

#[test]
fn what_cannot_be_stored_is_refused_with_a_sentence() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let base = ["-m", "64", "-display", "none", "-nodefaults", "-version"];
    // The guest runs in any case.
    for (more, part) in [
        (&["-object", "memory-backend-ram,id=r,size=64M", "-machine", "memory-backend=r"][..], "by -m alone"),
        (&["-netdev", "vhost-user,chardev=c,id=n"], "find it empty"),
        (&["-device", "ivshmem-plain,memdev=m"], "find it empty"),
    ] {
        let mut command = place.daemon.run(&["--snapshots"]);
        let out = command.arg("qemu-system-x86_64").args(base).args(more).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(text.contains("runs without snapshots") && text.contains(part), "{text}");
        assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("QEMU emulator"));
    }
    // An unprepared guest.
    let mut plain = place.daemon.run(&[]);
    plain.args(["qemu-system-x86_64", "-m", "64", "-display", "none", "-nodefaults", "-accel", "tcg,tb-size=16"]);
    let mut plain = Guest::start(plain);
    eventually("it has started", Duration::from_secs(20), || place.daemon.client(plain.pid()));
    let save = |pid: i32| place.fails(&["snapshot", "save", &pid.to_string(), "--to", "store", "--name", "no"]);
    assert!(save(plain.pid()).contains("its command line names no socket of QMP: start the guest with `pageone run"));
    plain.kill();
    // What no clone would have.
    let machine = place.machine("plugged", &[]);
    machine.qmp().execute("device_add", json!({ "driver": "virtio-rng-pci", "id": "hot0" }));
    let text = save(machine.pid());
    assert!(
        text.contains("no clone of this guest would start as it is now") && text.contains("virtio-rng-pci"),
        "{text}"
    );
    assert_eq!(status(&mut machine.qmp()), "running");
    let forced = ["snapshot", "save", &machine.pid().to_string(), "--to", "store", "--name", "forced", "--force"];
    let out = place.run(&forced);
    assert!(out.status.success() && String::from_utf8_lossy(&out.stderr).contains("forced: "), "{out:?}");
    place.ok(&["snapshot", "rm", "store", "forced"]);
    drop(machine);
    let mut other = Command::new("qemu-system-x86_64");
    other.args(["-m", "64", "-display", "none", "-nodefaults", "-accel", "tcg,tb-size=16", "-object"]);
    other.args(["memory-backend-ram,id=r,size=64M", "-machine", "memory-backend=r"]);
    other.args(Qmp::words(&place.path("other.qmp")));
    let mut other = Guest::start(other);
    eventually("it has started", Duration::from_secs(20), || place.path("other.qmp").exists().then_some(()));
    let text = save(other.pid());
    assert!(text.contains("cannot be stored with this: ") && text.contains("by -m alone"), "{text}");
    other.kill();
    // Memory that the agent has given back is not tracked.
    let machine = place.machine("given-back", &[]);
    place.ok(&["detach", &machine.pid().to_string()]);
    assert!(save(machine.pid()).contains("not all of the RAM"));
    assert_eq!(status(&mut machine.qmp()), "running");
    drop(machine);
    // Devices that QEMU cannot store, and disks of another format.
    let image = place.path("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},if=none,id=d0,format=raw,file.locking=off", image.display());
    for (device, part) in [("nvme,drive=d0,serial=1", "QEMU says"), ("ide-hd,drive=d0", "qemu-img convert")] {
        let name = device.split(',').next().unwrap();
        let machine = place.machine(name, &["-drive", &drive, "-device", device]);
        let text = save(machine.pid());
        assert!(text.contains(part), "{device}: {text}");
        assert_eq!(status(&mut machine.qmp()), "running");
    }
    assert!(place.names().is_empty());
}

#[test]
fn a_guest_that_would_differ_is_refused_with_the_difference() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = place.machine("source", &["-machine", "q35", "-device", "virtio-rng-pci"]);
    // Its memory cannot be read: it goes on.
    let save = ["snapshot", "save", &machine.pid().to_string(), "--to", "store", "--name", "never"];
    if let Some(text) = with_failing_calls(&place, &["-e", "inject=process_vm_readv:error=EIO"], &save) {
        assert!(text.contains("snapshot never was not stored: reading the memory"), "{text}");
        assert_eq!(status(&mut machine.qmp()), "running");
        assert!(place.names().is_empty());
    }
    place.save(machine.pid(), "one");
    drop(machine);
    let files = place.path("clones").display().to_string();
    let run =
        |extra: &[&str]| place.fails(&[&["snapshot", "run", "store", "one", "--files", &files, "--"], extra].concat());
    for (extra, part) in [
        (&["-cpu", "Nehalem"][..], "the processor Nehalem"),
        (&["-cpu", "qemu64,-cx16,-sse3"], "the processor's features"),
        (&["-m", "128"], "RAM"),
        (&["-device", "virtio-balloon-pci"], "devices"),
        (&["-smp", "2"], "the number of processors"),
        (&["-machine", "pc"], "machine"),
    ] {
        let text = run(extra);
        println!("{}", text.trim());
        assert!(text.contains(part), "{extra:?}: {text}");
    }
    let two = ["snapshot", "run", "store", "one", "--count", "2", "--files", &files];
    let text = place.fails(&two);
    assert!(text.contains("these 2 guests could make the same random numbers"), "{text}");
    let text = place.fails(&[&two[..], &["--same-random", "--", "-smp", "2"]].concat());
    assert!(text.contains("2 of 2 guests were not started: "), "{text}");
    let text = place.fails(&["snapshot", "verify", "store", "one", "--files", &files, "--", "-cpu", "Nehalem"]);
    assert!(text.contains("no guest goes on from snapshot one: this guest would differ"), "{text}");
    let pool = place.path("capacity").display().to_string();
    assert!(
        place.fails(&["snapshot-server", &pool, "one", "--lease", "0"]).contains("cannot serve the guests' memory: ")
    );
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0, "nothing of those is left");
    // A host without the module.
    let whole = ["snapshot", "run", "store", "one", "--files", &files];
    if let Some(text) = with_failing_calls(&place, &["-P", "/dev/fuse", "-e", "inject=openat:error=ENODEV"], &whole) {
        assert!(text.contains("cannot serve the guests' memory through FUSE"), "{text}");
    }
    // What is not a snapshot.
    let mut client = place.daemon.scenario(&["hold", "4096", "1"]);
    client.expect("ready");
    place.ok(&["checkpoint", &client.pid().to_string(), "--to", "store", "--name", "plain"]);
    assert!(place.fails(&["snapshot", "run", "store", "plain"]).contains("no snapshot"));
    assert!(place.fails(&["snapshot", "rm", "store", "plain"]).contains("no snapshot"));
    assert_eq!(place.names(), ["one"]);
    // The same guest is not refused.
    let clones = place.clones("one", 2, &[]);
    for clone in &clones.clones {
        assert_eq!(status(&mut clone.qmp("source.qmp")), "running");
    }
}
