//! What guests of libvirt need of the host: `packaging/libvirt/README.md` says why. Nothing is
//! checked on hosts without libvirt.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use snapshot::rights::Account;

use super::denied;
use super::device::{Device, Way};
use super::process::{Identity, read};
use super::report::Check;
use crate::account::account;

const CONF: &str = "etc/libvirt/qemu.conf";
const WRAPPER: &str = "usr/bin/qemu-system-x86_64-pageone";
const QEMU: &str = "usr/bin/qemu-system-x86_64";
/// AppArmor's rules for guests, of libvirt's package, and additions of the site.
const PROFILE: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
const ADDITIONS: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
const RULE: &str = "60-pageone-userfaultfd.rules";
/// It changes files of libvirt and AppArmor, and restarts libvirtd if it does.
const SETUP: &str = "/usr/lib/pageone/libvirt-setup add";
/// The users that distributions have libvirt run guests as.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The checks.
pub(super) fn checks(root: &Path) -> Vec<Check> {
    if !root.join(CONF).exists() {
        return Vec::new();
    }
    let mut checks = vec![wrapper(root)];
    if root.join(PROFILE).exists() {
        checks.push(rules(root));
    }
    checks.extend(user(root));
    checks
}

/// libvirt keeps what an emulator can do until the file's change time is another.
fn wrapper(root: &Path) -> Check {
    let name = "libvirt: wrapper";
    let (path, qemu) = (root.join(WRAPPER), root.join(QEMU));
    let changed = |path: &Path| std::fs::metadata(path).map(|meta| (meta.ctime(), meta.ctime_nsec()));
    match (changed(&path), changed(&qemu)) {
        (Err(e), _) if e.kind() == io::ErrorKind::NotFound => {
            Check::note(name, format!("/{WRAPPER} is not there"), "install the package pageone-libvirt")
        }
        (Err(e), _) => Check::note(name, e, "run this as root"),
        (Ok(own), Ok(real)) if own < real => Check::note(
            name,
            "it is older than QEMU",
            "libvirt may believe that QEMU can do what the one before could; `touch` the wrapper",
        )
        .safe_fix(format!("touch -c '{}'", path.display())),
        (Ok(_), Ok(_)) => Check::ok(name, format!("/{WRAPPER}, newer than QEMU")),
        (Ok(_), Err(_)) => {
            Check::note(name, format!("/{QEMU} is not there"), "install QEMU, or name another one in PAGEONE_QEMU")
        }
    }
}

fn rules(root: &Path) -> Check {
    let name = "libvirt: AppArmor";
    let text = match read(&root.join(ADDITIONS)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Check::note(name, format!("/{ADDITIONS}: {e}"), "run this as root"),
    };
    let has = |rule: &&str| text.lines().any(|line| line.trim() == *rule);
    let missing: Vec<&str> = denied::rules().filter(|rule| !has(rule)).collect();
    if missing.is_empty() {
        return Check::ok(name, format!("/{ADDITIONS} has the rules for guests"));
    }
    Check::blocks(
        name,
        format!("/{ADDITIONS} lacks '{}'", missing.join("', '")),
        "the package pageone-libvirt adds them; guests have them from their next start on",
    )
    .fix(SETUP)
}

/// Whether the user of libvirt's guests may have a userfaultfd. `None`: there is no such user.
fn user(root: &Path) -> Option<Check> {
    let name = "libvirt: device";
    let (user, identity) = USERS.iter().find_map(|user| Some((*user, identity(account(root, user)?))))?;
    let list =
        if gives_device(root) { Ok(()) } else { Err(format!("/{CONF} does not give /dev/userfaultfd to guests")) };
    let has_rule = ["etc/udev/rules.d", "usr/lib/udev/rules.d", "lib/udev/rules.d"];
    let has_rule = has_rule.iter().any(|directory| root.join(directory).join(RULE).exists());
    Some(match (Device::look(root, root).way(&identity), list) {
        (Way::Call(why), _) => Check::ok(name, format!("{user} may use userfaultfd: {why}")),
        (Way::Device, Ok(())) => Check::ok(name, format!("{user} may use /dev/userfaultfd, and guests see it")),
        (Way::Device, Err(why)) => Check::blocks(
            name,
            why,
            "the package pageone-libvirt adds it to cgroup_device_acl and restarts libvirtd; guests keep running",
        )
        .fix(SETUP),
        (Way::Denied(how), _) if has_rule => Check::blocks(
            name,
            format!("{user} may not use /dev/userfaultfd ({how}), and a udev rule is there for it"),
            "the rule counts from the device's next event on",
        )
        .safe_fix("udevadm control --reload && udevadm trigger --settle --action=add /sys/class/misc/userfaultfd"),
        (Way::Denied(how), _) => Check::blocks(
            name,
            format!("{user} may not use /dev/userfaultfd ({how})"),
            "install the package pageone-libvirt, which has a udev rule for it",
        ),
        (Way::Absent, _) => {
            Check::blocks(name, "there is no /dev/userfaultfd", "Linux 6.1 or later makes it; is devtmpfs mounted?")
        }
        (Way::Unknown(why), _) => Check::note(name, format!("/dev/userfaultfd: {why}"), "run this as root"),
    })
}

/// Whether guests see the device: by the list in the configuration, or by libvirt's own.
fn gives_device(root: &Path) -> bool {
    const NAME: &[u8] = b"/dev/userfaultfd";
    let text = read(&root.join(CONF)).unwrap_or_default();
    let is_list = |line: &str| line.trim_start().starts_with("cgroup_device_acl");
    let list: Vec<&str> = text.lines().skip_while(|line| !is_list(line)).collect();
    if !list.is_empty() {
        let end = list.iter().position(|line| line.contains(']')).unwrap_or(list.len() - 1);
        return list[..=end]
            .iter()
            .any(|line| !line.trim_start().starts_with('#') && line.contains("\"/dev/userfaultfd\""));
    }
    let has = |driver: PathBuf| {
        std::fs::read(driver).is_ok_and(|driver| driver.windows(NAME.len()).any(|bytes| bytes == NAME))
    };
    let lib = std::fs::read_dir(root.join("usr/lib")).into_iter().flatten().flatten().map(|entry| entry.path());
    lib.chain([root.join("usr/lib64")])
        .map(|directory| directory.join("libvirt/connection-driver/libvirt_driver_qemu.so"))
        .any(has)
}

/// What an account's processes are.
fn identity(account: Account) -> Identity {
    let Account { uid, gid, groups, .. } = account;
    Identity { uid, gid, groups, ..Identity::default() }
}

#[cfg(test)]
mod tests;
