//! The checks of a guest beside whether it is merged, in the order in which they are printed.

use std::path::Path;

use control::units::counted;
use guests::{Kind, words};

use super::super::denied;
use super::super::device::{Device, Way};
use super::super::report::Check;
use super::Facts;

/// Where rules for guests of libvirt stand.
const ADDITIONS: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
/// The least locked or pinned memory that is told of, bytes: QEMU locks and pins a little for its
/// own queues.
const LEAST: u64 = 1 << 20;
/// Most of the others in a domain that are named.
const NAMED: usize = 5;

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

impl Facts<'_> {
    /// All of them.
    pub(super) fn others(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        checks.extend(self.domain());
        if self.mount().is_some() {
            checks.extend([self.memory(), self.pins()]);
            return checks;
        }
        checks.extend([self.program(), self.memory()]);
        checks.extend([self.userfaultfd(), self.profile()]);
        checks.extend(self.log());
        checks.extend([self.sandbox(), self.pins(), self.ksm()]);
        checks.extend(self.mappings());
        checks
    }

    /// Its domain and who else is in it, where the daemon knows it.
    fn domain(&self) -> Option<Check> {
        let (domain, client) = self.client?;
        let others = domain.clients.iter().filter(|other| other.pid != client.pid);
        let mut names: Vec<String> = others.map(|other| format!("{} ({})", other.called(), other.pid)).collect();
        let more = names.len().saturating_sub(NAMED);
        names.truncate(NAMED);
        if more > 0 {
            names.push(format!("{more} more"));
        }
        let with =
            if names.is_empty() { "nobody else is in it".to_owned() } else { format!("with {}", names.join(", ")) };
        // A mount's domain is its own: there is no rule.
        let rule = if client.rule.is_empty() { String::new() } else { format!(" ({})", client.rule) };
        let found = format!("{}{rule}; {with}", domain.name);
        Some(match (&domain.paused, &client.remarks.unknown) {
            (Some(why), _) => Check::blocks("domain", format!("{found}; no frames are made: {why}"), "as it says"),
            (None, Some(why)) => Check::note("domain", found, format!("the guest is not known: {why}")),
            (None, None) => Check::ok("domain", found),
        })
    }

    /// Whether a library can be loaded into its program, and whether it is what is installed.
    fn program(&self) -> Check {
        let name = "program";
        let path = self.process.link("exe").unwrap_or_default();
        let agent = self.memory.as_ref().ok().and_then(|memory| memory.agent.as_deref());
        if self.process.is_static() == Some(true) {
            return Check::blocks(
                name,
                format!("{path} is linked statically"),
                "no library can be loaded into it: take a QEMU that is linked dynamically, or leave it to KSM (`pageone \
                 ksm advise`)",
            );
        }
        if path.ends_with(" (deleted)") {
            return Check::note(
                name,
                format!("{path}: it was replaced"),
                "the guest has the new one from its next start on",
            );
        }
        if agent.is_some_and(|agent| agent.ends_with(" (deleted)")) {
            return Check::note(
                name,
                format!("{path}, with an agent that was replaced"),
                "the guest has the new one from its next start on",
            );
        }
        Check::ok(name, format!("{path}, which loads libraries"))
    }

    /// Of what kind its memory is.
    fn memory(&self) -> Check {
        let name = "memory";
        let memory = match &self.memory {
            Ok(memory) => memory,
            Err(e) => return Check::note(name, format!("/proc/{}/smaps: {e}", self.process.pid), "run this as root"),
        };
        let other = memory.total() - memory.private;
        if memory.total() == 0 {
            return Check::note(
                name,
                "no piece of 16 MiB or more",
                "guests have larger pieces; the agent takes those of 1 MiB or more",
            );
        }
        if other == 0 {
            return Check::ok(name, format!("{} private", mib(memory.private)));
        }
        if let Some(mount) = self.mount() {
            let found = format!("{} shared, in {}, whose pages merge", mib(memory.shared), mount.path.display());
            return Check::ok(name, found);
        }
        let file = memory.file.trim_end_matches(" (deleted)");
        let (what, remedy) = if memory.huge >= memory.shared.max(memory.copied) {
            (
                format!("{} in huge pages from a pool ({file})", mib(memory.huge)),
                "these are never merged: no -mem-path on hugetlbfs; in libvirt no <hugepages/>",
            )
        } else if memory.shared >= memory.copied {
            (
                format!("{} shared ({file})", mib(memory.shared)),
                "others may map it, so it is not merged: take memory-backend-ram, or share=off; in libvirt <access \
                 mode='private'/> and no memfd. Where vhost-user or virtiofsd need it shared, take the module: \
                 `pageone run --backend module`",
            )
        } else {
            (
                format!("{} mapped privately from a file ({file})", mib(memory.copied)),
                "what is written exists twice, and is not merged: memory-backend-ram in place of memory-backend-memfd or \
                 -file. `pageone attach` replaces it in a guest that has a QMP socket",
            )
        };
        let found = format!("{} private, {what}", mib(memory.private));
        if memory.private >= other { Check::note(name, found, remedy) } else { Check::blocks(name, found, remedy) }
    }

    /// Whether its user may have a userfaultfd.
    fn userfaultfd(&self) -> Check {
        let name = "userfaultfd";
        if self.merges() {
            return Check::ok(name, "in use");
        }
        let identity = match &self.identity {
            Ok(identity) => identity,
            Err(e) => return Check::note(name, e, "run this as root"),
        };
        let theirs = self.process.path("root");
        let device = Device::look(self.world.root, &theirs);
        let user = format!("uid {}", identity.uid);
        let mut identity = identity.clone();
        if self.process.is_user_contained() {
            // They count in its own namespace only.
            identity.capabilities = 0;
        }
        match device.way(&identity) {
            Way::Call(why) => Check::ok(name, format!("{user} may use it: {why}")),
            Way::Device => Check::ok(name, format!("{user} may use /dev/userfaultfd")),
            Way::Denied(how) => Check::blocks(
                name,
                format!("{user} may not use /dev/userfaultfd ({how})"),
                "a udev rule for KERNEL==\"userfaultfd\" with GROUP=\"kvm\", MODE=\"0660\", which the package \
                 pageone-libvirt has; a guest with a /dev of its own sees it from its next start on",
            ),
            Way::Absent if self.is_of_libvirt() => Check::blocks(
                name,
                "it does not see /dev/userfaultfd",
                "cgroup_device_acl in /etc/libvirt/qemu.conf must have it (`/usr/lib/pageone/libvirt-setup add`); the guest \
                 sees it from its next start on",
            ),
            Way::Absent => Check::blocks(
                name,
                "it does not see /dev/userfaultfd",
                "what gives the guest its /dev must give it this device, or vm.unprivileged_userfaultfd be 1",
            ),
            Way::Unknown(why) => Check::note(name, why, "run this as root"),
        }
    }

    /// What confines it, and what that has denied.
    fn profile(&self) -> Check {
        let name = "profile";
        let Some(label) = &self.label else { return Check::ok(name, "none") };
        if label.starts_with("unconfined") || label.ends_with(" (complain)") || label.ends_with(" (unconfined)") {
            return Check::ok(name, format!("{label}: it denies nothing"));
        }
        let Some((profile, _)) = label.rsplit_once(" (") else { return self.domain_of_selinux(label) };
        let Some(denials) = &self.world.denials else {
            let found = format!("{label}; the kernel's log can't be read");
            return if self.merges() { Check::ok(name, found) } else { Check::note(name, found, "run this as root") };
        };
        let all = denied::of(denials, self.process.pid, profile);
        let (ours, other): (Vec<_>, Vec<_>) = all.into_iter().partition(|denial| denial.is_ours());
        let besides = if other.is_empty() { String::new() } else { format!("; {} denials besides", other.len()) };
        if ours.is_empty() {
            return Check::ok(name, format!("{label}: nothing was denied that merging needs{besides}"));
        }
        let what: Vec<&str> = ours.iter().map(|denial| denial.what.as_str()).collect();
        let rules: Vec<String> = ours.iter().map(|denial| format!("'{}'", denial.rule())).collect();
        let place = if profile.starts_with("libvirt-") { ADDITIONS } else { "that profile" };
        let found = format!("{label}: it denied {}{besides}", what.join(", "));
        let remedy = format!("{} in {place}; the guest has it from its next start on", rules.join(" and "));
        if self.merges() { Check::note(name, found, remedy) } else { Check::blocks(name, found, remedy) }
    }

    /// A label of SELinux: user:role:type:level.
    fn domain_of_selinux(&self, label: &str) -> Check {
        let kind = label.split(':').nth(2).unwrap_or(label);
        let found = format!("the SELinux domain {kind}");
        if kind.starts_with("unconfined") || self.merges() {
            return Check::ok("profile", found);
        }
        Check::note("profile", found, "the policy module in /usr/share/pageone/selinux allows userfaultfd to it")
    }

    /// What agent or wrapper wrote to its log.
    fn log(&self) -> Option<Check> {
        let (sentence, log) = self.said.as_ref()?;
        let remedy = format!("as it says; {}", log.display());
        Some(match self.merges() || self.opts_out() {
            true => Check::note("its log", sentence, remedy),
            false => Check::blocks("its log", sentence, remedy),
        })
    }

    /// Filters of system calls.
    fn sandbox(&self) -> Check {
        let name = "sandbox";
        let filters = match &self.identity {
            Ok(identity) => identity.filters,
            Err(e) => return Check::note(name, e, "run this as root"),
        };
        if filters == 0 {
            return Check::ok(name, "no filter of system calls");
        }
        let is_on =
            |pair: &[String]| pair[0] == "-sandbox" && words::parts(&pair[1]).next().is_some_and(|first| first == "on");
        let found = format!("filters of system calls: {filters}");
        if self.merges() {
            return Check::ok(name, format!("{found}, which let the agent work"));
        }
        if self.kind == Kind::Qemu && filters == 1 && self.arguments.windows(2).any(is_on) {
            return Check::ok(name, "QEMU's own (-sandbox), which lets the agent work");
        }
        Check::note(
            name,
            format!("{found}; which they refuse can't be seen"),
            "they must allow userfaultfd, mmap, madvise, ioctl and sockets of the kind AF_UNIX to the agent",
        )
    }

    /// What holds pages of it, so that they cannot be merged.
    fn pins(&self) -> Check {
        let name = "pins";
        let (Ok(identity), Ok(files)) = (&self.identity, self.process.files()) else {
            return Check::note(name, "its files can't be seen", "run this as root");
        };
        let memory = self.memory.as_ref().map_or(0, |memory| memory.total());
        let has = |what: &dyn Fn(&str) -> bool| files.iter().any(|(_, name)| what(name));
        if has(&|file| file.starts_with("/dev/vfio/") || file == "anon_inode:[vfio-device]" || file == "/dev/iommu") {
            return Check::blocks(
                name,
                format!("a device is passed through (VFIO); {} pinned", mib(identity.pinned)),
                "the device may write to all of it, so nothing is merged while it is there",
            );
        }
        if has(&|file| file.starts_with("/dev/vhost-vdpa")) {
            return Check::blocks(name, "vhost-vdpa pins all of it", "nothing is merged while the device is there");
        }
        let locked = self.memory.as_ref().map_or(identity.locked, |memory| memory.locked.max(identity.locked));
        if locked >= LEAST {
            let (found, remedy) = (
                format!("{} locked", mib(locked)),
                "locked memory is not merged: -overcommit mem-lock=off; in libvirt no <locked/>",
            );
            return if locked * 2 > memory {
                Check::blocks(name, found, remedy)
            } else {
                Check::note(name, found, remedy)
            };
        }
        let is_ring = |file: &&(String, String)| file.1 == "anon_inode:[io_uring]";
        let rings = files.iter().filter(is_ring).filter(|(number, _)| self.registers_buffers(number)).count();
        if rings > 0 || identity.pinned >= LEAST {
            let (found, remedy) = (
                format!("{rings} io_urings with registered buffers, {} pinned", mib(identity.pinned)),
                "pinned pages are left as they are, the others merge",
            );
            return if identity.pinned * 2 > memory {
                Check::blocks(name, found, remedy)
            } else {
                Check::note(name, found, remedy)
            };
        }
        match self.client.and_then(|(_, client)| client.remarks.cooling.as_ref()) {
            Some(over) => Check::note(
                name,
                format!("direct I/O over {over}"),
                "pages merge a while after their last write (direct_io_seconds)",
            ),
            None => Check::ok(name, "nothing is pinned or locked"),
        }
    }

    /// Whether an io_uring has registered buffers (`UserBufs` in its fdinfo).
    fn registers_buffers(&self, number: &str) -> bool {
        let text = self.process.text(&Path::new("fdinfo").join(number).to_string_lossy()).unwrap_or_default();
        super::process::field(&text, "UserBufs").is_some_and(|count| count != "0")
    }

    /// Pages that the kernel's KSM has merged.
    pub(super) fn merged_by_ksm(&self) -> u64 {
        let text = self.process.text("ksm_stat").unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix("ksm_merging_pages"));
        value.and_then(|value| value.trim_matches([':', ' ']).parse().ok()).unwrap_or(0)
    }

    /// Whether KSM has its memory.
    fn ksm(&self) -> Check {
        let name = "KSM";
        let pages = self.merged_by_ksm();
        let marked = self.memory.as_ref().map_or(0, |memory| memory.ksm);
        if self.has_agent() && marked > 0 {
            return Check::blocks(
                name,
                format!("KSM has {} of it", mib(marked)),
                "it was marked before the agent was there, or for the whole process (PR_SET_MEMORY_MERGE): start it again \
                 without that",
            );
        }
        if pages > 0 {
            return Check::note(
                name,
                format!("KSM has merged {} of it", counted(pages as usize, "page")),
                "with the agent in it from its start on PageONE has this memory; `echo 2 > /sys/kernel/mm/ksm/run` takes \
                 apart what KSM has merged on the whole host",
            );
        }
        match (marked > 0, self.world.ksm_runs) {
            (false, _) => Check::ok(name, "does not have its memory"),
            (true, false) => Check::ok(name, "its memory is marked, and KSM does not run"),
            (true, true) => Check::ok(name, "its memory is marked, and KSM has merged none of it"),
        }
    }

    /// Where the limit of mappings binds.
    fn mappings(&self) -> Option<Check> {
        let metrics = &self.client?.1.metrics;
        metrics.max_map_count_binds.then(|| {
            Check::note(
                "mappings",
                format!("{} of the most that vm.max_map_count allows: only long runs are merged", metrics.mappings),
                format!("`sysctl vm.max_map_count={}` lets more in", kmem::procfs::ADVISED_MAP_COUNT),
            )
        })
    }
}
