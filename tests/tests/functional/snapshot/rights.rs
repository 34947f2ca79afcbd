//! Clones have the rights of the guest that was stored, and no others; what comes from others is
//! data.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use super::*;

/// The account that guests of these tests run as.
const NOBODY: u32 = 65534;
/// Where Debian's QEMU has its modules: a copy of the program looks beside itself.
const MODULES: &str = "/usr/lib/x86_64-linux-gnu/qemu";

/// A guest of nobody's with a disk of its own, in a directory of its own; `program` is QEMU. It is
/// started by `before`.
fn machine_of_nobody(place: &Place, program: &Path, before: &[&str]) -> Machine {
    let (home, disk) = (place.path("home"), place.path("home/disk.qcow2"));
    std::fs::set_permissions(place.dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    std::fs::create_dir(&home).unwrap();
    e2e::qmp::make_disk(&disk);
    for path in [&home, &disk] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let (monitor, own) = (home.join("test.qmp"), home.join("own.qmp"));
    let line = "-accel tcg,tb-size=16 -cpu qemu64,-cx16 -m 64 -display none -nodefaults -no-user-config -device \
                virtio-blk-pci,drive=d0 -drive";
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let before = [before, &nobody].concat();
    let mut command = Command::new(before[0]);
    command
        .args(&before[1..])
        .arg(program)
        .args(line.split(' '))
        .arg(format!("file={},if=none,id=d0,format=qcow2", disk.display()));
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", own.display())).args(Qmp::words(&monitor));
    command.env("QEMU_MODULE_DIR", MODULES);
    command.args(["-L", "/usr/share/seabios", "-L", "/usr/share/qemu"]);
    let child = command.stdin(Stdio::null()).spawn().unwrap();
    let machine = Machine { child, monitor };
    assert_eq!(status(&mut machine.qmp()), "running");
    machine
}

/// A line of a process's status.
fn says(pid: i32, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn clones_of_anothers_guest_have_its_rights_and_what_is_imported_has_those_that_are_named() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = machine_of_nobody(&place, Path::new("qemu-system-x86_64"), &[]);
    let path = |name: &str| place.path(name).display().to_string();
    disks::write(&mut machine.qmp(), 3);
    // Its words name a directory of the host's.
    let pid = machine.pid().to_string();
    let save = |name: &str, more: &[&str]| {
        let words = ["snapshot", "save", &pid, "--to", "store", "--name", name];
        let out = place.run(&[&words, more].concat());
        assert!(out.status.success(), "{out:?}");
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let text = save("untried", &[]);
    assert!(text.contains("no clone was tried: the guest is another account's, and -L /usr/share/seabios"), "{text}");
    assert!(!save("one", &["--trust"]).contains("no clone was tried"));
    // One that was started for itself, and copies of one.
    for count in [1, 2] {
        let clones = place.clones("one", count, &[]);
        for clone in &clones.clones {
            assert_eq!(says(clone.pid, "Uid:"), "65534 65534 65534 65534");
            assert_eq!(says(clone.pid, "Gid:"), "65534 65534 65534 65534");
            assert_eq!((says(clone.pid, "Groups:"), says(clone.pid, "CapPrm:")), ("".into(), "0".repeat(16)));
            assert_eq!(says(clone.pid, "NoNewPrivs:"), "1");
            let mut qmp = clone.qmp("test.qmp");
            assert_eq!(status(&mut qmp), "running");
            let image = disks::image(&mut qmp);
            assert_eq!((std::fs::metadata(&image).unwrap().uid(), disks::byte(&image)), (NOBODY, 3));
            disks::write(&mut qmp, 4);
            assert_eq!(disks::byte(&image), 4);
        }
    }
    place.ok(&["snapshot", "verify", "store", "one", "--files", &path("f")]);
    // A directory that nobody cannot enter.
    std::fs::create_dir(place.path("closed")).unwrap();
    std::fs::set_permissions(place.path("closed"), PermissionsExt::from_mode(0o700)).unwrap();
    let text = place.fails(&["snapshot", "verify", "store", "one", "--files", &path("closed")]);
    assert!(text.contains("the guest runs as uid 65534, who cannot enter"), "{text}");
    // Another host's numbers of accounts mean nothing here.
    place.ok(&["snapshot", "export", "store", "one", "-o", &path("one.tar")]);
    place.ok(&["snapshot", "import", "store", &path("one.tar"), "--name", "there", "--disks", &path("disks")]);
    let verify = ["snapshot", "verify", "store", "there", "--files", &path("f")];
    let text = place.fails(&verify);
    assert!(text.contains("this snapshot was imported: say as whom its guests are to run with --user"), "{text}");
    let as_nobody = [&verify[..], &["--user", "65534"]].concat();
    let text = place.fails(&as_nobody);
    assert!(text.contains("this snapshot was imported, and -L /usr/share/seabios may reach files"), "{text}");
    place.ok(&[&verify[..], &["--trust"]].concat());
    // A pool that others can write to gives data only, too.
    std::fs::set_permissions(place.path("capacity"), PermissionsExt::from_mode(0o777)).unwrap();
    let text = place.fails(&["snapshot", "run", "store", "one", "--files", &path("f")]);
    assert!(text.contains("this snapshot lies in a pool that others can change ("), "{text}");
}

/// Whoever has a stored image can write another header, and set its time back.
#[test]
fn a_header_that_a_tenant_writes_leads_export_and_verify_to_no_file_of_the_host() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let machine = machine_of_nobody(&place, Path::new("qemu-system-x86_64"), &[]);
    let (pid, secret, tar) = (machine.pid().to_string(), place.path("secret"), place.path("tar").display().to_string());
    std::fs::write(&secret, "a secret of the host's").unwrap();
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
    place.ok(&["snapshot", "save", &pid, "--to", "store", "--name", "one", "--trust"]);
    let export = ["snapshot", "export", "store", "one", "-o", &tar, "--force"];
    place.ok(&export);
    // In a pool of others a record names any file.
    let capacity = place.path("capacity");
    let mode = std::fs::metadata(&capacity).unwrap().permissions();
    std::fs::set_permissions(&capacity, PermissionsExt::from_mode(0o777)).unwrap();
    let text = place.fails(&export);
    assert!(
        text.contains("this snapshot lies in a pool that others can change (") && text.contains("--trust"),
        "{text}"
    );
    place.ok(&[&export[..], &["--trust"]].concat());
    std::fs::set_permissions(&capacity, mode).unwrap();
    // The name of the file below: behind what else the header has, and its format.
    let stored = place.path("home/disk.one.qcow2");
    let (meta, mut bytes) = (std::fs::metadata(&stored).unwrap(), std::fs::read(&stored).unwrap());
    let name = secret.as_os_str().as_encoded_bytes();
    bytes[8..20].copy_from_slice(&[&1024_u64.to_be_bytes()[..], &(name.len() as u32).to_be_bytes()].concat());
    bytes[1024..1024 + name.len()].copy_from_slice(name);
    let extension = u32::from_be_bytes(bytes[100..104].try_into().unwrap()) as usize;
    bytes[extension..extension + 16].copy_from_slice(b"\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0");
    std::fs::write(&stored, bytes).unwrap();
    std::fs::File::open(&stored).unwrap().set_modified(meta.modified().unwrap()).unwrap();
    let files = place.path("f").display().to_string();
    for refused in [
        &export[..],
        &["snapshot", "verify", "store", "one", "--read-only"],
        &["snapshot", "run", "store", "one", "--files", &files, "--same-random"],
    ] {
        let text = place.fails(refused);
        assert!(text.contains("secret can't be used") && text.contains("Permission denied"), "{text}");
    }
    // What it may read is another file than that which was stored.
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o644)).unwrap();
    let text = place.fails(&export);
    assert!(text.contains("disk.one.qcow2 shows other files than when it was stored"), "{text}");
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
    // The next one would have it below.
    let text = place.fails(&["snapshot", "save", &pid, "--to", "store", "--name", "two", "--trust"]);
    assert!(text.contains("Permission denied"), "{text}");
    assert_eq!(status(&mut machine.qmp()), "running");
}

/// What its words name is of its container, and the trial would be of the host.
#[test]
fn of_a_guest_in_a_container_a_clone_is_tried_and_run_only_if_all_of_it_is_trusted() {
    if !can_run() {
        return;
    }
    ["-m", "-n"].into_iter().for_each(a_guest_elsewhere_is_tried_if_it_is_trusted);
}

fn a_guest_elsewhere_is_tried_if_it_is_trusted(namespace: &str) {
    let place = Place::new();
    let machine = machine_of_nobody(&place, Path::new("qemu-system-x86_64"), &["unshare", namespace]);
    // Who tries a clone finds that it would lack this.
    machine.qmp().execute("device_add", json!({ "driver": "virtio-rng-pci", "id": "hot0" }));
    let pid = machine.pid().to_string();
    let words = ["snapshot", "save", &pid, "--to", "store", "--name", "one"];
    let text = place.fails(&[&words[..], &["--trust"]].concat());
    assert!(text.contains("no clone of this guest would start as it is now"), "{text}");
    let out = place.run(&words);
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("no clone was tried: the guest runs in a container, with"), "{text}");
    assert_eq!(status(&mut machine.qmp()), "running");
    let text = place.fails(&["snapshot", "run", "store", "one", "--files", &place.path("f").display().to_string()]);
    assert!(
        text.contains("this snapshot is of a guest in a container, with mounts, users, processes or networks"),
        "{text}"
    );
}

#[test]
fn a_program_that_others_can_replace_is_not_stored_to_be_run() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let program = place.path("qemu-system-x86_64");
    let which = Command::new("sh").args(["-c", "readlink -f $(command -v qemu-system-x86_64)"]).output().unwrap();
    std::fs::copy(String::from_utf8(which.stdout).unwrap().trim(), &program).unwrap();
    let machine = machine_of_nobody(&place, &program, &[]);
    chown(&program, Some(NOBODY), None).unwrap();
    let pid = machine.pid().to_string();
    let save = |name: &str| {
        let mut command = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", name]);
        let out = command.env("QEMU_MODULE_DIR", MODULES).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (_, text) = save("no");
    assert!(text.contains("can be changed by others than you and root"), "{text}");
    assert_eq!(status(&mut machine.qmp()), "running");
    // What an archive names is not run.
    chown(&program, Some(0), None).unwrap();
    let (saved, text) = save("one");
    assert!(saved, "{text}");
    drop(machine);
    let marker = place.path("ran");
    std::fs::write(&program, format!("#!/bin/sh\ntouch {}\n", marker.display())).unwrap();
    chown(&program, Some(NOBODY), None).unwrap();
    let files = place.path("f").display().to_string();
    for command in ["run", "verify"] {
        let text = place.fails(&["snapshot", command, "store", "one", "--files", &files]);
        assert!(text.contains("is not run: others than you and root can change"), "{text}");
    }
    assert!(!marker.exists());
}
