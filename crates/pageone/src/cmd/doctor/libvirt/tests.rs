//! What doctor says of libvirt's files.

use std::os::unix::fs::PermissionsExt;

use super::super::report::Verdict;
use super::*;

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn a_wrapper_older_than_qemu_is_touched() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    assert!(checks(root).is_empty(), "no libvirt");
    write(root, CONF, "");
    assert!(wrapper(root).remedy.unwrap().contains("pageone-libvirt"));
    write(root, WRAPPER, "");
    // A change time cannot be set: QEMU must come later.
    let retry = |act: &dyn Fn(), is_done: &dyn Fn() -> bool| {
        let done = (0..1000).any(|_| {
            act();
            std::thread::sleep(std::time::Duration::from_millis(1));
            is_done()
        });
        assert!(done, "within a second");
    };
    retry(&|| write(root, QEMU, ""), &|| wrapper(root).fix.is_some());
    let check = wrapper(root);
    assert_eq!((check.verdict, check.found.as_str()), (Verdict::Note, "it is older than QEMU"));
    let fix = check.fix.unwrap();
    assert!(fix.safe);
    let touch = || assert!(std::process::Command::new("sh").args(["-c", &fix.command]).status().unwrap().success());
    retry(&touch, &|| wrapper(root).verdict == Verdict::Ok);
}

#[test]
fn each_missing_rule_is_named() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    assert!(rules(root).found.contains("/dev/userfaultfd rw,"));
    write(root, ADDITIONS, denied::RULES);
    assert_eq!(rules(root).verdict, Verdict::Ok);
    write(root, ADDITIONS, &denied::RULES.replace("  owner @{PROC}/@{pid}/smaps r,", "# smaps"));
    let check = rules(root);
    assert!(check.found.ends_with("lacks 'owner @{PROC}/@{pid}/smaps r,'"), "{check:?}");
    assert!(check.verdict == Verdict::Blocks && !check.fix.unwrap().safe, "it changes a file of another package");
}

#[test]
fn the_user_of_guests_needs_mode_and_list() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    assert!(user(root).is_none(), "no such user");
    let device = root.join("dev/userfaultfd");
    write(root, "dev/userfaultfd", "");
    let own = std::fs::metadata(&device).unwrap().gid();
    let mode = |mode| std::fs::set_permissions(&device, PermissionsExt::from_mode(mode)).unwrap();
    write(root, "etc/passwd", "root:x:0:0::/:/bin/sh\nlibvirt-qemu:x:64055:993::/:/bin/false\n");
    write(root, "etc/group", &format!("users:x:5:libvirt-qemus\nkvm:x:{own}:a,libvirt-qemu\n"));
    write(root, CONF, "#cgroup_device_acl = [\n#  \"/dev/userfaultfd\"\n#]\n");
    mode(0o600);
    assert!(user(root).unwrap().remedy.unwrap().contains("install"));
    write(root, &format!("usr/lib/udev/rules.d/{RULE}"), "");
    assert!(user(root).unwrap().fix.unwrap().safe);
    mode(0o660);
    assert!(user(root).unwrap().found.contains("does not give"));
    write(root, CONF, "cgroup_device_acl = [\n  \"/dev/null\",\n  \"/dev/userfaultfd\"\n]\nuser = \"x\"\n");
    assert_eq!(user(root).unwrap().verdict, Verdict::Ok);
    write(root, CONF, "cgroup_device_acl = [\n  \"/dev/null\" ]\n# \"/dev/userfaultfd\"\n");
    assert_eq!(user(root).unwrap().verdict, Verdict::Blocks);
    write(root, CONF, "");
    write(root, "usr/lib/x86_64/libvirt/connection-driver/libvirt_driver_qemu.so", "\0/dev/userfaultfd\0");
    assert_eq!(user(root).unwrap().verdict, Verdict::Ok, "libvirt's own list has it");
}
