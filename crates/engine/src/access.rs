//! Who may: what a process at the other end of a control connection may see and do.
//!
//! | who | what |
//! |---|---|
//! | root, the daemon's owner | all, and what pages hold |
//! | another process | clients of its own user *and* its own tenant, and not what pages hold |
//! | one whose tenant is unknown | no client |
//!
//! Its tenant is found as that of a client is ([`crate::tenants`]): what manages guests runs those
//! of all tenants as one user. A client's tenant is the one that it had when it was admitted.

use control::Peer;

use crate::client::Client;
use crate::config::TenantRule;
use crate::tenants::{self, Tenant};

/// What a process may see and do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    All,
    /// Clients of this user and tenant.
    Of(u32, Option<Part>),
    /// No client.
    Nobody,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part(Tenant);

impl Access {
    /// That of a process. May wait for files of managers.
    pub(crate) fn of(rules: &[TenantRule], peer: &Peer) -> Self {
        if kmem::peer::is_trusted(peer.uid) {
            return Self::All;
        }
        let Some(process) = &peer.process else { return Self::Nobody };
        let tenant = tenants::verdict(rules, peer.pid).tenant;
        // Else another process may have its number.
        if process.has_exited() { Self::Nobody } else { Self::Of(peer.uid, tenant.map(Part)) }
    }

    /// Whether a process of this user and tenant may be seen and touched.
    fn covers(&self, uid: u32, tenant: Option<&Tenant>) -> bool {
        match self {
            Self::All => true,
            Self::Of(own, part) => *own == uid && part.as_ref().map(|part| &part.0) == tenant,
            Self::Nobody => false,
        }
    }

    /// Whether a client may be seen and touched.
    pub(crate) fn covers_client(&self, client: &Client) -> bool {
        self.covers(client.uid, client.verdict.tenant.as_ref())
    }

    /// Whether a process that is no client of an agent may be seen and touched. One that lives no
    /// more may not: its number may be another's, whose tenant would be found.
    pub(crate) fn covers_process(
        &self,
        rules: &[TenantRule],
        uid: u32,
        pid: i32,
        lives: impl FnOnce() -> bool,
    ) -> bool {
        let tenant = || tenants::verdict(rules, pid).tenant;
        match self {
            Self::Of(own, _) => *own == uid && self.covers(uid, tenant().as_ref()) && lives(),
            Self::All => true,
            Self::Nobody => false,
        }
    }
}

#[cfg(test)]
mod tests;
