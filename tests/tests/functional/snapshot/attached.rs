//! Clones that share the snapshot and are attached later: their RAM becomes their own while they
//! run.

use super::goes_on::What;
use super::*;

/// Attaches a clone; gives what was said.
fn attach(place: &Place, pid: i32) -> String {
    let said = place.ok(&["attach", &pid.to_string()]);
    println!("{}", said.trim());
    said
}

/// Whether a process maps the snapshot.
fn maps_the_snapshot(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().any(|line| line.ends_with(" /ram"))
}

#[test]
fn clones_that_share_a_snapshot_are_stored_and_attached_while_they_run_and_detached_again() {
    let Some(place) = clones::place_with_a_snapshot() else { return };
    let both = place.clones("one", 2, &[]);
    let stored = both.clones[0].pid;
    both.clones[0].pass_rounds(1);
    place.save(stored, "shared");
    for clone in &both.clones {
        clone.pass_rounds(1);
        assert!(maps_the_snapshot(clone.pid));
        let said = attach(&place, clone.pid);
        // On a busy host the command does not wait until the daemon has it.
        assert!(said.contains("192 MiB at ") || said.contains("a clone's memory is loaded"), "{said}");
        assert_eq!(status(&mut clone.qmp("guest.qmp")), "running");
    }
    for clone in &both.clones {
        merged::wait(&place, clone.pid);
        assert!(!maps_the_snapshot(clone.pid));
        clone.pass_rounds(clone.rounds() + 2);
    }
    // What the daemon does for others works: a checkpoint, detach, and another attach.
    let pid = both.clones[0].pid;
    place.ok(&["checkpoint", &pid.to_string(), "--to", "store", "--name", "ram"]);
    for _ in 0..2 {
        place.ok(&["detach", &pid.to_string()]);
        both.clones[0].pass_rounds(both.clones[0].rounds() + 1);
        let said = attach(&place, pid);
        assert!(!said.contains("being loaded"), "it is its own already: {said}");
        merged::wait(&place, pid);
    }
    place.save(stored, "attached");
    for name in ["shared", "attached"] {
        let next = place.clones(name, 2, &[]);
        next.clones.iter().for_each(|clone| clone.pass_rounds(1));
    }
    // They need no page server any more.
    kill_all_servers(&place, &both);
    both.clones.iter().for_each(|clone| clone.pass_rounds(clone.rounds() + 1));
}

/// Kills the command and its page server: from then on, reading the snapshot is SIGBUS.
fn kill_all_servers(place: &Place, clones: &Clones) {
    e2e::signal_process(clones.server.id() as i32, libc::SIGKILL);
    for server in clones::servers(place) {
        e2e::signal_process(server, libc::SIGKILL);
    }
    eventually("they are gone", Duration::from_secs(60), || clones::servers(place).is_empty().then_some(()));
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
}

#[test]
fn an_attached_clone_has_every_byte_that_it_had_and_its_disk_goes_on() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (_, machine) = place.machine_with_disk();
    disks::write(&mut machine.qmp(), 1);
    place.save(machine.pid(), "one");
    drop(machine);
    let clones = place.clones("one", 1, &[]);
    let clone = &clones.clones[0];
    let mut qmp = clone.qmp("source.qmp");
    // A user has paused it, and it stays so.
    qmp.execute("stop", json!({}));
    let ram = ram_of(&mut qmp);
    let before = memory(clone.pid, ram, 64 << 20);
    assert!(before.iter().any(|byte| *byte != 0));
    attach(&place, clone.pid);
    assert_eq!((status(&mut qmp).as_str(), ram_of(&mut qmp)), ("paused", ram));
    eventually("it is loaded", Duration::from_secs(60), || (!maps_the_snapshot(clone.pid)).then_some(()));
    assert!(memory(clone.pid, ram, 64 << 20) == before, "loaded");
    place.ok(&["detach", &clone.pid.to_string()]);
    assert!(memory(clone.pid, ram, 64 << 20) == before, "detached");
    qmp.execute("cont", json!({}));
    disks::write(&mut qmp, 9);
    assert_eq!(disks::byte(&disks::image(&mut qmp)), 9);
    qmp.execute("system_reset", json!({}));
    assert_eq!(status(&mut qmp), "running");
}

#[test]
fn an_attach_that_is_killed_leaves_the_clone_running() {
    let Some(place) = clones::place_with_a_snapshot() else { return };
    let both = place.clones("one", 2, &[]);
    let mut killed = 0;
    for clone in &both.clones {
        clone.pass_rounds(1);
        let mut qmp = clone.qmp("guest.qmp");
        for time in 0..10 {
            let what = [What::KillCommand, What::EndAll, What::KillAll][time % 3];
            let mut command = place.command(&["attach", &clone.pid.to_string()]);
            let mut attach = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            // While the guest stands, if it is seen to.
            while attach.try_wait().unwrap().is_none() && status(&mut qmp) == "running" {}
            killed += usize::from(attach.try_wait().unwrap().is_none());
            what.happen(&attach, &|| drop(place.run(&["status"])));
            attach.wait().unwrap();
            let runs = || (status(&mut qmp) == "running").then_some(());
            eventually("the guest goes on", Duration::from_secs(60), runs);
        }
        place.ok(&["attach", &clone.pid.to_string()]);
        merged::wait(&place, clone.pid);
        clone.pass_rounds(clone.rounds() + 1);
    }
    println!("{killed} were killed while the guest stood");
    assert!(killed > 0, "no attach was killed in its middle");
}

#[test]
fn a_clone_that_cannot_be_stopped_is_not_attached_and_says_why() {
    let Some(place) = clones::place_with_a_machines_snapshot() else { return };
    let clones = place.clones("one", 1, &[]);
    let pid = clones.clones[0].pid;
    // It is migrated, so slowly that it does not end.
    let mut qmp = clones.clones[0].qmp("source.qmp");
    qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 2048 }));
    qmp.execute("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    let text = place.fails(&["attach", &pid.to_string()]);
    println!("{text}");
    assert!(text.contains("private mapping of a file, in which writers cannot be blocked"), "{text}");
    assert!(text.contains("and not now: it is being migrated"), "{text}");
    qmp.execute("migrate_cancel", json!({}));
    assert_eq!(status(&mut qmp), "running");
    // It was.
    qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 1 << 30 }));
    eventually("the migration is cancelled", Duration::from_secs(60), || {
        (qmp.execute("query-migrate", json!({}))["status"] == "cancelled").then_some(())
    });
    qmp.execute("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    eventually("it is migrated", Duration::from_secs(60), || (status(&mut qmp) == "postmigrate").then_some(()));
    let text = place.fails(&["attach", &pid.to_string()]);
    assert!(text.contains("is neither running nor paused, but postmigrate"), "{text}");
    assert!(maps_the_snapshot(pid));
}

#[test]
fn a_guest_whose_ram_is_a_private_mapping_of_a_file_is_attached_if_it_can_be_stopped() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let ram = place.path("ram");
    let backend = format!("memory-backend-file,id=r,size=64M,mem-path={},share=off", ram.display());
    let words = ["-accel", "tcg,tb-size=16", "-m", "64", "-display", "none", "-nodefaults", "-no-user-config"];
    let start = |more: &[String], monitor: PathBuf| {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(words).args(["-object", &backend, "-machine", "memory-backend=r"]).args(more);
        Machine { child: command.stdin(Stdio::null()).spawn().unwrap(), monitor }
    };
    let silent = start(&[], PathBuf::new());
    let text = place.fails(&["attach", &silent.pid().to_string()]);
    assert!(text.contains("and not now: its command line names no QMP socket"), "{text}");
    drop(silent);
    let monitor = place.path("machine.qmp");
    let machine = start(&Qmp::words(&monitor), monitor);
    let at = ram_of(&mut machine.qmp());
    attach(&place, machine.pid());
    let name = ram.display().to_string();
    let maps = || std::fs::read_to_string(format!("/proc/{}/maps", machine.pid())).unwrap();
    eventually("it is loaded", Duration::from_secs(60), || (!maps().contains(&name)).then_some(()));
    let mut qmp = machine.qmp();
    assert_eq!((status(&mut qmp).as_str(), ram_of(&mut qmp)), ("running", at));
}
