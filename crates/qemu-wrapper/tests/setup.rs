//! `packaging/libvirt/setup`, with a directory in the host's place.

#![allow(clippy::unwrap_used)] // In tests.

use std::fs::{Permissions, create_dir_all, read_to_string, write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const RULES: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
const CONF: &str = "etc/libvirt/qemu.conf";
const DRIVER: &str = "usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";
/// What libvirt's package has: the list as a comment.
const STOCK: &str = "#cgroup_device_acl = [\n#    \"/dev/null\"\n#]\nuser = \"libvirt-qemu\"\n";

struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        for (file, text) in
            [("etc/apparmor.d/abstractions/libvirt-qemu", "rules"), (RULES, ""), (CONF, STOCK), (DRIVER, "\0\x01")]
        {
            create_dir_all(host.path(file).parent().unwrap()).unwrap();
            write(host.path(file), text).unwrap();
        }
        std::fs::set_permissions(host.path(CONF), Permissions::from_mode(0o600)).unwrap();
        host
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn read(&self, file: &str) -> String {
        read_to_string(self.path(file)).unwrap()
    }

    /// The exit code, and what it said.
    fn setup(&self, what: &str) -> (i32, String) {
        let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/libvirt");
        let mut command = Command::new("/bin/sh");
        command.arg(files.join("setup")).arg(what).env("ROOT", self.0.path()).env("PAGEONE_SHARE", &files);
        let Output { status, stderr, .. } = command.output().unwrap();
        (status.code().unwrap(), String::from_utf8(stderr).unwrap())
    }
}

fn done() -> (i32, String) {
    (0, String::new())
}

#[test]
fn what_is_added_is_added_once_and_goes_again() {
    let host = Host::new();
    write(host.path(RULES), "  /site r,\n").unwrap();
    assert_eq!(host.setup("add"), done());
    let added = [host.read(RULES), host.read(CONF)];
    assert!(added[0].starts_with("  /site r,\n# begin pageone-libvirt: this part") && added[0].contains("/pagemap r,"));
    assert!(added[1].starts_with(STOCK) && added[1].contains("\"/dev/kvm\",\n    \"/dev/userfaultfd\"\n]\n"));
    assert_eq!(host.setup("add"), done());
    assert_eq!([host.read(RULES), host.read(CONF)], added);
    assert_eq!(host.path(CONF).metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(host.setup("remove"), done());
    assert_eq!([host.read(RULES), host.read(CONF)], ["  /site r,\n", STOCK]);
    assert_eq!(host.setup("remove"), done());
    assert_eq!([host.read(RULES), host.read(CONF)], ["  /site r,\n", STOCK]);
}

/// As under Debian 13.
#[test]
fn a_directory_that_it_made_goes_unless_others_put_something_there() {
    let host = Host::new();
    let directory = host.path(RULES).parent().unwrap().to_owned();
    std::fs::remove_dir_all(&directory).unwrap();
    for _ in 0..2 {
        assert_eq!(host.setup("add"), done());
    }
    assert!(host.read(RULES).contains("/pagemap r,"));
    assert_eq!(host.setup("remove"), done());
    assert!(!directory.exists() && directory.parent().unwrap().exists());
    assert_eq!(host.setup("add"), done());
    write(directory.join("other"), "").unwrap();
    assert_eq!(host.setup("remove"), done());
    assert!(directory.join("other").exists() && !host.path(RULES).exists());
    // One that was there before stays.
    std::fs::remove_file(directory.join("other")).unwrap();
    assert_eq!(host.setup("add"), done());
    assert_eq!(host.setup("remove"), done());
    assert!(directory.exists());
}

#[test]
fn a_file_that_it_made_goes_unless_others_wrote_to_it() {
    let host = Host::new();
    std::fs::remove_file(host.path(RULES)).unwrap();
    for _ in 0..2 {
        assert_eq!(host.setup("add"), done());
    }
    assert_eq!(host.setup("remove"), done());
    assert!(!host.path(RULES).exists());
    assert_eq!(host.setup("add"), done());
    write(host.path(RULES), host.read(RULES) + "  /site r,\n").unwrap();
    assert_eq!(host.setup("remove"), done());
    assert_eq!(host.read(RULES), "  /site r,\n");
}

#[test]
fn the_administrators_own_list_is_left_alone() {
    let host = Host::new();
    let own = format!("{STOCK}cgroup_device_acl = [ \"/dev/null\" ]\n");
    write(host.path(CONF), &own).unwrap();
    let (code, said) = host.setup("add");
    assert_eq!(code, 1);
    assert!(said.contains("add \"/dev/userfaultfd\" to it and restart libvirtd"), "{said}");
    assert_eq!(host.read(CONF), own);
    write(host.path(CONF), "cgroup_device_acl = [\n  \"/dev/null\",\n  \"/dev/userfaultfd\"\n]\n").unwrap();
    assert_eq!(host.setup("add"), done());
    assert!(!host.read(CONF).contains("pageone"));
}

#[test]
fn a_libvirt_that_gives_the_device_anyway_needs_no_list() {
    let host = Host::new();
    assert_eq!(host.setup("add"), done());
    assert!(host.read(CONF).contains("pageone"));
    // libvirt is upgraded.
    write(host.path(DRIVER), "\0\x01\0/dev/userfaultfd\0").unwrap();
    assert_eq!(host.setup("add"), done());
    assert_eq!(host.read(CONF), STOCK);
    assert!(host.read(RULES).contains("/dev/userfaultfd rw,"));
}

#[test]
fn a_host_without_libvirt_or_apparmor_is_left_alone() {
    let host = Host(tempfile::tempdir().unwrap());
    assert_eq!(host.setup("add"), done());
    assert_eq!(host.setup("remove"), done());
    assert_eq!(std::fs::read_dir(host.0.path()).unwrap().count(), 0);
}

/// Whatever became of the two lines, the administrator's stay.
#[test]
fn a_part_that_is_not_whole_or_not_as_it_was_is_left_as_it_is() {
    let host = Host::new();
    assert_eq!(host.setup("add"), done());
    let whole = [RULES, CONF].map(|file| host.read(file));
    let begin = |text: &str| text.lines().find(|line| line.starts_with("# begin ")).unwrap().to_owned() + "\n";
    let end = "# end pageone-libvirt\n";
    for (file, text) in [RULES, CONF].into_iter().zip(&whole) {
        let last = format!("{text}# the administrator's last line\n");
        for (spoilt, why) in [
            (last.replace(end, ""), "has not one line '# begin"),
            (last.replace(&begin(text), ""), "has not one line '# begin"),
            (last.replace(end, &format!("{end}{}", begin(text))), "has not one line '# begin"),
            (format!("{last}{text}"), "has not one line '# begin"),
            (last.replace(end, &format!("# mine\n{end}")), "was changed between '# begin"),
        ] {
            write(host.path(file), &spoilt).unwrap();
            for what in ["add", "remove"] {
                let (code, said) = host.setup(what);
                assert!(code == 1 && said.contains(why) && said.contains(file), "{what}: {code}, {said}");
                assert_eq!(host.read(file), spoilt, "{what}");
            }
            assert_eq!(host.setup("add").0, 1, "the other file is whole");
        }
        write(host.path(file), text).unwrap();
    }
    assert_eq!(host.setup("add"), done());
    assert_eq!([RULES, CONF].map(|file| host.read(file)), whole);
    // An earlier version's part has no sum.
    let first = begin(&whole[1]);
    let before = first.split(" (cksum").next().unwrap().to_owned() + "\n";
    write(host.path(CONF), whole[1].replace(&first, &before)).unwrap();
    assert_eq!(host.setup("add"), done());
    assert_eq!(host.read(CONF), whole[1]);
}

#[test]
fn a_link_stays_one_and_is_never_followed_to_where_nothing_is() {
    let host = Host::new();
    let there = host.path("etc/site.conf");
    std::fs::rename(host.path(CONF), &there).unwrap();
    std::os::unix::fs::symlink("../site.conf", host.path(CONF)).unwrap();
    assert_eq!(host.setup("add"), done());
    assert!(host.path(CONF).is_symlink() && read_to_string(&there).unwrap().contains("/dev/userfaultfd"));
    assert_eq!(there.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(host.setup("remove"), done());
    assert!(host.path(CONF).is_symlink());
    assert_eq!(read_to_string(&there).unwrap(), STOCK);
    // Another host's file, to one that looks at it from outside.
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::remove_file(host.path(RULES)).unwrap();
    std::os::unix::fs::symlink(outside.path(), host.path(RULES)).unwrap();
    let (code, said) = host.setup("add");
    assert!(code == 1 && said.contains("is a link that leaves"), "{said}");
    assert_eq!(outside.as_file().metadata().unwrap().len(), 0);
    std::fs::remove_file(host.path(RULES)).unwrap();
    for nothing in ["nothing/there", "nothing"] {
        std::os::unix::fs::symlink(nothing, host.path(RULES)).unwrap();
        for what in ["add", "remove"] {
            let (code, said) = host.setup(what);
            assert!(code == 1 && said.contains("is a link to nothing"), "{what}: {said}");
            assert!(host.path(RULES).is_symlink() && !host.path(RULES).exists(), "{what}");
        }
        std::fs::remove_file(host.path(RULES)).unwrap();
    }
}

/// A limit on the length of files is as a full disk.
#[test]
fn a_file_for_which_there_is_no_room_stays_whole() {
    let host = Host::new();
    let long = "# the administrator's\n".repeat(600);
    write(host.path(CONF), STOCK.to_owned() + &long).unwrap();
    let before = host.read(CONF);
    let setup = |what: &str| {
        let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/libvirt");
        let mut command = Command::new("/bin/sh");
        let words = format!("trap '' XFSZ; ulimit -f 4; exec /bin/sh '{}' {what}", files.join("setup").display());
        command.args(["-c", &words]).env("ROOT", host.0.path()).env("PAGEONE_SHARE", &files);
        let Output { status, stderr, .. } = command.output().unwrap();
        assert!(!status.success() && String::from_utf8_lossy(&stderr).contains("cannot be written"), "{what}");
    };
    setup("add");
    assert_eq!(host.read(CONF), before);
    assert_eq!(host.setup("add"), done());
    let added = host.read(CONF);
    setup("remove");
    assert_eq!(host.read(CONF), added);
    assert_eq!(std::fs::read_dir(host.path(CONF).parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
}
