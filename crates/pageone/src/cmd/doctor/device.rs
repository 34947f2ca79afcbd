//! Whether a process's user may have a userfaultfd that catches the kernel's accesses, too
//! (userfaultfd(2)), by what the kernel goes by. Nothing is opened.
//!
//! ```text
//!   CAP_SYS_PTRACE in the host's user namespace   ──▶ the system call
//!   vm.unprivileged_userfaultfd = 1               ──▶ the system call
//!   /dev/userfaultfd, as the process sees it      ──▶ its mode, or its list of rights (acl(5))
//! ```
//!
//! The cgroup's list of devices, a profile or a filter of system calls may forbid it all the same.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::process::{self, CAP_DAC_OVERRIDE, CAP_SYS_PTRACE, Identity};

/// The device, below a root directory.
pub(super) const DEVICE: &str = "dev/userfaultfd";
/// The setting.
const SETTING: &str = "proc/sys/vm/unprivileged_userfaultfd";

/// What decides.
#[derive(Debug)]
pub(super) struct Device {
    /// `vm.unprivileged_userfaultfd` is 1.
    pub(super) is_for_all: bool,
    /// The device, or why it cannot be looked at.
    node: Result<Node, io::Error>,
}

/// Mode, owner, group and list of a file.
#[derive(Clone, Debug, Default)]
struct Node {
    mode: u32,
    uid: u32,
    gid: u32,
    acl: Vec<u8>,
}

/// How the user gets one, or what is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Call(&'static str),
    Device,
    /// The device's mode, owner and group.
    Denied(String),
    /// The process does not have the device.
    Absent,
    Unknown(String),
}

impl Device {
    /// `root`: the host's files; `theirs`: the root directory of the process.
    pub(super) fn look(root: &Path, theirs: &Path) -> Self {
        let is_for_all = process::read(&root.join(SETTING)).is_ok_and(|value| value.trim() == "1");
        let path = theirs.join(DEVICE);
        let node = std::fs::metadata(&path).map(|meta| Node {
            mode: meta.mode(),
            uid: meta.uid(),
            gid: meta.gid(),
            acl: acl(&path),
        });
        Self { is_for_all, node }
    }

    /// The way of a user, with the capabilities that count on the host.
    pub(super) fn way(&self, identity: &Identity) -> Way {
        if identity.has(CAP_SYS_PTRACE) {
            return Way::Call("it has CAP_SYS_PTRACE");
        }
        if self.is_for_all {
            return Way::Call("vm.unprivileged_userfaultfd is 1");
        }
        match &self.node {
            Ok(node) if identity.has(CAP_DAC_OVERRIDE) || node.permits(identity) => Way::Device,
            Ok(node) => Way::Denied(format!("mode {:o}, owner {}, group {}", node.mode & 0o777, node.uid, node.gid)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Way::Absent,
            Err(e) => Way::Unknown(e.to_string()),
        }
    }
}

/// The list of a file, as the kernel stores it; empty without one.
fn acl(path: &Path) -> Vec<u8> {
    let mut list = vec![0; 4096];
    match rustix::fs::getxattr(path, "system.posix_acl_access", &mut list) {
        Ok(len) => list.truncate(len),
        Err(_) => list.clear(),
    }
    list
}

impl Node {
    /// Whether a user may read and write it.
    fn permits(&self, identity: &Identity) -> bool {
        /// Reading and writing.
        const BOTH: u32 = 0o6;
        let is_in = |gid| identity.gid == gid || identity.groups.contains(&gid);
        let (owner, group, other) = (self.mode >> 6 & 7, self.mode >> 3 & 7, self.mode & 7);
        if identity.uid == self.uid {
            return owner & BOTH == BOTH;
        }
        let entries = entries(&self.acl);
        if entries.is_empty() {
            return if is_in(self.gid) { group } else { other } & BOTH == BOTH;
        }
        // With a list, the mode's bits for the group are its mask.
        let masked = |permissions: u32| permissions & group & BOTH == BOTH;
        if let Some(entry) = entries.iter().find(|entry| entry.tag == Entry::USER && entry.id == identity.uid) {
            return masked(entry.permissions);
        }
        let mut groups = entries.iter().filter(|entry| match entry.tag {
            Entry::GROUP_OBJ => is_in(self.gid),
            Entry::GROUP => is_in(entry.id),
            _ => false,
        });
        match groups.clone().next() {
            Some(_) => groups.any(|entry| masked(entry.permissions)),
            None => other & BOTH == BOTH,
        }
    }
}

/// An entry of an access control list.
struct Entry {
    tag: u32,
    permissions: u32,
    id: u32,
}

impl Entry {
    const USER: u32 = 0x02;
    const GROUP_OBJ: u32 = 0x04;
    const GROUP: u32 = 0x08;
}

/// The entries of a list: version 2 as 4 bytes, then entries of 8.
fn entries(list: &[u8]) -> Vec<Entry> {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u32::from(byte));
    let entry =
        |bytes: &[u8]| Entry { tag: number(&bytes[..2]), permissions: number(&bytes[2..4]), id: number(&bytes[4..]) };
    match list.split_at_checked(4) {
        Some(([2, 0, 0, 0], rest)) => rest.chunks_exact(8).map(entry).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, groups: &[u32]) -> Identity {
        Identity { uid, gid: uid, groups: groups.to_vec(), ..Identity::default() }
    }

    fn device(mode: u32, gid: u32, acl: &[u8]) -> Device {
        let node = Node { mode: 0o020_000 | mode, uid: 0, gid, acl: acl.to_vec() };
        Device { is_for_all: false, node: Ok(node) }
    }

    #[test]
    fn the_mode_of_the_device_decides_for_a_user_without_capabilities() {
        let qemu = user(64055, &[108]);
        assert_eq!(device(0o660, 108, &[]).way(&qemu), Way::Device);
        assert_eq!(device(0o660, 0, &[]).way(&qemu), Way::Denied("mode 660, owner 0, group 0".into()));
        assert_eq!(device(0o640, 108, &[]).way(&qemu), Way::Denied("mode 640, owner 0, group 108".into()));
        assert_eq!(device(0o666, 0, &[]).way(&qemu), Way::Device);
        assert_eq!(device(0o606, 108, &[]).way(&qemu), Way::Denied("mode 606, owner 0, group 108".into()));
        let root = Identity { capabilities: 1 << CAP_SYS_PTRACE, ..user(0, &[]) };
        assert_eq!(device(0, 0, &[]).way(&root), Way::Call("it has CAP_SYS_PTRACE"));
        assert!(
            matches!(device(0, 0, &[]).way(&Identity { capabilities: 0, ..root }), Way::Denied(_)),
            "in a container"
        );
        let setting = Device { is_for_all: true, ..device(0, 0, &[]) };
        assert_eq!(setting.way(&qemu), Way::Call("vm.unprivileged_userfaultfd is 1"));
    }

    #[test]
    fn an_access_control_list_counts_within_its_mask() {
        let entry = |tag: u16, permissions: u16, id: u32| {
            [tag.to_le_bytes().to_vec(), permissions.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat()
        };
        let list = |more: &[Vec<u8>]| [vec![2, 0, 0, 0], entry(1, 6, u32::MAX), more.concat()].concat();
        let named = list(&[entry(2, 6, 64055), entry(4, 0, u32::MAX), entry(0x10, 6, u32::MAX)]);
        let way = |mode, list: &[u8], user: &Identity| device(mode, 36, list).way(user);
        assert_eq!(way(0o660, &named, &user(64055, &[])), Way::Device);
        assert!(matches!(way(0o620, &named, &user(64055, &[])), Way::Denied(_)), "the mask");
        assert!(matches!(way(0o666, &named, &user(1, &[36])), Way::Denied(_)), "its group has nothing");
        assert_eq!(way(0o666, &named, &user(1, &[])), Way::Device, "as anybody");
        let group = list(&[entry(4, 0, u32::MAX), entry(8, 6, 108), entry(0x10, 6, u32::MAX)]);
        assert_eq!(way(0o660, &group, &user(64055, &[108])), Way::Device);
        assert!(matches!(way(0o660, &group, &user(64055, &[])), Way::Denied(_)));
    }

    #[test]
    fn a_device_that_the_process_does_not_see_is_absent() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/sys/vm")).unwrap();
        std::fs::create_dir_all(root.path().join("dev")).unwrap();
        let way = || Device::look(root.path(), root.path()).way(&user(64055, &[]));
        assert_eq!(way(), Way::Absent);
        std::fs::write(root.path().join(DEVICE), "").unwrap();
        assert!(matches!(way(), Way::Denied(_)));
        std::fs::write(root.path().join(SETTING), "1\n").unwrap();
        assert!(matches!(way(), Way::Call(_)));
    }
}
