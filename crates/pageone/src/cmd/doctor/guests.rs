//! The guests that are looked at: those of the recogniser, and clients of the daemon. By what one
//! was recognised is said.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use control::Status;
use guests::{Guest, Kind};

use super::memory;
use super::process::Process;

/// All guests, ascending, or just these processes; and how many processes this account may not look
/// into, if there are any.
pub(super) fn find(root: &Path, status: Option<&Status>, only: &[i32]) -> (Vec<Guest>, Option<usize>) {
    let own = std::process::id() as i32;
    let clients = status.into_iter().flat_map(Status::clients).map(|client| client.pid);
    let refused = status.into_iter().flat_map(|status| &status.refused).map(|refused| refused.pid);
    let known: BTreeSet<i32> = clients.chain(refused).collect();
    let all = || guests::processes(root).unwrap_or_default();
    let pids: BTreeSet<i32> = if only.is_empty() { all() } else { only.to_vec() }.into_iter().collect();
    let (mut found, mut hidden) = (Vec::new(), 0);
    for pid in pids.into_iter().filter(|&pid| pid != own) {
        match recognise(root, pid, &known) {
            Ok(Some(guest)) => found.push(guest),
            Ok(None) if only.contains(&pid) => {
                let by = vec!["named on the command line".into()];
                found.push(Guest { pid, kind: Kind::Program, program: String::new(), name: None, uuid: None, by });
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => hidden += 1,
            Ok(None) | Err(_) => {}
        }
    }
    (found, Some(hidden).filter(|&hidden| hidden > 0))
}

/// A guest. `None`: it is none.
fn recognise(root: &Path, pid: i32, known: &BTreeSet<i32>) -> io::Result<Option<Guest>> {
    let Some(mut guest) = Guest::of(root, pid)? else { return Ok(None) };
    guest.look_at_files(root)?;
    if known.contains(&pid) {
        guest.by.push("the daemon knows it".into());
    }
    if !guest.by.is_empty() && memory::has_agent(&Process::new(root, pid)) {
        guest.by.push("the agent is in it".into());
    }
    Ok(Some(guest).filter(|guest| !guest.by.is_empty()))
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
        assert_eq!(found[0].by, ["its program is /usr/bin/qemu-system-x86_64"]);
        assert_eq!(found[1].by, ["it has a virtual machine of KVM"]);
        let (found, _) = find(root, None, &[14]);
        assert_eq!((found.len(), found[0].by.join(", ").as_str()), (1, "named on the command line"));
        std::fs::write(root.join("proc/13/maps"), format!("x {}\n", memory::AGENT)).unwrap();
        assert_eq!(find(root, None, &[13]).0[0].by[1], "the agent is in it");
    }
}
