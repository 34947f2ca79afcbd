//! The kernel and this account, in the order in which the checks are printed.

use control::Status;
use control::units::counted;
use kmem::memfd;
use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::range::Range;
use kmem::uffd::{Features, Uffd};

use super::report::Check;
use crate::paths;

/// What merging needs of userfaultfd.
const FEATURES: Features = Features::WP.union(Features::WP_ASYNC).union(Features::WP_UNPOPULATED);

/// All of them. `status`: what a daemon answers, if there is one. `module`: the module can merge on
/// this kernel.
pub(super) fn all(status: &Result<Status, control::client::Error>, module: bool) -> Vec<Check> {
    let mut checks = required(kmem::pagemap::too_old(), module);
    checks.extend(host());
    checks.extend(programs(status));
    checks
}

/// A check without which merging cannot run: `Ok` says what was found, `Err` what is missing.
fn need(name: &'static str, result: Result<String, String>, remedy: &str) -> Check {
    match result {
        Ok(found) => Check::ok(name, found),
        Err(found) => Check::blocks(name, found, remedy),
    }
}

/// The same for something without which merging runs all the same.
fn option(name: &'static str, result: Result<String, String>, remedy: &str) -> Check {
    match result {
        Ok(found) => Check::ok(name, found),
        Err(found) => Check::note(name, found, remedy),
    }
}

/// What merging needs of the kernel and this account. `too_old`: the release of a kernel on which
/// there can be no agents. Then nothing that they alone need is in the way of the module's merging.
fn required(too_old: Option<String>, module: bool) -> Vec<Check> {
    let release = kmem::procfs::kernel_release().2;
    let without_agents = too_old.is_some() && module;
    let of_agents = if without_agents { option } else { need };
    let page = kmem::page_size();
    let pages = format!("pages of {page} bytes");
    let uffd = Uffd::new(FEATURES).map(|_| "asynchronous write-protection".to_string()).map_err(|e| e.to_string());
    let agent = paths::agent_library().map(|path| path.display().to_string()).map_err(|e| e.to_string());
    let newer = "Linux 6.7 or later is needed (asynchronous write-protection and PAGEMAP_SCAN); Debian: linux-image-amd64 from \
                 bookworm-backports or later";
    let kernel = match too_old {
        None => Check::ok("kernel", release),
        Some(release) if module => Check::note(
            "kernel",
            format!("Linux {release}: no agents; the module's back end is possible"),
            format!("`pageone run --backend module` merges a QEMU here; for agents {newer}"),
        ),
        Some(release) => Check::blocks(
            "kernel",
            format!("Linux {release}"),
            format!("{newer}; on Debian's 6.1 the module merges without agents: see the lines `module`"),
        ),
    };
    vec![
        kernel,
        need(
            "page size",
            if page == kmem::PAGE_SIZE { Ok(pages) } else { Err(pages) },
            "only 4096-byte pages are supported",
        ),
        of_agents(
            "userfaultfd",
            uffd,
            "run as root, or give this account /dev/userfaultfd (chgrp and chmod), or `sysctl \
             vm.unprivileged_userfaultfd=1`",
        ),
        of_agents("PAGEMAP_SCAN", try_scan(), "Linux 6.7 or later is needed"),
        need(
            "the store",
            try_store(),
            "the kernel must have memfd_create and F_SEAL_FUTURE_WRITE (Linux 5.1); is a seccomp filter or a full \
             /proc/sys/vm limit in the way?",
        ),
        ptrace(),
        of_agents("agent library", agent, "`make build`, or set PAGEONE_AGENT"),
    ]
}

/// Settings of the host that merging feels.
fn host() -> Vec<Check> {
    let forks = Uffd::new(FEATURES | Features::EVENT_FORK).map(|_| "reported by the kernel".to_string());
    let pressure = kmem::psi::memory().ok().flatten().map(|_| "/proc/pressure/memory".to_string());
    let kvm = std::fs::File::open("/dev/kvm").map(|_| "usable".to_string()).map_err(|e| e.to_string());
    vec![
        option(
            "fork events",
            forks.map_err(|_| "not for this account".into()),
            "forks through libc are noticed all the same; CAP_SYS_PTRACE lets the kernel report the others too",
        ),
        max_map_count(),
        overcommit(),
        option(
            "memory pressure",
            pressure.ok_or("no /proc/pressure/memory".into()),
            "boot with psi=1 to see memory pressure",
        ),
        ksm(),
        option(
            "/dev/kvm",
            kvm,
            "guests run without hardware virtualisation, slowly; load kvm_amd or kvm_intel, or join the group kvm",
        ),
    ]
}

/// The programs that the demo needs, and the daemon.
fn programs(status: &Result<Status, control::client::Error>) -> Vec<Check> {
    let qemu = testguest::find::find_program("qemu-system-x86_64", "qemu-system-x86");
    let kernel = testguest::find::find_kernel(None);
    vec![
        option(
            "demo: QEMU",
            qemu.map(|path| path.display().to_string()).map_err(|e| format!("{e:#}")),
            "`make demo` installs it",
        ),
        option(
            "demo: kernel",
            kernel.map(|path| path.display().to_string()).map_err(|e| format!("{e:#}")),
            "`make demo` fetches it",
        ),
        daemon(status),
    ]
}

fn daemon(status: &Result<Status, control::client::Error>) -> Check {
    /// What `systemctl enable` makes: it is to run.
    const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/pageone.service";
    match status {
        Ok(status) => Check::ok("daemon", format!("running, {}", counted(status.domains.len(), "domain"))),
        Err(e) if std::path::Path::new(ENABLED).exists() => {
            Check::note("daemon", e, "systemd is to run it: `systemctl start pageone`")
                .safe_fix("systemctl start pageone")
        }
        Err(e) => Check::note("daemon", e, "`pageone run` starts one"),
    }
}

fn try_scan() -> Result<String, String> {
    let page = vec![1u8; 2 * kmem::PAGE_SIZE];
    let start = (page.as_ptr() as usize).next_multiple_of(kmem::PAGE_SIZE);
    let mut found = 0;
    let query = Query { any_of: Categories::PRESENT, returned: Categories::PRESENT, ..Query::default() };
    let scan = Pagemap::open_self().map_err(|e| format!("/proc/self/pagemap: {e}"))?;
    scan.scan(Range::new(start, kmem::PAGE_SIZE), &query, &mut |run| found += run.end - run.start)
        .map_err(|e| e.to_string())?;
    if found == kmem::PAGE_SIZE { Ok("works".into()) } else { Err("it does not report a present page".into()) }
}

fn try_store() -> Result<String, String> {
    let store = memfd::create_store("pageone:doctor", kmem::PAGE_SIZE).map_err(|e| e.to_string())?;
    memfd::require_kept(&store.reader).map_err(|e| e.to_string())?;
    Ok(if store.can_punch { "memory goes back in pieces of 2 MiB" } else { "sealed; memory goes back in segments" }
        .into())
}

/// The daemon reads its clients' memory; Yama may forbid that.
fn ptrace() -> Check {
    let name = "reading clients";
    let root = rustix::process::geteuid().is_root();
    match kmem::procfs::ptrace_scope() {
        None => Check::ok(name, "no Yama"),
        Some(scope @ (0 | 1)) => {
            Check::ok(name, format!("kernel.yama.ptrace_scope is {scope}; agents let their daemon in"))
        }
        Some(2) if root => Check::ok(name, "kernel.yama.ptrace_scope is 2, and this is root"),
        Some(scope) => Check::blocks(
            name,
            format!("kernel.yama.ptrace_scope is {scope}"),
            "run the daemon as root with ptrace_scope below 3, or `sysctl kernel.yama.ptrace_scope=1`",
        ),
    }
}

fn max_map_count() -> Check {
    let (name, good) = ("vm.max_map_count", kmem::procfs::ADVISED_MAP_COUNT);
    match kmem::procfs::max_map_count() {
        Ok(count) if count >= good => Check::ok(name, count),
        Ok(count) => {
            let remedy = format!(
                "enough for about {} runs a guest; `sysctl vm.max_map_count={good}` lets large guests merge more, until \
                 the host boots: a file in /etc/sysctl.d keeps it",
                count / 3
            );
            Check::note(name, count, remedy).safe_fix(format!("sysctl -w vm.max_map_count={good}"))
        }
        Err(e) => Check::note(name, e, "mount /proc"),
    }
}

fn overcommit() -> Check {
    let text = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    let found = format!("vm.overcommit_memory is {}", text.trim());
    if text.trim() != "2" {
        return Check::ok("overcommit", found);
    }
    Check::note(
        "overcommit",
        found,
        "with strict accounting merged memory still counts as committed, files of pageonefs by their lengths: a guest \
         that does not fit is refused at its start; `sysctl vm.overcommit_memory=0` to use what is saved",
    )
}

fn ksm() -> Check {
    let running = std::fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() == "1");
    if !running {
        return Check::ok("kernel KSM", "not running");
    }
    Check::note(
        "kernel KSM",
        "running",
        "it spends CPU on programs that do not run under PageONE; the others are not given to it",
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    #[test]
    fn what_is_missing_has_a_remedy_and_what_is_there_has_none() {
        for check in all(&control::client::status(&["/nonexistent".into()]), false) {
            assert_eq!(check.remedy.is_some(), check.verdict != Verdict::Ok, "{check:?}");
            assert!(!check.found.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn on_a_kernel_without_agents_the_module_is_enough() {
        let kernel = |module| required(Some("6.1.0-56-amd64".into()), module).swap_remove(0);
        let without = kernel(false);
        assert!(without.verdict == Verdict::Blocks && without.remedy.unwrap().contains("6.7 or later"));
        let with = kernel(true);
        assert!(with.verdict == Verdict::Note && with.found.contains("no agents; the module's back end is possible"));
        let agents = required(Some("6.1.0-56-amd64".into()), true);
        let blocks = |check: &&Check| ["userfaultfd", "PAGEMAP_SCAN", "agent library"].contains(&check.check);
        assert!(agents.iter().filter(blocks).all(|check| check.verdict != Verdict::Blocks), "{agents:?}");
    }
}
