//! Disks: each snapshot and each clone has its own content.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use super::*;

/// Where the tests write.
const AT: u64 = 1 << 20;

/// A byte of the disk that an image shows, by docs/interop/qcow2.rst of QEMU: zero, where nothing
/// was ever written.
pub(super) fn byte(image: &Path) -> u8 {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(image).unwrap();
    let bytes = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    if bytes(0, 4) != b"QFI\xfb" {
        return bytes(AT, 1)[0]; // Raw.
    }
    let number = |at: u64| u64::from_be_bytes(bytes(at, 8).try_into().unwrap());
    // The upper bits and the lowest are flags.
    let place = |at: u64| number(at) & 0x00ff_ffff_ffff_fe00;
    let cluster = 1_u64 << 16;
    let table = place(number(40) + AT / (cluster * cluster / 8) * 8);
    let data = if table == 0 { 0 } else { place(table + AT / cluster % (cluster / 8) * 8) };
    if data != 0 {
        return bytes(data + AT % cluster, 1)[0];
    }
    let (name_at, len) = (number(8), number(16) >> 32);
    if name_at == 0 {
        return 0;
    }
    let name = String::from_utf8(bytes(name_at, len as usize)).unwrap();
    byte(&image.parent().unwrap().join(name))
}

/// Writes to the disk, through its QEMU.
pub(super) fn write(qmp: &mut Qmp, byte: u8) {
    qmp.monitor(&format!("qemu-io d0 \"write -P {byte} {AT} 64k\""));
    qmp.monitor("qemu-io d0 flush");
}

/// The image that a QEMU writes to, by the name with which it was started.
pub(super) fn image(qmp: &mut Qmp) -> PathBuf {
    let all = qmp.execute("query-block", json!({}));
    let images = std::iter::successors(Some(&all[0]["inserted"]["image"]), |image| image.get("backing-image"));
    let mut names = images.filter_map(|image| image["filename"].as_str());
    names.find(|name| !name.starts_with("json:")).unwrap().into()
}

/// The names of a directory's images.
pub(super) fn images(directory: &Path) -> Vec<String> {
    let all = std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let mut all: Vec<String> = all.filter(|name| name.ends_with(".qcow2")).collect();
    all.sort();
    all
}

/// Two clones of a snapshot find this byte; what one writes, the other does not see.
fn clones_write_their_own(place: &Place, name: &str, want: u8) {
    let clones = place.clones(name, 2, &[]);
    let [mut first, mut second] = [0, 1].map(|at| clones.clones[at].qmp("source.qmp"));
    let images = [image(&mut first), image(&mut second)];
    assert_eq!(images.each_ref().map(|image| byte(image)), [want, want]);
    write(&mut first, 9);
    assert_eq!(images.each_ref().map(|image| byte(image)), [9, want]);
    assert!(images.iter().zip(&clones.clones).all(|(image, clone)| image.starts_with(&clone.directory)));
}

#[test]
fn a_disk_is_what_it_was_at_the_snapshot_and_each_clone_writes_its_own() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (disk, source) = place.machine_with_disk();
    let mut qmp = source.qmp();
    write(&mut qmp, 1);
    place.save(source.pid(), "one");
    write(&mut qmp, 2);
    place.save(source.pid(), "two");
    write(&mut qmp, 3);
    assert_eq!(image(&mut qmp), disk);
    let images = ["disk.one.qcow2", "disk.two.qcow2", "disk.qcow2"].map(|name| byte(&place.path(name)));
    assert_eq!(images, [1, 2, 3]);
    clones_write_their_own(&place, "one", 1);
    clones_write_their_own(&place, "two", 2);
    // A snapshot is tried: memory, disk, and a guest that goes on.
    let text = place.ok(&["snapshot", "verify", "store", "two", "--files", &place.path("f").display().to_string()]);
    assert!(text.contains("a guest goes on from it"), "{text}");
    assert_eq!(std::fs::read_dir(place.path("f")).unwrap().count(), 0, "nothing of it is left");
    // What the clones wrote is theirs.
    let images = ["disk.one.qcow2", "disk.two.qcow2", "disk.qcow2"].map(|name| byte(&place.path(name)));
    assert_eq!(images, [1, 2, 3]);
    drop(source);
    // A disk that is gone is named, and nothing starts.
    std::fs::remove_file(place.path("disk.one.qcow2")).unwrap();
    let text = place.fails(&["snapshot", "run", "store", "one", "--files", &place.path("f").display().to_string()]);
    assert!(text.contains("disk.one.qcow2 can't be used"), "{text}");
    let text = place.fails(&["snapshot", "verify", "store", "one", "--read-only"]);
    assert!(text.contains("disk.one.qcow2 can't be used"), "{text}");
    // What no rule keeps goes.
    assert!(place.fails(&["snapshot", "prune", "store"]).contains("say what to keep"));
    let pruned = |more: &[&str]| place.ok(&[&["snapshot", "prune", "store", "--keep-last", "1"], more].concat());
    assert!(pruned(&["--dry-run"]).contains("would remove one (qemu-system-x86_64 "));
    assert_eq!(place.names(), ["one", "two"]);
    assert!(pruned(&[]).contains("removed one (qemu-system-x86_64 "));
    assert_eq!(place.names(), ["two"]);
    place.ok(&["pool", "check", "store"]);
}

#[test]
fn disks_with_one_stem_are_stored_under_two_names() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let words: Vec<String> = ["vm.a", "vm.b"]
        .iter()
        .flat_map(|name| {
            let (disk, id) = (place.path(name), name.replace('.', "-"));
            e2e::qmp::make_disk(&disk);
            let drive = format!("file={},if=none,id={id},format=qcow2", disk.display());
            ["-drive".into(), drive, "-device".into(), format!("virtio-blk-pci,drive={id}")]
        })
        .collect();
    let source = place.machine("source", &words.iter().map(String::as_str).collect::<Vec<_>>());
    place.save(source.pid(), "both");
    assert_eq!(images(place.dir.path()), ["vm.both-1.qcow2", "vm.both.qcow2"]);
    place.ok(&["snapshot", "verify", "store", "both", "--files", &place.path("f").display().to_string()]);
}

/// The user's words start the guest with what it has written, whatever was stored meanwhile.
#[test]
fn a_guest_that_is_started_again_has_what_it_wrote_and_its_snapshots_have_what_they_had() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (disk, source) = place.machine_with_disk();
    let mut qmp = source.qmp();
    write(&mut qmp, 1);
    place.save(source.pid(), "one");
    write(&mut qmp, 2);
    // QEMU itself writes nothing into a stored image, and opens no other file in its place.
    for _ in 0..2 {
        let refused = qmp.try_execute("block-commit", json!({ "job-id": "by-hand", "device": "d0" })).unwrap_err();
        assert!(refused.contains("lock"), "{refused}");
    }
    write(&mut qmp, 3);
    assert_eq!([&disk, &place.path("disk.one.qcow2")].map(|image| byte(image)), [3, 1]);
    drop(qmp);
    // It is killed: a shutdown is kinder.
    drop(source);
    let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
    let again = || place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    let source = again();
    let mut qmp = source.qmp();
    assert_eq!((image(&mut qmp), byte(&disk)), (disk.clone(), 3));
    write(&mut qmp, 4);
    // A snapshot after the start, and one that fails after the guest has gone on.
    let pid = source.pid().to_string();
    let save = ["snapshot", "save", &pid, "--to", "store", "--name", "never"];
    if let Some(text) = refused::with_failing_calls(&place, &["-e", "inject=process_vm_readv:error=EIO"], &save) {
        assert!(text.contains("snapshot never was not stored"), "{text}");
        assert_eq!((status(&mut qmp), byte(&disk)), ("running".to_string(), 4));
        assert_eq!(images(place.dir.path()), ["disk.one.qcow2", "disk.qcow2"]);
    }
    place.save(source.pid(), "two");
    write(&mut qmp, 5);
    drop(qmp);
    drop(source);
    let source = again();
    assert_eq!(byte(&disk), 5);
    clones_write_their_own(&place, "one", 1);
    clones_write_their_own(&place, "two", 4);
    // Nobody writes to a stored image. If somebody does, it is named, also one below another.
    let stored = place.path("disk.one.qcow2");
    let meta = std::fs::metadata(&stored).unwrap();
    assert_eq!(meta.permissions().mode() & 0o222, 0);
    std::fs::File::options().write(true).open(&stored).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
    let (pid, files) = (source.pid().to_string(), place.path("f").display().to_string());
    for refused in [
        &["snapshot", "run", "store", "two", "--files", &files][..],
        &["snapshot", "verify", "store", "two", "--read-only"],
        &["snapshot", "save", &pid, "--to", "store", "--name", "three"],
    ] {
        let text = place.fails(refused);
        assert!(text.contains("disk.one.qcow2 is not what was stored: somebody has written to it"), "{text}");
    }
    std::fs::File::open(&stored).unwrap().set_modified(meta.modified().unwrap()).unwrap();
    place.ok(&["snapshot", "verify", "store", "two", "--read-only"]);
    drop(source);
    // Root's QEMU would write to it.
    let drive = format!("file={},if=none,id=d0,format=qcow2", stored.display());
    let words = ["qemu-system-x86_64", "-display", "none", "-drive", &drive, "-device", "virtio-blk-pci,drive=d0"];
    let out = place.prepared(&words.map(String::from)).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && text.contains("disk.one.qcow2, as its mode says"), "{text}");
    place.ok(&["snapshot", "verify", "store", "two", "--read-only"]);
    // No name is left over but that by which the last QEMU knew the disk.
    let all = std::fs::read_dir(place.dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(all.filter(|name| name.to_string_lossy().starts_with(".disk")).count(), 1);
    assert_eq!(images(place.dir.path()), ["disk.one.qcow2", "disk.qcow2", "disk.two.qcow2"]);
}

/// Whatever was done when the command is killed, its guard leaves a disk that QEMU can be started
/// with again, under its own name.
#[test]
fn a_save_that_is_killed_at_any_of_its_steps_leaves_what_the_guest_writes_under_the_disks_name() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (disk, source) = place.machine_with_disk();
    let (pid, mut qmp) = (source.pid().to_string(), source.qmp());
    // The disk's names are made, the pause, what its end leaves to do, and the record.
    let steps = ["linkat", "symlink", "rename:when=1", "rename:when=2", "fchmod"];
    for (number, step) in steps.into_iter().enumerate() {
        let (call, when) = step.split_once(':').unwrap_or((step, "when=1"));
        let (name, inject) = (format!("cut-{number}"), format!("inject={call}:signal=KILL:{when}"));
        let save = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", &name]);
        let mut strace = Command::new("strace");
        // The guard is another process, which is not traced.
        strace.args(["-qq", "-o", "/dev/null", "-e", &inject]).arg(save.get_program()).args(save.get_args());
        let Ok(out) = strace.env("PAGEONE_POOLS", place.path("names")).output() else {
            return skipped("no command can be killed at its system calls: strace is not here; scripts/deps.sh test");
        };
        assert!(!out.status.success(), "{step}: {}", String::from_utf8_lossy(&out.stdout));
        eventually("the guest runs", Duration::from_secs(30), || (status(&mut qmp) == "running").then_some(()));
        let now = number as u8 + 1;
        write(&mut qmp, now);
        eventually("the disk has what it wrote", Duration::from_secs(30), || (byte(&disk) == now).then_some(()));
        eventually("all is put back", Duration::from_secs(30), || {
            let all = std::fs::read_dir(place.dir.path()).unwrap().flatten().map(|entry| entry.file_name());
            (all.filter(|name| name.to_string_lossy().contains("disk")).count() == 1).then_some(())
        });
        assert_eq!(byte(&disk), now, "{step}");
    }
    assert!(place.names().is_empty());
    drop((qmp, source));
    assert_eq!(byte(&disk), steps.len() as u8);
}

#[test]
fn a_snapshot_goes_to_another_host_as_an_archive_and_a_damaged_one_leaves_nothing() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (disk, source) = place.machine_with_disk();
    let mut qmp = source.qmp();
    write(&mut qmp, 1);
    place.save(source.pid(), "one");
    write(&mut qmp, 2);
    place.save(source.pid(), "two");
    drop(source);
    let path = |name: &str| place.path(name).display().to_string();
    place.ok(&["snapshot", "export", "store", "two", "-o", &path("two.tar")]);
    let bytes = std::fs::read(place.path("two.tar")).unwrap();
    // The pool can be written while somebody reads the archive.
    let mut export = place.command(&["snapshot", "export", "store", "two"]).stdout(Stdio::piped()).spawn().unwrap();
    let (mut out, mut slowly) = (export.stdout.take().unwrap(), vec![0]);
    out.read_exact(&mut slowly).unwrap();
    place.ok(&["snapshot", "rm", "store", "one"]);
    assert!(export.try_wait().unwrap().is_none(), "it waits for its reader");
    out.read_to_end(&mut slowly).unwrap();
    assert!(export.wait().unwrap().success() && slowly == bytes);
    // An image that somebody has written to is none of the snapshot's.
    let image = std::fs::File::open(place.path("disk.two.qcow2")).unwrap();
    let written = image.metadata().unwrap().modified().unwrap();
    image.set_modified(std::time::UNIX_EPOCH).unwrap();
    let text = place.fails(&["snapshot", "export", "store", "two", "-o", &path("late.tar")]);
    assert!(text.contains("is not what was stored") && !place.path("late.tar").exists(), "{text}");
    image.set_modified(written).unwrap();
    // Nothing of what it came from is needed.
    for gone in [disk, place.path("disk.one.qcow2"), place.path("disk.two.qcow2")] {
        std::fs::remove_file(gone).unwrap();
    }
    assert!(place.fails(&["snapshot", "export", "store", "two"]).contains("can't be used"));
    place.ok(&["pool", "create", "other", "--capacity", &path("other")]);
    let import = ["snapshot", "import", "other", &path("bad.tar"), "--disks", &path("disks")].map(str::to_owned);
    let import: Vec<&str> = import.iter().map(String::as_str).collect();
    let middle = bytes.len() / 2;
    let flipped: Vec<u8> = bytes.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == middle)).collect();
    for (bad, words) in [
        (&bytes[..middle], "the archive is damaged: it ends too early"),
        (&flipped[..], "the archive is damaged"),
        (b"no archive at all", "is no archive of"),
        (b"", "is no archive of"),
    ] {
        std::fs::write(place.path("bad.tar"), bad).unwrap();
        let text = place.fails(&import);
        assert!(text.contains(words), "{text}");
        assert!(!place.path("disks").exists(), "nothing is left");
        assert!(place.ok(&["snapshot", "ls", "other", "--json"]).trim() == "[]");
    }
    std::fs::write(place.path("bad.tar"), &bytes).unwrap();
    assert!(place.fails(&import[..4]).contains("--disks DIR"));
    place.ok(&[&import[..], &["--name", "there"]].concat());
    assert!(place.fails(&[&import[..], &["--name", "there"]].concat()).contains("already"));
    place.ok(&["pool", "check", "other"]);
    place.ok(&["pool", "destroy", "store", "--yes"]);
    let files = path("files");
    let text = place.ok(&["snapshot", "verify", "other", "there", "--trust", "--files", &files]);
    assert!(text.contains("a guest goes on from it"), "{text}");
    // One that stops is told from one that goes on.
    let verify = ["snapshot", "verify", "other", "there", "--trust", "--seconds", "12", "--files", &files];
    let text = std::thread::scope(|scope| {
        let verified = scope.spawn(|| place.fails(&verify));
        let socket = eventually("the clone's monitor", Duration::from_secs(20), || {
            let passing = std::fs::read_dir(&files).ok()?.flatten().next()?.path();
            let directory = std::fs::read_dir(passing).ok()?.flatten().next()?.path();
            Some(directory.join("source.qmp")).filter(|socket| socket.exists())
        });
        let mut qmp = Qmp::connect(&socket);
        eventually("it runs", Duration::from_secs(20), || (status(&mut qmp) == "running").then_some(()));
        qmp.execute("stop", json!({}));
        verified.join().unwrap()
    });
    assert!(text.contains("the clone is paused after its start"), "{text}");
    let left = std::fs::read_dir(&files).unwrap().flatten().next().unwrap();
    assert!(left.file_name().to_str().unwrap().starts_with("verify-there-") && left.path().join("output.log").exists());
    // The disk is the one of the second snapshot, which is in the image below.
    assert_eq!(byte(&place.path("disks/there.disk-0-0")), 2);
}

/// A file system of its own, until it is dropped. `None`: it cannot be made here.
pub(super) struct Mounted(pub(super) PathBuf);

impl Mounted {
    pub(super) fn xfs(place: &Place) -> Option<Self> {
        let (file, at) = (place.path("xfs.img"), place.path("xfs"));
        std::fs::File::create(&file).unwrap().set_len(512 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let run = |program: &str, args: &[&str]| Command::new(program).args(args).arg(&file).output();
        let made = run("mkfs.xfs", &["-q"]).map(|out| out.status.success()).unwrap_or(false);
        let mounted = Command::new("mount").args(["-o", "loop"]).args([&file, &at]).output().unwrap();
        if made && mounted.status.success() {
            return Some(Self(at));
        }
        let why = String::from_utf8_lossy(&mounted.stderr).into_owned();
        skipped(&format!("raw disks need XFS on a loop device; mkfs.xfs: {made} (package xfsprogs), mount: {why}"));
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_raw_disk_is_copied_at_once_and_stays_what_it_was() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(xfs) = Mounted::xfs(&place) else { return };
    let disk = xfs.0.join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let drive = format!("file={},if=none,id=d0,format=raw", disk.display());
    let source = place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    let mut qmp = source.qmp();
    let raws = || std::fs::read_dir(&xfs.0).unwrap().count() - 1;
    write(&mut qmp, 1);
    place.save(source.pid(), "one");
    write(&mut qmp, 2);
    // One that fails leaves no copy.
    let pid = source.pid().to_string();
    let save = ["snapshot", "save", &pid, "--to", "store", "--name", "never"];
    if let Some(text) = refused::with_failing_calls(&place, &["-e", "inject=process_vm_readv:error=EIO"], &save) {
        assert!(text.contains("snapshot never was not stored"), "{text}");
        assert_eq!((raws(), status(&mut qmp)), (1, "running".to_string()));
    }
    place.save(source.pid(), "two");
    write(&mut qmp, 3);
    assert_eq!(image(&mut qmp), disk);
    let images = ["disk.img", "disk.one.raw", "disk.two.raw"].map(|name| byte(&xfs.0.join(name)));
    assert_eq!(images, [3, 1, 2]);
    clones_write_their_own(&place, "one", 1);
    clones_write_their_own(&place, "two", 2);
    let images = ["disk.img", "disk.one.raw", "disk.two.raw"].map(|name| byte(&xfs.0.join(name)));
    assert_eq!((images, raws()), ([3, 1, 2], 2));
    // To another host, which need not have such a file system.
    let path = |name: &str| place.path(name).display().to_string();
    place.ok(&["snapshot", "export", "store", "two", "-o", &path("two.tar")]);
    std::fs::create_dir(place.path("disks")).unwrap();
    let text = place.ok(&[
        "snapshot",
        "import",
        "store",
        &path("two.tar"),
        "--name",
        "there",
        "--disks",
        &path("disks"),
        "--json",
    ]);
    let imported: Value = serde_json::from_str(&text).unwrap();
    assert!(imported["name"] == "there" && imported["memory_bytes"].as_u64().unwrap() >= 16 << 20, "{text}");
    let text =
        place.ok(&["snapshot", "verify", "store", "there", "--trust", "--files", &path("files"), "--json", "--quiet"]);
    let verified: Value = serde_json::from_str(&text).unwrap();
    assert!(verified["verified"] == "a guest goes on from it", "{text}");
    assert_eq!(byte(&place.path("disks/there.disk-0-0")), 2);
}

#[test]
fn a_raw_disk_in_many_pieces_is_refused_with_the_figure_before_its_guest_stands() {
    use std::os::unix::fs::FileExt;
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(xfs) = Mounted::xfs(&place) else { return };
    let disk = xfs.0.join("disk.img");
    let file = std::fs::File::create(&disk).unwrap();
    (0..5000).for_each(|piece| file.write_all_at(&[1; 4096], piece * 8192).unwrap());
    drop(file);
    let drive = format!("file={},if=none,id=d0,format=raw", disk.display());
    let source = place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    let pid = source.pid().to_string();
    let save = ["snapshot", "save", &pid, "--to", "store", "--name", "one", "--max-pause"];
    let text = place.fails(&[&save[..], &["0"]].concat());
    assert!(text.contains(" pieces; --max-pause is 0 ms: use --max-pause "), "{text}");
    assert_eq!(std::fs::read_dir(&xfs.0).unwrap().count(), 1, "nothing was made");
    place.ok(&[&save[..], &["60000"]].concat());
}

/// Images that a guest of many snapshots has: more than JSON's readers nest.
const IMAGES: usize = 200;

#[test]
fn a_guest_of_hundreds_of_snapshots_is_stored_and_its_clones_run() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let image = |number: usize| match number {
        IMAGES => place.path("disk.qcow2"),
        number => place.path(&format!("{number}.qcow2")),
    };
    e2e::qmp::make_disk(&image(0));
    for number in 1..=IMAGES {
        snapshot::qcow2::create_over(&image(number), &image(number - 1), false).unwrap();
    }
    let drive = format!("file={},if=none,id=d0,format=qcow2", image(IMAGES).display());
    let source = place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    for name in ["one", "two"] {
        write(&mut source.qmp(), name.len() as u8);
        place.save(source.pid(), name);
    }
    clones_write_their_own(&place, "two", 3);
}
