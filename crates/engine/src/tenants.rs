//! Which tenant a client belongs to: what manages it, as the host knows it, and the rules that make
//! a domain of that.
//!
//! ```text
//!   PID ─▶ cgroup, namespaces, label (the kernel) ─▶ manager and guest
//!                     │ which guest                       │
//!                     ▼                                   ▼
//!          XML, pool, log directory (root's files) ─▶ values ─▶ rules ─▶ tenant
//! ```
//!
//! What a client says, and what it or its user can change, counts for nothing. A cgroup counts from
//! the hierarchy's root down: only root makes groups there, while a user may make any below its
//! own. A file counts if it belongs to root or the daemon's user, nobody else can write it, and the
//! kernel's facts agree with it. Where something is missing, the guest is a tenant of its own. A
//! tenant never joins two users: its domain belongs to the user, too.

mod cgroup;
mod file;
mod kubernetes;
mod libvirt;
mod process;
mod proxmox;
#[cfg(test)]
mod tests;

use std::path::Path;

use self::cgroup::Unit;
use crate::config::{ManagedBy, TenantBy, TenantRule};

/// A tenant: the source that it was taken from, and the value there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Tenant {
    /// One of [`TenantBy`], `tenant` for a name of the configuration, `container`, `process`.
    pub(crate) source: &'static str,
    pub(crate) value: String,
}

impl Tenant {
    fn new(source: &'static str, value: impl Into<String>) -> Self {
        Self { source, value: value.into() }
    }

    /// Whether a user can make any number of such tenants.
    pub(crate) fn can_be_multiplied(&self) -> bool {
        matches!(self.source, "container" | "process")
    }
}

/// What is known of a client that something manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Guest {
    manager: ManagedBy,
    /// The tenant that it is without a rule: itself.
    own: Tenant,
    /// Its values, by source.
    values: Vec<(TenantBy, String)>,
    /// What could not be known, and the remedy.
    unknown: Option<String>,
}

/// Which domain a client gets, and why; for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// `None`: that of its user.
    pub(crate) tenant: Option<Tenant>,
    /// What manages it.
    pub(crate) manager: Option<&'static str>,
    /// UUID, VMID or the like.
    pub(crate) guest: Option<String>,
    pub(crate) name: Option<String>,
    /// The rule that gave the domain.
    pub(crate) rule: String,
    /// What could not be known, and the remedy.
    pub(crate) unknown: Option<String>,
}

impl Guest {
    fn new(manager: ManagedBy, own: Tenant) -> Self {
        Self { manager, own, values: Vec::new(), unknown: None }
    }

    fn with(mut self, by: TenantBy, value: impl Into<String>) -> Self {
        self.values.push((by, value.into()));
        self
    }

    /// Takes what a file says, or notes why it says nothing.
    fn with_all(mut self, values: Result<Vec<(TenantBy, String)>, impl std::fmt::Display>) -> Self {
        match values {
            Ok(values) => self.values.extend(values),
            Err(why) => self.unknown = Some(why.to_string()),
        }
        self
    }

    fn value(&self, by: TenantBy) -> Option<&str> {
        self.values.iter().find(|(source, _)| *source == by).map(|(_, value)| value.as_str())
    }
}

/// What manages a process; `None`: nothing that is known, so it is its user's. `root` is the
/// directory of the host's files, `/` outside of tests.
fn find(root: &Path, pid: i32) -> Option<Guest> {
    let text = file::read_kernel(&root.join(format!("proc/{pid}/cgroup")));
    let place = match text.map(|text| cgroup::place(&text)) {
        Ok(Ok(place)) => place,
        Ok(Err(outside)) => return Some(process::unknown(root, pid, &format!("/proc/{pid}/cgroup: {outside}"))),
        // It has no cgroup where the kernel has none at all.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && root.join(format!("proc/{pid}/ns")).exists() => None,
        Err(e) => {
            return Some(process::unknown(
                root,
                pid,
                &format!("/proc/{pid}/cgroup can't be read: {e}; run the daemon as root"),
            ));
        }
    };
    let Some(place) = place else {
        let uuid = libvirt::label(root, pid);
        return match (process::contained(root, pid), uuid) {
            (Some(container), None) => Some(container),
            (None, None) => None,
            (_, Some(_)) => {
                let guest = Guest::new(ManagedBy::Libvirt, process::own(root, pid));
                Some(guest.with_all(libvirt::values(root, pid, None)))
            }
        };
    };
    let guest = |manager, own: &str| {
        let guest = Guest::new(manager, Tenant::new("guest", own));
        match &place.slice {
            Some(slice) => guest.with(TenantBy::Slice, slice),
            None => guest,
        }
    };
    Some(match &place.unit {
        Unit::Libvirt { machine, id } => {
            guest(ManagedBy::Libvirt, machine).with_all(libvirt::values(root, pid, Some(*id)))
        }
        Unit::Proxmox { vmid } => {
            guest(ManagedBy::Proxmox, vmid).with(TenantBy::Guest, vmid).with_all(proxmox::values(root, vmid))
        }
        Unit::Pod { uid } => {
            guest(ManagedBy::Kubernetes, uid).with(TenantBy::Guest, uid).with_all(kubernetes::values(root, uid))
        }
        Unit::Other { path } => guest(ManagedBy::Systemd, path),
    })
}

/// Which domain a process gets, and why.
///
/// It may end, and another get its number: the caller holds a pidfd and asks afterwards whether it
/// still lives. May wait for files of `/etc/pve` (FUSE).
pub(crate) fn verdict(rules: &[TenantRule], pid: i32) -> Verdict {
    judge(rules, find(Path::new("/"), pid))
}

/// The sources that tenants are taken from without a rule of the configuration.
const BY_DEFAULT: [TenantBy; 4] = [TenantBy::Project, TenantBy::Slice, TenantBy::Pool, TenantBy::Namespace];

/// Applies the first rule that matches, or the defaults.
fn judge(rules: &[TenantRule], guest: Option<Guest>) -> Verdict {
    let Some(guest) = guest else {
        return Verdict { rule: "default: by user".into(), ..Verdict::default() };
    };
    let by_rule = rules
        .iter()
        .zip(1..)
        .find_map(|(rule, number)| Some((apply(rule, &guest)?, format!("[[tenants]] {number}: {rule}"))));
    let by_default = || {
        let tenant = |by: &TenantBy| Some((Tenant::new(by.name(), guest.value(*by)?), format!("default: by {by}")));
        BY_DEFAULT.iter().find_map(tenant)
    };
    let (tenant, rule) = by_rule
        .or_else(by_default)
        .unwrap_or_else(|| (guest.own.clone(), "default: no tenant known, a domain of its own".into()));
    Verdict {
        tenant: Some(tenant),
        manager: Some(guest.manager.name()),
        guest: guest.value(TenantBy::Guest).map(str::to_owned),
        name: guest.value(TenantBy::Name).map(str::to_owned),
        rule,
        unknown: guest.unknown,
    }
}

/// The tenant that a rule makes of a guest; `None`: it does not match.
fn apply(rule: &TenantRule, guest: &Guest) -> Option<Tenant> {
    if rule.manager.is_some_and(|manager| manager != guest.manager) {
        return None;
    }
    let has = |by: TenantBy, wanted: &str| guest.values.iter().any(|(source, value)| *source == by && value == wanted);
    let value = match rule.by {
        None => None,
        Some(by) if rule.is.is_empty() => Some((by, guest.value(by)?)),
        Some(by) => Some((by, rule.is.iter().find(|wanted| has(by, wanted))?.as_str())),
    };
    match (&rule.domain, value) {
        (Some(domain), _) => Some(Tenant::new("tenant", domain)),
        // Each guest by itself, whatever its UUID is known to be.
        (None, Some((TenantBy::Guest, _)) | None) => Some(guest.own.clone()),
        (None, Some((by, value))) => Some(Tenant::new(by.name(), value)),
    }
}
