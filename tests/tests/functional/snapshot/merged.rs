//! Clones with RAM of their own: merged like other guests, and stored again.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

use e2e::{recycler_guests, recycler_words};

use super::*;

/// The pages of a process that are merged.
pub(super) fn merged(place: &Place, pid: i32) -> Option<u64> {
    let client = place.daemon.client(pid)?;
    let of = |name: &str| client[name].as_u64().unwrap_or(0);
    Some(of("pages_merged") + of("pages_zero"))
}

/// Waits until a clone's memory is loaded and merged.
pub(super) fn wait(place: &Place, pid: i32) {
    eventually("a clone is merged", Duration::from_secs(120), || merged(place, pid).filter(|&pages| pages > 8000));
}

#[test]
fn clones_are_merged_stored_again_and_their_clones_go_on() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut source) = place.guest() else { return };
    place.save(source.pid(), "first");
    source.kill();
    let run = |name: &str| place.clones_with("first", name, 2, &["--merge"], &[]);
    let both = run("a");
    for clone in &both.clones {
        clone.pass_rounds(1);
        wait(&place, clone.pid);
    }
    let all: Vec<_> = both.clones.iter().map(|clone| merged(&place, clone.pid)).collect();
    println!("pages merged: {all:?}");
    // It is tracked, so its second checkpoint stores what has changed.
    let pid = both.clones[0].pid;
    let again = place.save(pid, "again");
    assert!(again["stored_bytes"].as_u64().unwrap() < again["memory_bytes"].as_u64().unwrap() / 4, "{again}");
    place.ok(&["checkpoint", &pid.to_string(), "--to", "store", "--name", "ram"]);
    place.ok(&["detach", &pid.to_string()]);
    both.clones[0].pass_rounds(both.clones[0].rounds() + 1);
    both.clones.iter().for_each(|clone| clone.pass_rounds(clone.rounds() + 1));
    drop(both);
    for arguments in [&[][..], &["--merge"]] {
        let next = place.clones_with("again", &format!("b{}", arguments.len()), 2, arguments, &[]);
        next.clones.iter().for_each(|clone| clone.pass_rounds(2));
    }
    place.ok(&["pool", "check", "store"]);
}

/// What a client's recycler is.
fn recycling(place: &Place, pid: i32, what: &str) -> Value {
    place.daemon.client(pid).unwrap_or_default()["recycling"][what].clone()
}

fn wait_recycled(place: &Place, pid: i32) {
    let total = || recycling(place, pid, "pages_recycled_total").as_u64().unwrap_or(0);
    let before = total();
    println!("{}", place.daemon.client(pid).unwrap_or_default()["recycling"]);
    eventually("free pages are taken back", Duration::from_secs(120), || (total() > before + 1000).then_some(()));
}

#[test]
fn free_pages_are_taken_back_of_a_guest_that_is_stored_and_of_its_clones() {
    if !can_run() {
        return;
    }
    let Ok(kernels) = recycler_guests().inspect_err(|why| skipped(why)) else { return };
    let place = Place::new();
    let work = "STAY=1 PPR=1 PPR_ARGS=check=1 WORK=hungry_3600";
    let words = |machine: &str| {
        let mut words = recycler_words(&kernels[0], 192, work);
        words.extend(["-machine", machine].map(String::from));
        words
    };
    let start = |options: &[&str], machine: &str| {
        let mut command = place.daemon.run(options);
        command.args(words(machine));
        Guest::start(command)
    };
    let mut source = start(&["--snapshots", "--ppr"], "q35");
    let pid = source.pid();
    wait_recycled(&place, pid);
    place.save(pid, "first");
    // The device is back, also when a snapshot is killed.
    wait_recycled(&place, pid);
    for wait in [20, 60, 120, 300] {
        let save = ["snapshot", "save", &pid.to_string(), "--to", "store", "--name", "no"];
        let mut running = place.command(&save).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        running.kill().unwrap();
        running.wait().unwrap();
        wait_recycled(&place, pid);
    }
    source.pass_rounds(1);
    // The user has paused it.
    place.ok(&["ppr", "pause", &pid.to_string()]);
    place.save(pid, "paused");
    assert_eq!(recycling(&place, pid, "state"), "paused");
    source.kill();
    // With and without, and stored again.
    let plain = place.clones("first", 2, &[]);
    plain.clones[0].pass_rounds(1);
    drop(plain);
    let both = place.clones_with("first", "ppr", 2, &["--merge", "--ppr"], &[]);
    both.clones.iter().for_each(|clone| wait_recycled(&place, clone.pid));
    both.clones.iter().for_each(|clone| clone.pass_rounds(1));
    place.save(both.clones[0].pid, "again");
    wait_recycled(&place, both.clones[0].pid);
    drop(both);
    let next = place.clones_with("again", "next", 2, &["--merge", "--ppr"], &[]);
    wait_recycled(&place, next.clones[0].pid);
    next.clones[0].pass_rounds(1);
    // A guest that ends meanwhile.
    let mut guard = place.command(&["ppr-guard", &next.clones[0].pid.to_string()]);
    let mut guard = guard.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(guard.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "unplugged\n");
    drop(next);
    let text = String::from_utf8_lossy(&guard.wait_with_output().unwrap().stderr).into_owned();
    assert!(text.contains("free pages are not taken back now"), "{text}");
    // No port.
    let mut source = start(&["--snapshots"], "q35");
    source.pass_rounds(1);
    place.save(source.pid(), "portless");
    source.kill();
    let text = place.fails(&["snapshot", "run", "store", "portless", "--merge", "--ppr"]);
    assert!(text.contains("is a q35, and has no port for --ppr"), "{text}");
    place.ok(&["pool", "check", "store"]);
}

#[test]
fn a_guests_files_stay_where_a_snapshot_of_it_needs_them() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (_, machine) = place.machine_with_disk();
    place.save(machine.pid(), "first");
    drop(machine);
    let both = place.clones_with("first", "a", 2, &["--merge", "--rm"], &[]);
    let [stored, other] = [0, 1].map(|at| both.clones[at].directory.clone());
    disks::write(&mut both.clones[0].qmp("source.qmp"), 9);
    place.save(both.clones[0].pid, "again");
    drop(both);
    assert!(stored.join("disk-0.qcow2").exists() && !other.exists());
    let next = place.clones_with("again", "b", 1, &["--merge", "--rm"], &[]);
    assert_eq!(disks::byte(&disks::image(&mut next.clones[0].qmp("source.qmp"))), 9);
    let directory = next.clones[0].directory.clone();
    drop(next);
    assert!(!directory.exists());
}

#[test]
fn what_is_in_the_way_of_clones_that_are_merged_is_said() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    // A guest that has the monitor of one whose free pages are taken back, and no device.
    let machine = place.machine("source", &["-chardev", "null,id=pageone-qmp"]);
    let pid = machine.pid().to_string();
    let text = place.fails(&["snapshot", "save", &pid, "--to", "store", "--name", "no"]);
    assert!(text.contains("the device for its free pages cannot be unplugged"), "{text}");
    drop(machine);
    let machine = place.machine("source", &[]);
    let is_full = |page: &[u8]| page[1024..1088].iter().filter(|byte| **byte != 0).count() > 50;
    let ram = eventually("the firmware writes to it", Duration::from_secs(60), || {
        let ram = memory(machine.pid(), ram_of(&mut machine.qmp()), 64 << 20);
        ram.chunks(4096).any(is_full).then_some(ram)
    });
    let page = ram.chunks(4096).find(|page| is_full(page)).unwrap();
    place.save(machine.pid(), "one");
    drop(machine);
    let run = ["snapshot", "run", "store", "one", "--merge"];
    // A directory in which no socket can lie.
    let files = place.path(&"a".repeat(108)).display().to_string();
    let text = place.fails(&[&run[..], &["--files", &files]].concat());
    assert!(text.contains("is too long: name another directory with --files"), "{text}");
    let mut command = Command::new(e2e::program("pageone"));
    command.env("PAGEONE_POOLS", place.path("names")).args(["--dir", "/dev/null/none"]).args(run);
    let text = String::from_utf8_lossy(&command.output().unwrap().stderr).into_owned();
    assert!(text.contains("the guests cannot be merged"), "{text}");
    // No agent that loads.
    let mut command = place.command(&run);
    let out = command.env("PAGEONE_AGENT", "/lib/x86_64-linux-gnu/libc.so.6").output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("PageONE's library in the clone does not load its memory"), "{text}");
    // A page of the pool is damaged.
    let path = place.path("capacity").join("data");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(64).position(|part| part == &page[1024..][..64]).expect("the page is stored as it is");
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    // Said before a guest starts.
    let text = place.fails(&run);
    assert!(text.contains("a block of data does not match its checksum") && !text.contains(" runs after "), "{text}");
}

/// The files of which a clone maps its RAM, by their inodes.
fn segments(pid: i32) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let of_snapshot = maps.lines().filter(|line| line.contains("/memfd:pageone:snapshot") && line.contains(" rw-p "));
    of_snapshot.map(|line| line.split_ascii_whitespace().nth(4).unwrap().to_owned()).collect()
}

#[test]
fn clones_share_their_snapshots_pages_from_the_beginning_and_go_back_to_them() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = place.machine("source", &[]);
    let bytes = 64 << 20;
    let is_full = |page: &[u8]| page[1024..1088].iter().filter(|byte| **byte != 0).count() > 50;
    eventually("the firmware writes to it", Duration::from_secs(60), || {
        memory(machine.pid(), ram_of(&mut machine.qmp()), bytes).chunks(4096).any(is_full).then_some(())
    });
    place.save(machine.pid(), "one");
    drop(machine);
    let run = |name: &str| place.clones_with("one", name, 1, &["--merge"], &[]);
    let one = run("a");
    let pid = one.clones[0].pid;
    let start = ram_of(&mut one.clones[0].qmp("source.qmp"));
    let ram = memory(pid, start, bytes);
    let full = ram.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count() as u64;
    let merged = |pid: i32| place.daemon.client(pid).map(|client| client["pages_merged"].as_u64().unwrap());
    // Some are the clone's own by now.
    let all = |pid: i32| merged(pid).filter(|&pages| pages * 2 > full);
    println!(
        "{full} pages are not zeros; merged: {}",
        eventually("it is merged", Duration::from_secs(20), || all(pid))
    );
    // A page that is written is the clone's own. With its old bytes it is the snapshot's again,
    // though no other page was that meanwhile.
    let at = ram.chunks(4096).rposition(is_full).unwrap();
    let (place_of, page) = (start + 4096 * at as u64, &ram[4096 * at..][..4096]);
    let mem = std::fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let pagemap = std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let is_file = || {
        let (mut bytes, mut entry) = ([0; 4096], [0; 8]);
        mem.read_exact_at(&mut bytes, place_of).unwrap();
        pagemap.read_exact_at(&mut entry, place_of / 4096 * 8).unwrap();
        u64::from_le_bytes(entry) >> 61 & 1 == 1
    };
    assert!(is_file());
    mem.write_all_at(&[9; 4096], place_of).unwrap();
    assert!(!is_file());
    std::thread::sleep(Duration::from_secs(2));
    mem.write_all_at(page, place_of).unwrap();
    eventually("the page is the snapshot's again", Duration::from_secs(30), || is_file().then_some(()));
    // A command that starts clones later has the same memory for them.
    let other = run("b");
    let pid = other.clones[0].pid;
    eventually("it is merged", Duration::from_secs(20), || all(pid));
    assert_eq!(segments(pid), segments(one.clones[0].pid));
    // It goes on giving it away when the first one has ended, and nothing is left in the end.
    drop(one);
    std::thread::sleep(Duration::from_secs(1));
    let third = run("c");
    assert_eq!(segments(third.clones[0].pid), segments(pid));
    drop((other, third));
    eventually("the store is empty", Duration::from_secs(30), || {
        let all = place.daemon.status()["domains"].clone();
        all.as_array().is_none_or(|all| all.iter().all(|one| one["store_bytes"] == 0)).then_some(())
    });
}
