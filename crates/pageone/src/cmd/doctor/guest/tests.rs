use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use control::{ClientMetrics, ClientState, HostMetrics};

use super::*;

const PID: i32 = 4711;
const OTHER: i32 = 4712;

/// A made root directory with one guest: QEMU as libvirt runs it, in which nothing is wrong but
/// that it has no agent.
struct Made {
    root: tempfile::TempDir,
}

impl Made {
    fn new() -> Self {
        let made = Self { root: tempfile::tempdir().unwrap() };
        made.write("usr/bin/qemu-system-x86_64", "");
        std::fs::remove_file(made.path("usr/bin/qemu-system-x86_64")).unwrap();
        symlink(std::env::current_exe().unwrap(), made.path("usr/bin/qemu-system-x86_64")).unwrap();
        made.write("dev/userfaultfd", "");
        made.mode("dev/userfaultfd", 0o666);
        made.write("dev/kmsg", "");
        made.of_guest("cmdline", "qemu-system-x86_64\0-name\0guest=web,debug-threads=on\0-sandbox\0on,spawn=deny\0");
        made.of_guest(
            "status",
            "Uid:\t64055\t64055\t64055\t64055\nGid:\t108\t108\t108\t108\nSeccomp:\t2\nSeccomp_filters:\t1\n",
        );
        made.of_guest("smaps", &smaps("rw-p", "0", "", "mg"));
        made.of_guest("attr/current", "libvirt-0c1 (enforce)\n");
        made.of_guest("fd/0", "");
        made.link("exe", made.path("usr/bin/qemu-system-x86_64"));
        made.link("root", made.path(""));
        made
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn mode(&self, path: &str, mode: u32) {
        std::fs::set_permissions(self.path(path), PermissionsExt::from_mode(mode)).unwrap();
    }

    fn of_guest(&self, file: &str, text: &str) {
        self.write(&format!("proc/{PID}/{file}"), text);
    }

    fn link(&self, file: &str, target: impl AsRef<Path>) {
        let path = self.path(&format!("proc/{PID}/{file}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    fn look(&self, status: Option<&Status>) -> Guest {
        let program = "qemu-system-x86_64".to_owned();
        let found = Found { pid: PID, kind: Kind::Qemu, program, name: None, uuid: None, by: vec!["made".into()] };
        let directories = [PathBuf::from("/run/pageone")];
        examine(&World::new(self.root.path(), &directories, status), &found)
    }
}

/// Memory of 256 MiB with these permissions, inode, name and flags.
fn smaps(perms: &str, inode: &str, name: &str, flags: &str) -> String {
    format!("7f0000000000-7f0010000000 {perms} 00000000 00:01 {inode} {name}\nVmFlags: rd wr {flags}\n")
}

fn status() -> Status {
    let metrics =
        ClientMetrics { regions: 1, region_bytes: 256 << 20, pages_merged: 25_600, ..ClientMetrics::default() };
    let client = |pid, name: &str| ClientStatus {
        pid,
        name: "qemu-system-x86".into(),
        guest_name: Some(name.into()),
        rule: "default: by slice".into(),
        state: ClientState::Merging,
        metrics: metrics.clone(),
        ..ClientStatus::default()
    };
    let clients = vec![client(PID, "web"), client(OTHER, "db")];
    let domain = DomainStatus { name: "slice acme".into(), clients, ..DomainStatus::default() };
    Status { metrics: HostMetrics::default(), domains: vec![domain], ..Status::default() }
}

fn check<'g>(guest: &'g Guest, name: &str) -> &'g Check {
    guest.checks.iter().find(|check| check.check == name).unwrap_or_else(|| panic!("no {name}: {guest:?}"))
}

fn blocks(guest: &Guest) -> Vec<&str> {
    let blocks = guest.checks.iter().filter(|check| check.verdict == Verdict::Blocks);
    blocks.map(|check| check.check).collect()
}

#[test]
fn a_guest_without_the_agent_is_told_how_to_get_it() {
    let made = Made::new();
    let guest = made.look(Some(&Status::default()));
    assert_eq!((blocks(&guest), guest.name.as_str()), (vec!["merging"], "web"), "{guest:?}");
    let merging = check(&guest, "merging");
    let remedy = merging.remedy.as_ref().unwrap();
    assert!(remedy.contains("emulator") && remedy.contains("`pageone attach 4711`"), "{remedy}");
    let fix = merging.fix.as_ref().unwrap();
    assert!(fix.command.starts_with("virt-xml 'web' --edit") && !fix.safe, "{fix:?}");
    made.of_guest("attr/current", "unconfined\n");
    let remedy = check(&made.look(None), "merging").remedy.clone().unwrap();
    assert!(remedy.contains("`pageone run`") && remedy.contains("attach"), "{remedy}");
    made.of_guest("cmdline", "qemu-system-x86_64\0");
    let remedy = check(&made.look(None), "merging").remedy.clone().unwrap();
    assert!(!remedy.contains("attach"), "a filter that is not QEMU's own: {remedy}");
    made.write("container/dev/userfaultfd", "");
    made.mode("container/dev/userfaultfd", 0o666);
    made.link("root", made.path("container"));
    let remedy = check(&made.look(None), "merging").remedy.clone().unwrap();
    assert!(remedy.contains("container") && !remedy.contains("attach"), "{remedy}");
}

#[test]
fn a_guest_is_called_as_on_every_screen_and_no_name_floods_this_one() {
    let made = Made::new();
    let long = "x".repeat(100_000);
    made.of_guest("cmdline", &format!("qemu-system-x86_64\0-name\0{long}\0"));
    made.of_guest("environ", &format!("{}=/{long}/agent.sock\0", wire::ENV_SOCKET));
    made.of_guest("comm", "qemu-system-x86\n");
    let agent = "7f0020000000-7f0020001000 r-xp 00000000 00:01 9 /usr/lib/libpageone_agent.so\nVmFlags: rd ex\n";
    for agent in ["", agent] {
        made.of_guest("smaps", &(smaps("rw-p", "0", "", "mg") + agent));
        let guest = made.look(Some(&Status::default()));
        let said = serde_json::to_string(&guest).unwrap();
        assert!(guest.name.len() == 128 && said.len() < 4096, "{} {}", guest.name.len(), said.len());
    }
    let mut status = status();
    for (client, name) in status.domains[0].clients.iter_mut().zip(["own", "other"]) {
        (client.guest_name, client.own_name) = (None, Some(name.into()));
    }
    let guest = made.look(Some(&status));
    assert_eq!(guest.name, "own");
    let domain = check(&guest, "domain");
    assert!(domain.found.ends_with("with other (4712)"), "{domain:?}");
    made.of_guest("cmdline", "qemu-system-x86_64\0");
    assert_eq!(made.look(None).name, "qemu-system-x86");
}

#[test]
fn each_obstacle_is_found_and_attach_is_offered_past_none() {
    const DENIED: &str = "5,1,2,-;apparmor=\"DENIED\" operation=\"open\" profile=\"libvirt-0c1\" \
                          name=\"/proc/4711/smaps\" pid=4711 requested_mask=\"r\" denied_mask=\"r\"\n";
    let elf = [b"\x7fELF\x02\x01".as_slice(), &[0; 58]].concat();
    type Change = Box<dyn Fn(&Made)>;
    let obstacles: Vec<(&str, &str, Change)> = vec![
        (
            "memory",
            "memory-backend-ram",
            Box::new(|made| made.of_guest("smaps", &smaps("rw-s", "5", "/memfd:ram (deleted)", "sh"))),
        ),
        (
            "memory",
            "exists twice",
            Box::new(|made| made.of_guest("smaps", &smaps("rw-p", "5", "/memfd:ram (deleted)", "mg"))),
        ),
        (
            "memory",
            "<hugepages/>",
            Box::new(|made| made.of_guest("smaps", &smaps("rw-s", "5", "/dev/hugepages/x", "sh ht"))),
        ),
        ("userfaultfd", "udev", Box::new(|made| made.mode("dev/userfaultfd", 0o600))),
        (
            "userfaultfd",
            "cgroup_device_acl",
            Box::new(|made| std::fs::remove_file(made.path("dev/userfaultfd")).unwrap()),
        ),
        (
            "profile",
            "'owner @{PROC}/@{pid}/smaps r,' in /etc/apparmor.d/local",
            Box::new(|made| made.write("dev/kmsg", DENIED)),
        ),
        ("pins", "device", Box::new(|made| made.link("fd/9", "/dev/vfio/12"))),
        ("pins", "mem-lock=off", Box::new(|made| made.of_guest("smaps", &smaps("rw-p", "0", "", "lo mg")))),
        (
            "program",
            "dynamically",
            Box::new(move |made| {
                std::fs::write(made.path("elf"), &elf).unwrap();
                made.link("exe", made.path("elf"));
            }),
        ),
    ];
    for (name, remedy, change) in obstacles {
        let made = Made::new();
        change(&made);
        let guest = made.look(Some(&Status::default()));
        assert_eq!(blocks(&guest), ["merging", name], "{guest:?}");
        assert!(check(&guest, name).remedy.as_ref().unwrap().contains(remedy), "{guest:?}");
        let merging = check(&guest, "merging").remedy.as_ref().unwrap();
        assert!(!merging.contains("attach"), "{merging}");
        assert_eq!(merging.starts_with("none while"), ["memory", "pins", "program"].contains(&name), "{merging}");
    }
}

#[test]
fn a_merged_guest_shows_its_domain_and_who_else_is_in_it() {
    let made = Made::new();
    let agent =
        "7f1000000000-7f1000001000 r-xp 00000000 08:01 7 /usr/lib/pageone/libpageone_agent.so\nVmFlags: rd ex\n";
    made.of_guest("smaps", &format!("{}{agent}", smaps("rw-p", "0", "", "uw")));
    // None of it matters any more.
    made.mode("dev/userfaultfd", 0o600);
    let mut status = status();
    let guest = made.look(Some(&status));
    assert!(guest.checks.iter().all(|check| check.verdict == Verdict::Ok), "{guest:?}");
    assert_eq!(check(&guest, "merging").found, "merging: 100 of 256 MiB share, 0 MiB are zero");
    assert_eq!(check(&guest, "domain").found, "slice acme (default: by slice); with db (4712)");
    let client = &mut status.domains[0].clients[0];
    client.metrics.max_map_count_binds = true;
    client.remarks.unknown = Some("no file; run the daemon as root".into());
    client.remarks.cooling = Some("nfs4".into());
    let guest = made.look(Some(&status));
    let verdicts = ["mappings", "domain", "pins"].map(|name| check(&guest, name).verdict);
    assert_eq!(verdicts, [Verdict::Note; 3], "{guest:?}");
    status.domains[0].clients[0].state = ClientState::Disconnected;
    assert_eq!(blocks(&made.look(Some(&status))), ["merging", "userfaultfd"]);
    made.mode("dev/userfaultfd", 0o666);
    status.domains[0].clients[0].remarks.refused = Some("its memory is locked".into());
    let guest = made.look(Some(&status));
    assert!(check(&guest, "merging").found.ends_with("its memory is locked"), "{guest:?}");
    // No daemon knows it.
    let guest = made.look(None);
    assert_eq!(blocks(&guest), ["merging"]);
    let remedy = check(&guest, "merging").remedy.clone().unwrap();
    assert!(remedy.contains("/run/pageone/agent.sock") && remedy.contains("start one"), "{remedy}");
    made.write("run/pageone/agent.sock", "");
    assert_eq!(blocks(&made.look(None)), ["merging"], "a daemon that does not answer");
    made.of_guest("environ", "A=1\0PAGEONE_SOCKET=/tmp/own/agent.sock\0");
    assert_eq!(blocks(&made.look(None)), ["merging"], "nothing is there");
    made.write("tmp/own/agent.sock", "");
    let guest = made.look(None);
    let merging = check(&guest, "merging");
    assert_eq!((merging.verdict, merging.remedy.as_ref().unwrap().contains("--dir '/tmp/own'")), (Verdict::Note, true));
    std::fs::remove_file(made.path("tmp/own/agent.sock")).unwrap();
    // KSM had the memory first.
    made.of_guest("smaps", &format!("{}{agent}", smaps("rw-p", "0", "", "mg")));
    assert_eq!(blocks(&made.look(None)), ["merging", "KSM"]);
}

#[test]
fn what_its_owner_chose_is_not_in_the_way() {
    let made = Made::new();
    made.of_guest("cmdline", "qemu-system-x86_64\0-machine\0q35,mem-merge=off\0");
    made.of_guest("smaps", &smaps("rw-s", "5", "/memfd:ram (deleted)", "sh"));
    let guest = made.look(None);
    assert_eq!((blocks(&guest), check(&guest, "merging").verdict), (vec![], Verdict::Note), "{guest:?}");
    assert_eq!(check(&guest, "memory").verdict, Verdict::Note);
}

#[test]
fn remarks_are_no_obstacles() {
    let made = Made::new();
    made.of_guest("ksm_stat", "ksm_rmap_items 9\nksm_merging_pages 12\n");
    made.link("fd/7", "anon_inode:[io_uring]");
    made.of_guest("fdinfo/7", "pos:\t0\nUserFiles:\t1\nUserBufs:\t2\n");
    let guest = made.look(None);
    assert_eq!(blocks(&guest), ["merging"], "{guest:?}");
    for (name, part) in [("KSM", "12 pages"), ("pins", "1 io_urings")] {
        let check = check(&guest, name);
        assert!(check.verdict == Verdict::Note && check.found.contains(part), "{check:?}");
    }
    let remedy = check(&guest, "merging").remedy.clone().unwrap();
    assert!(!remedy.contains("attach"), "KSM works on it: {remedy}");
}

#[test]
fn the_sentence_of_its_log_is_shown_without_control_characters() {
    let made = Made::new();
    let start = "2026-01-02: starting up libvirt version: 9.0\n";
    let said = "pageone: this guest is not merged: the daemon's \u{1b}socket\n";
    made.write("var/log/libvirt/qemu/web.log", &format!("{start}{said}"));
    let guest = made.look(None);
    assert_eq!(blocks(&guest), ["merging", "its log"]);
    assert_eq!(check(&guest, "its log").found, "the daemon's socket");
}

#[test]
fn a_guest_whose_ram_lies_in_a_mount_of_the_module_needs_no_agent() {
    let made = Made::new();
    made.write("proc/self/mountinfo", "40 22 0:51 / /mnt/pageone rw - pageonefs none rw,domain=guests\n");
    let smaps = |device: &str| {
        format!("7f0000000000-7f0010000000 rw-s 00000000 {device} 9 /mnt/pageone/#9 (deleted)\nVmFlags: rd wr sh\n")
    };
    made.of_guest("smaps", &smaps("00:33"));
    let guest = made.look(Some(&Status::default()));
    assert_eq!(blocks(&guest), ["merging"], "{guest:?}");
    let merging = check(&guest, "merging");
    assert!(merging.found.starts_with("its RAM lies in /mnt/pageone") && merging.fix.is_none(), "{merging:?}");
    let guest = made.look(Some(&status()));
    assert_eq!(blocks(&guest), [""; 0], "{guest:?}");
    assert_eq!(check(&guest, "memory").found, "256 MiB shared, in /mnt/pageone, whose pages merge");
    assert!(guest.checks.iter().all(|check| check.check != "userfaultfd"), "{guest:?}");
    made.of_guest("smaps", &smaps("00:34"));
    assert!(blocks(&made.look(None)).contains(&"memory"), "the same name, another file system");
}
