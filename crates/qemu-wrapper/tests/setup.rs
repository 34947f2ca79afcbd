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
