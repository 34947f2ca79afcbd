use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use super::*;

#[test]
fn descriptors_are_parsed() {
    let text = "pos:\t0\nflags:\t02140002\nmnt_id:\t29\nino:\t7\nUserFiles:\t2\n    0: /a b\n";
    let descriptor = parse_descriptor(9, text).unwrap();
    assert_eq!((descriptor.number, descriptor.mount, descriptor.registered), (9, 29, 2));
    assert!(descriptor.is_direct() && descriptor.reads());
    assert!(!parse_descriptor(9, "flags: 0100001\nmnt_id: 1\n").unwrap().reads(), "only written");
    assert!(!parse_descriptor(9, "flags: 012000000\nmnt_id: 1\n").unwrap().reads(), "O_PATH");
    assert_eq!(parse_descriptor(9, "pos: 0\nmnt_id: 1\n"), None);
}

#[test]
fn file_systems_count_by_how_they_hold_pages() {
    let line = r"36 35 0:48 / /mnt/with\040- rw,relatime shared:1 - nfs4 host:/ - rw,vers=4.2";
    assert_eq!(parse_mount(line), Some((36, "nfs4")));
    assert_eq!(parse_mount("36 35"), None);
    let old = (6, 12);
    assert!(takes_references("nfs4", Reads::Direct, old) && !takes_references("nfs4", Reads::Cached, old));
    assert!(takes_references("9p", Reads::Cached, (7, 0)) && takes_references("ceph", Reads::Direct, (7, 0)));
    assert!(
        takes_references("fuse.sshfs", Reads::Cached, old) && !takes_references("fuse.sshfs", Reads::Direct, (6, 13))
    );
    assert!(!takes_references("ext4", Reads::Direct, old) && !takes_references("fusectl", Reads::Direct, old));
}

#[test]
fn a_kernel_without_such_a_file_system_needs_no_look() {
    let types = "nodev\tsysfs\nnodev\ttmpfs\n\text4\nnodev\tfuse\n\tfuseblk\nnodev\tfusectl\n";
    assert!(!has_any(types, (6, 13)), "FUSE pins");
    assert!(has_any(types, (6, 12)));
    for kind in ["nfs4", "ceph", "9p", "cifs", "lustre"] {
        assert!(has_any(&format!("{types}nodev\t{kind}\n"), (6, 13)), "{kind}");
    }
    let here = std::fs::read_to_string("/proc/filesystems").unwrap();
    assert!(here.lines().any(|line| line == "nodev\tproc"), "{here}");
}

#[test]
fn mounts_of_descriptors_are_found_by_number() {
    let list = tempfile::NamedTempFile::new().unwrap();
    let text = "20 1 0:1 / / rw - ext4 a rw\n21 1 0:2 / /n rw shared:1 - nfs4 b rw\n";
    std::fs::write(list.path(), text).unwrap();
    let found = |mount, flags, ring| {
        let mut mounts = BTreeMap::from([(mount, Descriptor { number: 3, flags, mount, registered: 0 })]);
        let why = among(list.path().to_str().unwrap(), &mut mounts, ring, (6, 18)).unwrap();
        (why, mounts.len())
    };
    assert_eq!(found(21, O_DIRECT, Ring::None), (Some("nfs4".into()), 0));
    assert_eq!(found(21, 0, Ring::None), (None, 0), "through the page cache");
    assert_eq!(found(20, O_DIRECT, Ring::None), (None, 0));
    assert_eq!(found(20, 0, Ring::Holds).0, Some("nfs4".into()), "registered with an io_uring");
    assert_eq!(found(22, O_DIRECT, Ring::None), (None, 1), "not in this list");
}

#[test]
fn direct_reads_of_local_files_count_by_their_file_system() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = std::fs::OpenOptions::new().read(true).custom_flags(O_DIRECT as i32).open(file.path());
    let Ok(open) = open else { return eprintln!("skipped: no O_DIRECT here") };
    let pid = std::process::id() as i32;
    let all: Vec<Descriptor> = descriptors(pid).unwrap().map(Result::unwrap).collect();
    let seen = all.iter().find(|d| d.number == open.as_raw_fd() as u32).unwrap();
    assert!(seen.is_direct() && seen.reads());
    assert_eq!(Path::new(&seen.name(pid).unwrap()), file.path());
    let mut mounts = BTreeMap::from([(seen.mount, *seen)]);
    among("/proc/self/mountinfo", &mut mounts, Ring::None, (6, 18)).unwrap();
    assert!(mounts.is_empty(), "its mount is known");
    drop(open);
    assert_eq!(unpinned_io(i32::MAX), None, "no such process");
}
