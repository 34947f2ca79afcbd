use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// Processes of a host whose files lie in a directory.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn process(&self, pid: i32, program: &str, words: &str) {
        let path = self.0.path().join(format!("proc/{pid}"));
        fs::create_dir_all(path.join("fd")).unwrap();
        symlink(program, path.join("exe")).unwrap();
        fs::write(path.join("cmdline"), words.replace(' ', "\0") + "\0").unwrap();
    }

    fn guest(&self, pid: i32) -> Option<Guest> {
        Guest::of(self.0.path(), pid).unwrap()
    }
}

#[test]
fn programs_are_known_by_their_names_however_they_are_wrapped() {
    for qemu in [
        "/usr/bin/qemu-system-x86_64",
        "qemu-system-aarch64",
        "/usr/libexec/qemu-kvm",
        "/usr/bin/kvm",
        "/nix/store/x/bin/.qemu-system-x86_64-wrapped",
        "/nix/store/x/bin/.qemu-kvm-wrapped_",
        "/usr/bin/qemu-system-x86_64 (deleted)",
    ] {
        assert_eq!(Kind::of(qemu), Kind::Qemu, "{qemu}");
        assert_eq!(is_qemu(OsStr::new(qemu)), !qemu.contains("aarch64"), "{qemu}");
    }
    for monitor in ["firecracker", "/opt/cloud-hypervisor", "/usr/bin/crosvm"] {
        assert_eq!(Kind::of(monitor), Kind::Monitor, "{monitor}");
    }
    for other in ["/usr/bin/kvmtool", "qemu-img", "", "/", "/usr/bin/.x-wrapped", "python3"] {
        assert_eq!(Kind::of(other), Kind::Program, "{other}");
        assert!(!is_qemu(OsStr::new(other)), "{other}");
    }
}

#[test]
fn a_guest_is_called_as_its_command_line_says() {
    let host = Host::new();
    host.process(10, "/usr/bin/.kvm-wrapped", "kvm -uuid 1-A -name guest=web,debug-threads=on");
    host.process(11, "/usr/bin/qemu-system-x86_64 (deleted)", "qemu -name -odd");
    host.process(12, "/usr/bin/qemu-system-x86_64", "qemu -machine none,accel=kvm");
    host.process(13, "/usr/bin/firecracker", "firecracker --id micro --api-sock x");
    host.process(14, "/usr/bin/python3", "qemu-system-x86_64 -name web");
    host.process(15, "/usr/bin/qemu-system-x86_64-pageone", "qemu -name web");
    host.process(16, "/usr/bin/kvm", "");
    let name = |pid| host.guest(pid).unwrap().name;
    assert_eq!((name(10).as_deref(), host.guest(10).unwrap().uuid.as_deref()), (Some("web"), Some("1-A")));
    assert_eq!((name(11).as_deref(), host.guest(11).unwrap().by.len()), (Some("-odd"), 1));
    assert_eq!(host.guest(11).unwrap().program, "/usr/bin/qemu-system-x86_64");
    assert_eq!((host.guest(12), host.guest(15)), (None, None), "no guest runs in these");
    assert_eq!(name(13).as_deref(), Some("micro"));
    let python = host.guest(14).unwrap();
    assert_eq!((python.kind, python.name, python.by.is_empty()), (Kind::Program, None, true));
    assert_eq!((name(16), host.guest(16).unwrap().kind), (None, Kind::Qemu));
    assert_eq!(Guest::of(host.0.path(), 17).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn names_that_are_kept_are_short_and_those_of_guests() {
    let host = Host::new();
    let long = "x".repeat(1 << 16);
    host.process(10, "/usr/bin/kvm", &format!("kvm -name {long} -uuid {long}"));
    host.process(11, "/usr/bin/kvm", "kvm -name web");
    host.process(12, "/usr/bin/python3", "python3 -name web");
    let of = |pid| Names::of(host.0.path(), pid);
    let lengths = [of(10).name, of(10).uuid].map(|text| text.unwrap().len());
    assert_eq!(lengths, [MOST_OF_NAME; 2]);
    assert_eq!(of(11), Names { name: Some("web".into()), uuid: None });
    assert_eq!([of(12), of(13)], [Names::default(), Names::default()]);
}

#[test]
fn a_command_line_without_end_is_cut_or_refused() {
    let host = Host::new();
    for (pid, count, whole) in [(10, MOST / 2 - 1, true), (11, MOST, false)] {
        host.process(pid, "/usr/bin/kvm", &"a ".repeat(count as usize));
        assert!(words(host.0.path(), pid).unwrap().len() as u64 <= MOST / 2);
        let all = all_words(host.0.path(), pid);
        assert_eq!(all.as_ref().map_err(io::Error::kind).err(), (!whole).then_some(ErrorKind::InvalidData));
    }
}

#[test]
fn what_has_a_virtual_machine_is_a_guest() {
    let host = Host::new();
    host.process(10, "/opt/own-monitor", "own");
    let file = |name: &str| symlink(name, host.0.path().join(format!("proc/10/fd/{}", name.len()))).unwrap();
    file("/dev/kvm");
    let look = || {
        let mut guest = host.guest(10).unwrap();
        guest.look_at_files(host.0.path()).unwrap();
        (guest.kind, guest.by.join(" "))
    };
    assert_eq!(look(), (Kind::Program, "it has /dev/kvm open".into()));
    file("anon_inode:kvm-vm");
    assert_eq!(look(), (Kind::Monitor, "it has a virtual machine of KVM".into()));
}

/// A process that waits, with a program of this name.
fn waiting(program: &Path) -> std::process::Child {
    std::process::Command::new(program).arg("600").spawn().unwrap()
}

#[test]
fn a_word_means_one_process_or_none() {
    let root = Path::new("/");
    let dir = tempfile::tempdir().unwrap();
    let program = format!("waits-{}", std::process::id());
    let path = dir.path().join(&program);
    // A child of another test may have open what this process writes: then it cannot be run.
    assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap().success());
    let mut one = waiting(&path);
    let pid = one.id() as i32;
    let found = find(root, &program).unwrap();
    assert_eq!(found.pid().unwrap(), pid);
    assert_eq!(find(root, "4711").unwrap().pid().unwrap(), 4711, "a number is a process's, whether that lives or not");
    let mut two = waiting(&path);
    let why = find(root, &program).unwrap_err().to_string();
    assert!(why.contains(&format!("{pid} ({program})")) && why.contains(&two.id().to_string()), "{why}");
    for child in [&mut one, &mut two] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(matches!(found.pid(), Err(FindError::Ended { .. })), "its number may be another's now");
    assert!(matches!(find(root, &program), Err(FindError::None(_))));
}

#[test]
fn a_guest_is_chosen_by_name_or_uuid() {
    let host = Host::new();
    host.process(i32::MAX, "/usr/bin/kvm", "kvm -uuid 1-A -name guest=web");
    host.process(i32::MAX - 1, "/usr/bin/kvm", "kvm -uuid 1-B -name twice");
    host.process(i32::MAX - 2, "/usr/bin/kvm", "kvm -uuid 1-C -name twice");
    host.process(i32::MAX - 3, "/usr/bin/kvm", "kvm -name shop,,one");
    host.process(i32::MAX - 4, "/usr/bin/kvm", "kvm -name shop,,two");
    // No process has such a number: that it was found is all there is to say.
    for (word, pid) in [("web", i32::MAX), ("1-a", i32::MAX), ("1-b", i32::MAX - 1), ("shop,one", i32::MAX - 3)] {
        let found = find(host.0.path(), word);
        assert!(matches!(&found, Err(FindError::Ended { pid: of, .. }) if *of == pid), "{word}: {found:?}");
    }
    let why = find(host.0.path(), "twice").unwrap_err().to_string();
    assert!(why.starts_with("several processes are called twice: 2147483645 (kvm), 2147483646 (kvm)"), "{why}");
    assert!(matches!(find(host.0.path(), "nobody"), Err(FindError::None(_))));
}
