//! Limits and rights of the daemon that runs; without one, of this account's.

use std::path::{Path, PathBuf};

use kmem::cgroup::MemoryGroups;

use super::process::{CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, Identity, Process};
use super::report::Check;

/// Open files that are enough for some thousand clients.
const FILES: u64 = 65_536;
/// Bytes below which a daemon makes no frames: `reserve_mib`, unless it is configured.
const RESERVE: u64 = 64 << 20;

/// The checks. Those of rights and files need a daemon that runs.
pub(super) fn checks(root: &Path, directories: &[PathBuf]) -> Vec<Check> {
    let Some(pid) = control::client::process(directories) else {
        return vec![memory("memory cgroup", kmem::cgroup::memory_headroom())];
    };
    let process = Process::new(root, pid);
    let mut checks = vec![memory("daemon's memory", MemoryGroups::of(pid).map(|groups| groups.headroom()))];
    match process.text("limits") {
        Ok(text) => checks.extend(files(&text)),
        Err(e) => checks.push(Check::note("daemon's files", e, "run this as root")),
    }
    match process.identity() {
        Ok(identity) => checks.push(rights(&identity)),
        Err(e) => checks.push(Check::note("daemon's rights", e, "run this as root")),
    }
    checks
}

/// `left`: bytes that its groups leave.
fn memory(name: &'static str, left: std::io::Result<Option<u64>>) -> Check {
    let remedy = "the store counts against the daemon's cgroup; give the daemon one without a limit";
    match left {
        Ok(None) => Check::ok(name, "no limit"),
        Ok(Some(left)) if left < RESERVE => Check::blocks(name, format!("{} MiB left", left >> 20), remedy),
        Ok(Some(left)) => Check::note(name, format!("{} MiB left", left >> 20), remedy),
        Err(e) => Check::note(name, e, "the limit cannot be read; the store watches the host's memory only"),
    }
}

/// `limits`: the file of that name in `/proc/PID`.
fn files(limits: &str) -> Option<Check> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let soft = line.split_whitespace().next()?;
    let found = format!("{soft} may be open");
    if soft == "unlimited" || soft.parse::<u64>().is_ok_and(|soft| soft >= FILES) {
        return Some(Check::ok("daemon's files", found));
    }
    Some(Check::note(
        "daemon's files",
        found,
        "each client takes some: start the daemon with a higher hard limit (`ulimit -Hn`, LimitNOFILE=1048576)",
    ))
}

fn rights(daemon: &Identity) -> Check {
    let name = "daemon's rights";
    if daemon.uid != 0 {
        return Check::ok(name, format!("it runs as uid {}, and serves this user's programs", daemon.uid));
    }
    let reads = daemon.has(CAP_DAC_READ_SEARCH) || daemon.has(CAP_DAC_OVERRIDE);
    let missing: Vec<&str> = [
        ("CAP_SYS_PTRACE", daemon.has(CAP_SYS_PTRACE)),
        ("CAP_DAC_READ_SEARCH", reads),
        ("CAP_CHOWN", daemon.has(CAP_CHOWN)),
    ]
    .into_iter()
    .filter(|(_, has)| !has)
    .map(|(name, _)| name)
    .collect();
    let found = format!("it runs as root without {}", missing.join(", "));
    let remedy = "its unit must have them in CapabilityBoundingSet, as the packaged one has";
    match missing[..] {
        [] => Check::ok(name, "root, with what it needs to read clients"),
        ["CAP_CHOWN"] => Check::note(name, found, format!("memory goes back in segments of 64 MiB only; {remedy}")),
        _ => Check::blocks(name, found, format!("it cannot read guests of other users; {remedy}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    #[test]
    fn limits_of_the_daemon_have_a_verdict() {
        let of = |soft: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units\nMax open files            {soft}                 524288               files\n"
            );
            files(&text).unwrap().verdict
        };
        assert_eq!((of("1024"), of("1048576"), of("unlimited")), (Verdict::Note, Verdict::Ok, Verdict::Ok));
        let verdict = |left| memory("x", Ok(left)).verdict;
        assert_eq!(verdict(None), Verdict::Ok);
        assert_eq!((verdict(Some(1 << 30)), verdict(Some(1 << 20))), (Verdict::Note, Verdict::Blocks));
    }

    #[test]
    fn a_daemon_of_root_needs_its_capabilities() {
        let with = |capabilities: &[u32]| {
            let capabilities = capabilities.iter().fold(0, |all, bit| all | 1 << bit);
            rights(&Identity { uid: 0, capabilities, ..Identity::default() })
        };
        assert_eq!(with(&[CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_CHOWN]).verdict, Verdict::Ok);
        assert_eq!(with(&[CAP_SYS_PTRACE, CAP_DAC_OVERRIDE]).verdict, Verdict::Note);
        let blind = with(&[CAP_DAC_OVERRIDE, CAP_CHOWN]);
        assert!(blind.verdict == Verdict::Blocks && blind.found.contains("without CAP_SYS_PTRACE"), "{blind:?}");
        assert_eq!(rights(&Identity { uid: 7, ..Identity::default() }).verdict, Verdict::Ok);
    }
}
