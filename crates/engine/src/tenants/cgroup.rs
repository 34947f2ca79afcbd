//! What the path of a cgroup says.
//!
//! | path | what |
//! |---|---|
//! | `/machine.slice/machine-qemu\x2d3\x2dweb.scope/…` | libvirt's guest 3, "web" |
//! | `/machine.slice/machine-acme.slice/machine-qemu\x2d…` | in the partition `/machine/acme` |
//! | `/machine/qemu-3-web.libvirt-qemu/…`, `/machine/acme.partition/…` | the same without systemd |
//! | `/qemu.slice/100.scope` | Proxmox' guest 100 |
//! | `/kubepods.slice/…-pod1234_ab.slice/…`, `/kubepods/…/pod1234-ab/…` | the pod 1234-ab |
//! | `/acme.slice/…` | a slice that the administrator made |
//! | `/user.slice/…`, `/system.slice/…`, all else | nothing |
//!
//! Names count from the root down to the guest's own group, and not below: there the guest, or the
//! user that the group was delegated to, may make groups of any name.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The slice or partition, if it is one that an administrator made.
    pub(super) slice: Option<String>,
    pub(super) unit: Unit,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// The machine's name, as systemd or libvirt has it, and libvirt's number of the guest.
    Libvirt {
        machine: String,
        id: u32,
    },
    Proxmox {
        vmid: String,
    },
    Pod {
        uid: String,
    },
    /// Something else in a slice: the path down to its group.
    Other {
        path: String,
    },
}

/// The group lies outside of the daemon's cgroup namespace: what it is cannot be told.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("its group lies outside of the daemon's cgroup namespace; start the daemon in that of the host")]
pub(super) struct Outside;

/// What the lines of `/proc/PID/cgroup` say. Systemd's own hierarchy counts first, then the unified
/// one, then the others in their order.
pub(super) fn place(text: &str) -> Result<Option<Place>, Outside> {
    let mut lines: Vec<(u8, &str)> = text
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let order = match controllers {
                "name=systemd" => 0,
                "" => 1,
                _ => 2,
            };
            Some((order, path))
        })
        .collect();
    // cgroup_namespaces(7): such a path is relative to the reader's own group.
    if lines.iter().any(|(_, path)| path.split('/').any(|group| group == "..")) {
        return Err(Outside);
    }
    lines.sort_by_key(|(order, _)| *order);
    Ok(lines.into_iter().find_map(|(_, path)| of_path(path)))
}

fn of_path(path: &str) -> Option<Place> {
    let groups: Vec<&str> = path.split('/').filter(|group| !group.is_empty()).collect();
    let bare = |unit| Some(Place { slice: None, unit });
    match *groups.first()? {
        "user.slice" | "system.slice" => None,
        "qemu.slice" if groups.len() > 1 => {
            let vmid = groups[1].strip_suffix(".scope").filter(|vmid| is_number(vmid));
            match vmid {
                Some(vmid) => bare(Unit::Proxmox { vmid: vmid.into() }),
                None => bare(Unit::Other { path: groups[..2].join("/") }),
            }
        }
        "kubepods.slice" | "kubepods" => match groups.iter().find_map(|group| pod(group)) {
            Some(uid) => bare(Unit::Pod { uid }),
            None => bare(Unit::Other { path: groups[..groups.len().min(2)].join("/") }),
        },
        "machine" => {
            let partition = 1 + groups[1..].iter().take_while(|group| group.ends_with(".partition")).count();
            let (machine, id) = groups.get(partition).and_then(|group| without_systemd(group))?;
            let slice = (partition > 1).then(|| groups[..partition].join("/"));
            Some(Place { slice, unit: Unit::Libvirt { machine, id } })
        }
        _ => in_slice(&groups),
    }
}

/// A group below slices of systemd: each slice's name begins with that of the slice around it.
fn in_slice(groups: &[&str]) -> Option<Place> {
    let mut slices = 0;
    let mut around = "";
    for group in groups {
        let Some(stem) = group.strip_suffix(".slice") else { break };
        let is_inside = slices == 0 || stem.strip_prefix(around).is_some_and(|rest| rest.starts_with('-'));
        if !is_inside || stem.is_empty() {
            break;
        }
        (slices, around) = (slices + 1, stem);
    }
    let last = groups[..slices].last()?;
    let slice = (*last != "machine.slice").then(|| (*last).to_owned());
    let unit = match groups.get(slices).and_then(|group| machine(group)) {
        Some((machine, id)) => Unit::Libvirt { machine, id },
        None => Unit::Other { path: groups[..groups.len().min(slices + 1)].join("/") },
    };
    Some(Place { slice, unit })
}

/// `machine-qemu\x2d3\x2dweb.scope`: the machine's name, unescaped, and its number.
fn machine(group: &str) -> Option<(String, u32)> {
    let escaped = group.strip_prefix("machine-")?.strip_suffix(".scope")?;
    let (number, _) = escaped.strip_prefix(r"qemu\x2d")?.split_once(r"\x2d")?;
    let id = number.parse().ok().filter(|_| is_number(number))?;
    Some((escaped.replace(r"\x2d", "-"), id))
}

/// `qemu-3-web.libvirt-qemu`, likewise.
fn without_systemd(group: &str) -> Option<(String, u32)> {
    let machine = group.strip_suffix(".libvirt-qemu")?;
    let (number, _) = machine.strip_prefix("qemu-")?.split_once('-')?;
    let id = number.parse().ok().filter(|_| is_number(number))?;
    Some((machine.into(), id))
}

/// `kubepods-burstable-podUID.slice`, with `_` for `-`, or `podUID`.
fn pod(group: &str) -> Option<String> {
    let uid = match group.strip_suffix(".slice") {
        Some(stem) => stem.strip_prefix("kubepods-")?.rsplit('-').next()?.strip_prefix("pod")?.replace('_', "-"),
        None => group.strip_prefix("pod")?.to_owned(),
    };
    let is_uid = (8..=64).contains(&uid.len()) && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    is_uid.then_some(uid)
}

/// Digits only: `parse` takes a sign, too.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit())
}
