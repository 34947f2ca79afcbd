//! Says what the kernel, or a security profile, keeps from the agent: once for each thing, on
//! standard error, whether or not `PAGEONE_LOG` is set.
//!
//! Those who run a guest see no error: it runs, unmerged. So one sentence names what was denied, by
//! whom, and what permits it. The rules are AppArmor's: libvirt confines guests by profiles.
//!
//! Who denied it:
//!
//! ```text
//! the program may not look at itself      PR_GET_DUMPABLE, for files of /proc
//! the file's mode, or the device's cgroup access(2), which AppArmor does not watch
//! a profile                               /proc/self/attr/current, which a profile may deny too
//! ```

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use kmem::raw;
use rustix::fs::Access;
use rustix::io::Errno;

use crate::runtime::lock::Blocked;
use crate::runtime::prctl;

/// Where rules for the guests of libvirt stand.
const LIBVIRT_RULES: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
/// How the profiles of libvirt's guests are called.
const LIBVIRT_PROFILE: &str = "libvirt-";

/// What the agent needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need<'a> {
    /// Which memory is fit.
    Smaps,
    /// What maps a frame.
    Pagemap,
    /// How many mappings there are.
    Maps,
    /// How many there may be.
    MaxMapCount,
    /// Pinned and locked memory.
    Status,
    /// Windows, and notes of writes.
    Userfaultfd,
    /// What each thread does.
    Threads,
    Socket(&'a Path),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Denier {
    /// The program, which may not look at itself (`PR_SET_DUMPABLE`).
    Program,
    Mode,
    /// The file is not there, or the cgroup keeps the device away.
    Absent,
    /// A profile of AppArmor, with its name if that can be read.
    AppArmor(Option<String>),
    /// A domain of SELinux.
    SeLinux(String),
    /// A system call filter, or something else that answers `EPERM`.
    Filter,
}

impl Need<'_> {
    /// Its bit among those that were told of, its path, and the rule of AppArmor.
    fn facts(self) -> (u32, String, String) {
        let (bit, path, rule) = match self {
            Self::Smaps => (1, "/proc/self/smaps", "owner @{PROC}/@{pid}/smaps r,"),
            Self::Pagemap => (2, "/proc/self/pagemap", "owner @{PROC}/@{pid}/pagemap r,"),
            Self::Maps => (4, "/proc/self/maps", "owner @{PROC}/@{pid}/maps r,"),
            Self::MaxMapCount => (8, "/proc/sys/vm/max_map_count", "@{PROC}/sys/vm/max_map_count r,"),
            Self::Status => (16, "/proc/thread-self/status", "owner @{PROC}/@{pid}/task/@{tid}/status r,"),
            Self::Userfaultfd => (32, "/dev/userfaultfd", "/dev/userfaultfd rw,"),
            Self::Socket(path) => return (64, path.display().to_string(), format!("{} rw,", path.display())),
            Self::Threads => {
                (128, "/proc/self/task/*/syscall", "owner @{PROC}/@{pid}/task/@{tid}/{syscall,schedstat} r,")
            }
        };
        (bit, path.into(), rule.into())
    }

    fn effect(self) -> &'static str {
        match self {
            Self::MaxMapCount => {
                "vm.max_map_count is taken for its default, so a large guest merges less than it could"
            }
            _ => "memory is not merged",
        }
    }
}

/// Says once that something was denied, if this error says so. The caller holds no lock of the
/// tables and has no window open.
pub(crate) fn tell(need: Need<'_>, error: &io::Error) {
    static TOLD: AtomicU32 = AtomicU32::new(0);
    let bit = need.facts().0;
    let is_missing = need == Need::Userfaultfd && error.kind() == io::ErrorKind::NotFound;
    if (error.kind() != io::ErrorKind::PermissionDenied && !is_missing)
        || TOLD.fetch_or(bit, Ordering::Relaxed) & bit != 0
    {
        return;
    }
    let _signals = Blocked::all();
    let line = format!("pageone-agent[{}]: {}\n", std::process::id(), explain(need, error));
    raw::print(line.as_bytes());
}

/// Says that a system call was denied: only a filter does that. Called once, where the agent
/// starts; the caller holds no lock of the tables.
pub(crate) fn tell_of_filter(error: &dyn std::error::Error) {
    let _signals = Blocked::all();
    let id = std::process::id();
    let line = format!(
        "pageone-agent[{id}]: memory is not merged: {error}: a filter of system calls denies it; the program's sandbox \
         (QEMU's -sandbox, systemd's SystemCallFilter=) must allow it\n"
    );
    raw::print(line.as_bytes());
}

/// The sentence about what was denied.
pub(crate) fn explain(need: Need<'_>, error: &io::Error) -> String {
    sentence(need, &denier(need, error))
}

fn denier(need: Need<'_>, error: &io::Error) -> Denier {
    let is_own = !matches!(need, Need::MaxMapCount | Need::Userfaultfd | Need::Socket(_));
    if is_own && !prctl::is_dumpable() {
        return Denier::Program;
    }
    if matches!(need, Need::Userfaultfd | Need::Socket(_)) {
        match rustix::fs::access(need.facts().1, Access::READ_OK | Access::WRITE_OK) {
            Err(Errno::ACCESS) => return Denier::Mode,
            Err(_) if need == Need::Userfaultfd => return Denier::Absent,
            _ => {}
        }
    }
    let label = std::fs::read_to_string("/proc/self/attr/current");
    match label.as_deref().map(confinement) {
        Ok(Some(by)) => by,
        // A filter answers EPERM.
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => Denier::AppArmor(None),
        _ if error.raw_os_error() == Some(libc::EPERM) => Denier::Filter,
        _ => Denier::Mode,
    }
}

/// Who confines a process with this label (`/proc/PID/attr/current`).
fn confinement(label: &str) -> Option<Denier> {
    let label = label.trim_end_matches(['\n', '\0']);
    if let Some((profile, mode)) = label.rsplit_once(" (") {
        // A profile that only complains denies nothing.
        return (mode != "complain)").then(|| Denier::AppArmor(Some(profile.into())));
    }
    // user:role:type:level.
    let kind = label.split(':').nth(2)?;
    (!kind.starts_with("unconfined")).then(|| Denier::SeLinux(kind.into()))
}

fn sentence(need: Need<'_>, by: &Denier) -> String {
    let (effect, (_, path, rule)) = (need.effect(), need.facts());
    let (whom, remedy) = match by {
        Denier::Program => (
            "is denied because the program lets nobody look at it (PR_SET_DUMPABLE)".into(),
            "it must mark its memory before it gives up privileges".into(),
        ),
        Denier::Mode if need == Need::Userfaultfd => (
            "is denied by its mode".into(),
            "a udev rule for KERNEL==\"userfaultfd\" with GROUP=\"kvm\", MODE=\"0660\" permits it, once it is reloaded and \
             triggered with --action=add"
                .into(),
        ),
        Denier::Mode => ("is denied by its mode".into(), format!("uid {} needs access", rustix::process::geteuid())),
        Denier::Absent => (
            "is not among this program's devices".into(),
            "libvirt provides it if cgroup_device_acl in /etc/libvirt/qemu.conf has it, once its daemon was restarted"
                .into(),
        ),
        Denier::AppArmor(None) => (
            "is denied by a security profile, AppArmor's in most cases".into(),
            format!("for guests of libvirt the rule '{rule}' in {LIBVIRT_RULES} permits it"),
        ),
        Denier::AppArmor(Some(name)) if name.starts_with(LIBVIRT_PROFILE) => {
            (format!("is denied by the AppArmor profile {name}"), format!("the rule '{rule}' in {LIBVIRT_RULES} permits it"))
        }
        Denier::AppArmor(Some(name)) => {
            (format!("is denied by the AppArmor profile {name}"), format!("the rule '{rule}' in that profile permits it"))
        }
        Denier::SeLinux(domain) => (
            format!("is denied to the SELinux domain {domain}"),
            "the policy module in /usr/share/pageone/selinux permits it".into(),
        ),
        Denier::Filter => {
            ("is denied by a filter of system calls, or by the kernel".into(), "the program's sandbox must allow it".into())
        }
    };
    format!("{effect}: {path} {whom}; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_tells_who_confines() {
        let app_armor = |name: &str| Some(Denier::AppArmor(Some(name.into())));
        assert_eq!(confinement("libvirt-0c1 (enforce)\n"), app_armor("libvirt-0c1"));
        assert_eq!(confinement("/usr/bin/a b (kill)"), app_armor("/usr/bin/a b"));
        assert_eq!(confinement("libvirt-0c1 (complain)"), None);
        assert_eq!(confinement("unconfined\n"), None);
        let context = "system_u:system_r:svirt_t:s0:c12,c34\0";
        assert_eq!(confinement(context), Some(Denier::SeLinux("svirt_t".into())));
        assert_eq!(confinement("unconfined_u:unconfined_r:unconfined_t:s0"), None);
        assert_eq!(confinement(""), None);
    }

    #[test]
    fn a_sentence_names_what_by_whom_and_the_remedy() {
        let libvirt = Denier::AppArmor(Some("libvirt-0c1".into()));
        assert_eq!(
            sentence(Need::Smaps, &libvirt),
            "memory is not merged: /proc/self/smaps is denied by the AppArmor profile libvirt-0c1; the rule 'owner \
             @{PROC}/@{pid}/smaps r,' in /etc/apparmor.d/local/abstractions/libvirt-qemu permits it"
        );
        let needs = [
            Need::Pagemap,
            Need::Maps,
            Need::MaxMapCount,
            Need::Status,
            Need::Userfaultfd,
            Need::Threads,
            Need::Socket(Path::new("/run/pageone/agent.sock")),
        ];
        let deniers = [Denier::AppArmor(None), Denier::Mode, Denier::Filter, Denier::SeLinux("svirt_t".into())];
        for (need, by) in needs.iter().flat_map(|need| deniers.iter().map(move |by| (*need, by))) {
            let text = sentence(need, by);
            assert!(text.contains(&need.facts().1) && text.contains("; ") && !text.contains('\n'), "{text}");
        }
        assert!(sentence(Need::Userfaultfd, &Denier::Absent).contains("cgroup_device_acl"));
        assert!(sentence(Need::Userfaultfd, &Denier::Mode).contains("udev"));
    }
}
