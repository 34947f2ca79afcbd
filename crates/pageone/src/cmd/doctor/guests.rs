//! Which processes are guests: those that have a virtual machine of KVM open, those whose program
//! is a virtual machine monitor's, and clients of the daemon. What recognised one is said.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use control::Status;

use super::memory;
use super::process::Process;

/// What runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Qemu,
    /// Another monitor.
    Monitor,
    /// A client of the daemon, or a process that was named.
    Program,
}

/// A guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) pid: i32,
    pub(super) kind: Kind,
    /// By what it was recognised.
    pub(super) by: String,
}

/// Programs that run guests, besides QEMU.
const MONITORS: [&str; 3] = ["cloud-hypervisor", "firecracker", "crosvm"];

/// All guests, ascending, or just these processes; and how many processes this account may not look
/// into, if there are any.
pub(super) fn find(root: &Path, status: Option<&Status>, only: &[i32]) -> (Vec<Found>, Option<usize>) {
    let own = std::process::id() as i32;
    let clients: BTreeSet<i32> = status.into_iter().flat_map(Status::clients).map(|client| client.pid).collect();
    let refused = status.into_iter().flat_map(|status| &status.refused).map(|refused| refused.pid);
    let known: BTreeSet<i32> = clients.into_iter().chain(refused).collect();
    let pids: BTreeSet<i32> = if only.is_empty() { all(root) } else { only.iter().copied().collect() };
    let (mut found, mut hidden) = (Vec::new(), 0);
    for pid in pids.into_iter().filter(|&pid| pid != own) {
        match recognise(&Process::new(root, pid), known.contains(&pid)) {
            Ok(Some((kind, by))) => found.push(Found { pid, kind, by }),
            Ok(None) if only.contains(&pid) => {
                found.push(Found { pid, kind: Kind::Program, by: "named on the command line".into() });
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => hidden += 1,
            Ok(None) | Err(_) => {}
        }
    }
    (found, Some(hidden).filter(|&hidden| hidden > 0))
}

/// The numbers of all processes.
fn all(root: &Path) -> BTreeSet<i32> {
    let entries = std::fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// What a process is, and by what that is told. `None`: no guest.
///
/// # Errors
///
/// Those of looking at its program and files; a kernel thread has no program.
fn recognise(process: &Process<'_>, is_known: bool) -> io::Result<Option<(Kind, String)>> {
    let program = process.link("exe")?;
    let program = program.strip_suffix(" (deleted)").unwrap_or(&program);
    let name = program.rsplit('/').next().unwrap_or_default();
    let kind = match name {
        "qemu-kvm" | "kvm" => Kind::Qemu,
        _ if name.starts_with("qemu-system-") && !name.ends_with("-pageone") => Kind::Qemu,
        _ if MONITORS.contains(&name) => Kind::Monitor,
        _ => Kind::Program,
    };
    // It is asked what it can do, and runs no guest.
    if kind == Kind::Qemu && is_probe(&process.arguments()) {
        return Ok(None);
    }
    let files = process.files()?;
    let has = |wanted: &str| files.iter().any(|(_, name)| name == wanted);
    let mut by = Vec::new();
    if kind != Kind::Program {
        by.push(format!("its program is {program}"));
    }
    if has("anon_inode:kvm-vm") {
        by.push("it has a virtual machine of KVM".to_owned());
    } else if has("/dev/kvm") {
        by.push("it has /dev/kvm open".to_owned());
    }
    if is_known {
        by.push("the daemon knows it".to_owned());
    }
    let kind = if kind == Kind::Program && has("anon_inode:kvm-vm") { Kind::Monitor } else { kind };
    if !by.is_empty() && memory::has_agent(process) {
        by.push("the agent is in it".to_owned());
    }
    Ok((!by.is_empty()).then(|| (kind, by.join(", "))))
}

/// Whether QEMU has the machine `none`, as libvirt starts it to ask what it can do.
fn is_probe(arguments: &[String]) -> bool {
    let is_machine = |word: &str| matches!(word, "-machine" | "--machine" | "-M");
    let mut machines = arguments.windows(2).filter(|pair| is_machine(&pair[0])).map(|pair| &pair[1]);
    machines.any(|value| matches!(value.split(',').next(), Some("none" | "type=none")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn process(root: &Path, pid: i32, program: &str, files: &[&str], arguments: &str) {
        let path = root.join(format!("proc/{pid}"));
        std::fs::create_dir_all(path.join("fd")).unwrap();
        symlink(program, path.join("exe")).unwrap();
        for (number, file) in files.iter().enumerate() {
            symlink(file, path.join(format!("fd/{number}"))).unwrap();
        }
        std::fs::write(path.join("cmdline"), arguments).unwrap();
        std::fs::write(path.join("maps"), "").unwrap();
    }

    #[test]
    fn guests_are_known_by_program_and_by_kvm_and_not_by_what_they_call_themselves() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        process(root, 10, "/usr/bin/qemu-system-x86_64 (deleted)", &["/dev/null"], "qemu\0-m\x001024\0");
        process(root, 11, "/usr/bin/qemu-system-x86_64", &["/dev/kvm"], "qemu\0-machine\0none,accel=kvm\0");
        process(root, 12, "/opt/own-monitor", &["/dev/kvm", "anon_inode:kvm-vm"], "");
        process(root, 13, "/usr/bin/cloud-hypervisor", &[], "");
        process(root, 14, "/usr/bin/python3", &["/dev/null"], "qemu-system-x86_64\0");
        process(root, 15, "/usr/bin/client", &[], "");
        std::fs::create_dir_all(root.join("proc/16")).unwrap();
        let client = control::ClientStatus { pid: 15, ..Default::default() };
        let domain = control::DomainStatus { clients: vec![client], ..Default::default() };
        let status = Status { domains: vec![domain], ..Default::default() };
        let (found, hidden) = find(root, Some(&status), &[]);
        let kinds: Vec<_> = found.iter().map(|found| (found.pid, found.kind)).collect();
        let expected = [(10, Kind::Qemu), (12, Kind::Monitor), (13, Kind::Monitor), (15, Kind::Program)];
        assert_eq!((kinds.as_slice(), hidden), (&expected[..], None));
        assert_eq!(found[0].by, "its program is /usr/bin/qemu-system-x86_64");
        assert_eq!(found[1].by, "it has a virtual machine of KVM");
        let (found, _) = find(root, None, &[14]);
        assert_eq!((found.len(), found[0].by.as_str()), (1, "named on the command line"));
        std::fs::write(root.join("proc/13/maps"), format!("x {}\n", memory::AGENT)).unwrap();
        assert!(find(root, None, &[13]).0[0].by.ends_with(", the agent is in it"));
    }
}
