//! No room: the guest goes on, and nothing half-made stays.

use super::*;

/// A file system of this many MiB in memory, until it is dropped.
pub(super) struct Small(pub(super) PathBuf);

impl Small {
    pub(super) fn new(place: &Place, name: &str, mib: u32) -> Self {
        let at = place.path(name);
        std::fs::create_dir(&at).unwrap();
        let size = format!("size={mib}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&at).status().unwrap();
        assert!(mounted.success());
        Self(at)
    }

    fn free(&self) -> u64 {
        let stat = rustix::fs::statvfs(&self.0).unwrap();
        stat.f_bavail * stat.f_frsize
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_the_guest_running_and_nothing_half_made() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (pool, disks) = (Small::new(&place, "small", 48), Small::new(&place, "disks", 4));
    place.ok(&["pool", "create", "small", "--capacity", &pool.0.join("pool").display().to_string()]);
    let disk = disks.0.join("disk.qcow2");
    e2e::qmp::make_disk(&disk);
    let Some(mut words) = clones::guest_words(&place) else { return };
    words.extend(["-drive".into(), format!("file={},if=none,id=d0,format=qcow2", disk.display())]);
    let mut source = Guest::start(place.prepared(&words));
    source.pass_rounds(1);
    let pid = source.pid().to_string();
    let mut qmp = Qmp::connect(&place.path("guest.qmp"));
    let images = || std::fs::read_dir(&disks.0).unwrap().flatten().map(|e| e.file_name()).collect::<Vec<_>>();
    // The guest has more to store than the pool has room, at whatever moment that shows.
    let before = pool.free();
    for time in 0..3 {
        let text = place.fails(&["snapshot", "save", &pid, "--to", "small", "--name", &format!("no-{time}")]);
        assert!(text.contains("was not stored") && text.contains("full"), "{text}");
        assert_eq!(status(&mut qmp), "running");
        assert_eq!(images(), ["disk.qcow2"]);
        assert!(pool.free() + (4 << 20) > before, "{} of {before} bytes are free", pool.free());
    }
    place.ok(&["pool", "check", "small"]);
    assert_eq!(place.ok(&["snapshot", "ls", "small", "--json"]).trim(), "[]");
    source.pass_rounds(1);
    // There is no room for the image over the disk.
    let mut filler = std::fs::File::create(disks.0.join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    let text = place.fails(&["snapshot", "save", &pid, "--to", "store", "--name", "one"]);
    assert!(text.contains("cannot make the image"), "{text}");
    assert_eq!((status(&mut qmp), images().len()), ("running".to_string(), 2));
    assert!(place.names().is_empty());
    std::fs::remove_file(disks.0.join("filler")).unwrap();
    drop(filler);
    place.save(source.pid(), "one");
    source.pass_rounds(1);
    let clones = place.clones("one", 2, &[]);
    for clone in &clones.clones {
        clone.pass_rounds(1);
    }
}

/// What was written since the new image was made goes back to the disk, which has no room for it.
#[test]
fn what_a_guest_wrote_is_kept_while_its_disk_has_no_room_to_take_it_back() {
    const MIB: u64 = 1 << 20;
    if !can_run() {
        return;
    }
    let place = Place::new();
    let disks = Small::new(&place, "disks", 8);
    let disk = disks.0.join("disk.qcow2");
    e2e::qmp::make_disk(&disk);
    let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
    let source = place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    let (mut qmp, pid) = (source.qmp(), source.pid().to_string());
    let filler = disks.0.join("filler");
    let images = (0..40).find_map(|number| {
        let images = goes_on::chain(&mut qmp);
        let name = format!("cut-{number}");
        let mut command = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", &name]);
        let mut save = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let goes_on = |qmp: &mut Qmp| goes_on::chain(qmp) > images && status(qmp) == "running";
        while !goes_on(&mut qmp) && save.try_wait().unwrap().is_none() {}
        e2e::signal_process(save.id() as i32, libc::SIGSTOP);
        let is_held = eventually("it stands, or has ended", Duration::from_secs(60), || {
            let has_ended = save.try_wait().unwrap().is_some();
            (has_ended || kmem::procfs::is_stopped(save.id() as i32).is_ok_and(|stands| stands)).then_some(!has_ended)
        });
        let is_held = is_held && goes_on(&mut qmp);
        if is_held {
            qmp.monitor(&format!("qemu-io d0 \"write -P 5 {MIB} 2M\""));
            qmp.monitor("qemu-io d0 flush");
            let mut file = std::fs::File::create(&filler).unwrap();
            while file.write_all(&[1; 4096]).is_ok() {}
        }
        let _ = save.kill();
        save.wait().unwrap();
        is_held.then_some(images)
    });
    let images = images.expect("no save was held while its guest had the new image");
    // The guard tries, and tries again.
    for _ in 0..2 {
        let job = qmp.event("BLOCK_JOB_COMPLETED");
        assert!(job["error"].as_str().is_some_and(|why| why.contains("No space")), "{job}");
    }
    let runs = |qmp: &mut Qmp| (status(qmp) == "running").then_some(());
    eventually("the guest runs", Duration::from_secs(60), || runs(&mut qmp));
    assert_eq!((goes_on::chain(&mut qmp), disks::byte(&disk)), (images + 1, 5));
    std::fs::remove_file(filler).unwrap();
    eventually("the disk has it", Duration::from_secs(60), || (goes_on::chain(&mut qmp) == images).then_some(()));
    assert_eq!((disks::byte(&disk), disks::images(&disks.0).len()), (5, images));
    runs(&mut qmp).unwrap();
    place.save(source.pid(), "whole");
}
