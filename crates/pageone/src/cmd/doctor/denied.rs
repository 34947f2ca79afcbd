//! What was denied to a guest: by the lines of AppArmor in the kernel's log, or in that of auditd,
//! and by what agent and wrapper wrote to the guest's log.
//!
//! A line counts if it names the process. The kernel's log is read without waiting, and nothing in
//! it is changed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::process::Process;

/// Most bytes that are read of a log, from its end; all of the kernel's.
const MOST: u64 = 1 << 20;
const KERNEL: &str = "dev/kmsg";
const AUDIT: &str = "var/log/audit/audit.log";
/// Where libvirt keeps the logs of guests.
const LIBVIRT: &str = "var/log/libvirt/qemu";
/// The rules that guests of libvirt need.
pub(super) const RULES: &str = include_str!("../../../../../packaging/libvirt/apparmor");

/// What AppArmor denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denial {
    pid: i32,
    pub(super) profile: String,
    /// The file, the capability, or else the operation.
    pub(super) what: String,
    /// Empty where it is not a file.
    mask: String,
}

impl Denial {
    /// Whether it is something that the agent or the wrapper needs. Guests are denied other things
    /// too, and run on.
    pub(super) fn is_ours(&self) -> bool {
        let last = self.what.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        const OWN: [&str; 6] = ["smaps", "pagemap", "maps", "status", "syscall", "task"];
        let is_of_process = self.what.starts_with("/proc/") && (OWN.contains(&last) || last == "max_map_count");
        is_of_process || self.what.contains("pageone") || self.what == "/dev/userfaultfd"
    }

    /// The rule that permits it.
    pub(super) fn rule(&self) -> String {
        let last = self.what.rsplit('/').next().unwrap_or_default();
        let is_it =
            |rule: &&str| rule.split(' ').any(|word| word.starts_with('@') && word.rsplit('/').next() == Some(last));
        match rules().find(|rule| self.what.starts_with("/proc/") && is_it(rule)) {
            Some(rule) => rule.to_owned(),
            None => format!("{},", format!("{} {}", self.what, self.mask).trim()),
        }
    }
}

/// Each rule that guests of libvirt need, without blanks around it.
pub(super) fn rules() -> impl Iterator<Item = &'static str> {
    RULES.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// All that the logs say was denied. `None`: neither log can be read.
pub(super) fn all(root: &Path) -> Option<Vec<Denial>> {
    let logs = [kernel_log(&root.join(KERNEL)), tail(&root.join(AUDIT))];
    if logs.iter().all(Option::is_none) {
        return None;
    }
    let mut denials: Vec<Denial> = Vec::new();
    for denial in logs.iter().flatten().flat_map(|log| log.lines()).filter_map(parse) {
        if !denials.contains(&denial) {
            denials.push(denial);
        }
    }
    Some(denials)
}

/// Those of a process under this profile: its number may have been another's before.
pub(super) fn of<'a>(all: &'a [Denial], pid: i32, profile: &str) -> Vec<&'a Denial> {
    all.iter().filter(|denial| denial.pid == pid && denial.profile == profile).collect()
}

/// A line `… apparmor="DENIED" operation="open" profile="…" name="…" pid=7 … denied_mask="r" …`.
fn parse(line: &str) -> Option<Denial> {
    let line = line.split_once("apparmor=\"DENIED\"")?.1;
    let value = |name: &str| {
        let rest = &line[line.find(&format!(" {name}="))? + name.len() + 2..];
        Some(match rest.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next()?,
            None => rest.split(' ').next()?,
        })
    };
    let file = value("name").filter(|name| name.starts_with('/'));
    let what = match (file, value("capname")) {
        (Some(file), _) => file.to_owned(),
        (None, Some(name)) => format!("capability {name}"),
        (None, None) => value("operation")?.to_owned(),
    };
    Some(Denial {
        pid: value("pid")?.parse().ok()?,
        profile: value("profile")?.to_owned(),
        what,
        mask: file.and_then(|_| value("denied_mask")).unwrap_or_default().to_owned(),
    })
}

/// All records of `/dev/kmsg` (Documentation/ABI/testing/dev-kmsg): one for each read.
fn kernel_log(path: &Path) -> Option<String> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let mut file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    let (mut log, mut record) = (Vec::new(), vec![0; 8192]);
    loop {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(len) => log.extend_from_slice(&record[..len]),
            // Overwritten meanwhile; the next read goes on behind it.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
            Err(_) => break,
        }
    }
    Some(String::from_utf8_lossy(&log).into_owned())
}

/// The end of a file.
fn tail(path: &Path) -> Option<String> {
    // A pipe is not opened: its writer would notice.
    let mut file = claims::open(path).ok()?;
    file.seek(SeekFrom::Start(file.metadata().ok()?.len().saturating_sub(MOST))).ok()?;
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last sentence about this process in its log, by the agent or by the wrapper, and the log.
/// `name`: what libvirt calls the guest.
pub(super) fn said(root: &Path, process: &Process<'_>, name: Option<&str>) -> Option<(String, PathBuf)> {
    // Opened by its number: the path may be one of a container.
    let own = process.link("fd/2").ok().filter(|path| path.starts_with('/'));
    let own = own.map(|path| (process.path("fd/2"), PathBuf::from(path)));
    let is_file = |name: &&str| !name.contains('/') && !name.starts_with('.');
    let libvirts = name.filter(is_file).map(|name| root.join(LIBVIRT).join(format!("{name}.log")));
    let mut logs = own.into_iter().chain(libvirts.map(|log| (log.clone(), log)));
    logs.find_map(|(log, name)| Some((sentence(&tail(&log)?, process.pid)?, name)))
}

fn sentence(log: &str, pid: i32) -> Option<String> {
    /// Behind this line libvirt writes what a new start says.
    const START: &str = ": starting up libvirt version";
    let start = log.rfind(START).unwrap_or(0);
    // What the agent says of a denial begins so; with PAGEONE_LOG it says other things, too.
    let agent = ["memory is not merged: ", "vm.max_map_count is taken "];
    let (by, wrapper) = (format!("pageone-agent[{pid}]: "), "pageone: this guest is not merged: ");
    let mut lines = log[start..].lines().filter_map(|line| {
        let said = line.split_once(&by).map(|(_, rest)| rest);
        let of_agent = said.filter(|said| agent.iter().any(|words| said.starts_with(words)));
        of_agent.or_else(|| line.split_once(wrapper).filter(|_| start > 0).map(|(_, rest)| rest))
    });
    lines.next_back().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
6,1,5,-;Linux version 6.12
5,900,77,-;audit: type=1400 audit(1764000000.1:77): apparmor=\"DENIED\" operation=\"open\" class=\"file\" \
profile=\"libvirt-0c1\" name=\"/proc/4711/smaps\" pid=4711 comm=\"qemu-system-x86\" requested_mask=\"r\" \
denied_mask=\"r\" fsuid=64055 ouid=64055
5,901,78,-;audit: type=1400 audit(1764000000.2:78): apparmor=\"DENIED\" operation=\"open\" profile=\"libvirt-0c1\" \
name=\"/dev/userfaultfd\" pid=4711 comm=\"q\" requested_mask=\"wr\" denied_mask=\"wr\"
5,902,79,-;apparmor=\"ALLOWED\" operation=\"open\" profile=\"libvirt-0c1\" name=\"/x\" pid=4711
5,903,80,-;apparmor=\"DENIED\" operation=\"capable\" profile=\"libvirt-0c1\" pid=4712 comm=\"q\" capability=19 \
\x20capname=\"sys_ptrace\"
";

    #[test]
    fn denials_of_a_process_have_the_rule_that_permits_them() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(all(root.path()), None, "no log");
        std::fs::create_dir(root.path().join("dev")).unwrap();
        // Twice: the kernel repeats itself.
        std::fs::write(root.path().join(KERNEL), LINES.repeat(2)).unwrap();
        let all = all(root.path()).unwrap();
        assert_eq!(all.len(), 3, "{all:?}");
        let of = |pid, profile| of(&all, pid, profile).iter().map(|denial| denial.rule()).collect::<Vec<_>>();
        assert_eq!(of(4711, "libvirt-0c1"), ["owner @{PROC}/@{pid}/smaps r,", "/dev/userfaultfd wr,"]);
        assert_eq!(of(4712, "libvirt-0c1"), ["capability sys_ptrace,"]);
        assert!(of(4711, "libvirt-0c2").is_empty(), "the number was another's");
        assert_eq!(all.iter().filter(|denial| denial.is_ours()).count(), 2, "the capability is not the agent's");
    }

    #[test]
    fn the_last_sentence_of_this_start_counts() {
        let log = "2026-01-01: starting up libvirt version: 9.0\npageone: this guest is not merged: old\n\
                   2026-01-02: starting up libvirt version: 9.0\npageone-agent[7]: memory is not merged: x\n\
                   pageone-agent[7]: new region\npageone-agent[8]: memory is not merged: y\n";
        assert_eq!(sentence(log, 7).as_deref(), Some("memory is not merged: x"));
        assert_eq!(sentence(log, 9), None, "what an earlier start said");
        let wrapper = format!("{log}pageone: this guest is not merged: mem-merge=off\n");
        assert_eq!(sentence(&wrapper, 9).as_deref(), Some("mem-merge=off"));
        assert_eq!(sentence("pageone: this guest is not merged: whose?\n", 9), None, "nobody knows of which start");
    }
}
