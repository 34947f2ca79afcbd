//! The daemon's status: the metrics of each scope beside names, states and reasons.

use serde::{Deserialize, Serialize};

use crate::histogram::Histogram;
use crate::metrics::{Metric, Scope, Value};
use crate::states::{ClientState, GovernorMode, Reason, RecyclerState};
use crate::table::{ClientMetrics, DomainMetrics, GovernorMetrics, HostMetrics, RecyclerMetrics};

/// The whole daemon. Its fields are those of the JSON object of `pageone status --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its version. Empty: it does not say.
    #[serde(default)]
    pub version: String,
    /// Its metrics.
    #[serde(flatten)]
    pub metrics: HostMetrics,
    /// Why nothing is merged on the whole host at present, and the remedy.
    #[serde(default)]
    pub paused: Option<String>,
    /// Why no program with the agent can be merged on this kernel, and what can.
    #[serde(default)]
    pub no_agents: Option<String>,
    /// How long writers can have waited in merge windows, in all clients, ended ones too.
    #[serde(default)]
    pub writer_stall: Histogram,
    /// What the governor does, and why.
    pub governor: GovernorStatus,
    /// The domains.
    pub domains: Vec<DomainStatus>,
    /// The latest refused clients of each user, while their processes live.
    #[serde(default)]
    pub refused: Vec<RefusedStatus>,
    /// How many more there are.
    #[serde(default)]
    pub refused_left_out: u64,
}

/// A process that was refused as a client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RefusedStatus {
    /// The user that owns it.
    pub uid: u32,
    /// The process.
    pub pid: i32,
    /// The name of its program, as it says; may be empty.
    pub name: String,
    /// The broken rule, and the remedy.
    pub reason: String,
    /// How often it was refused for that.
    pub times: u64,
}

/// The governor. A scan begins when the kernel is asked what was written, and ends when every page
/// that was due then has been looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GovernorStatus {
    /// How it finds its pace.
    pub mode: GovernorMode,
    /// Its metrics.
    #[serde(flatten)]
    pub metrics: GovernorMetrics,
    /// The last decision, in words and figures.
    pub reason: String,
}

/// One domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// Its name.
    pub name: String,
    /// Its metrics.
    #[serde(flatten)]
    pub metrics: DomainMetrics,
    /// Why no frames can be made at present.
    pub paused: Option<String>,
    /// Its clients.
    pub clients: Vec<ClientStatus>,
}

/// One client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its process.
    pub pid: i32,
    /// The name of its program.
    pub name: String,
    /// The user that owns it.
    pub uid: u32,
    /// What manages it: `libvirt`, `proxmox`, `kubernetes`, `systemd`, `container` or `unknown`.
    /// `None`: nothing, so the domain is its user's.
    #[serde(default)]
    pub manager: Option<String>,
    /// The guest's UUID, VMID or pod uid, if the manager knows it.
    #[serde(default)]
    pub guest: Option<String>,
    /// The guest's name, if the manager knows it.
    #[serde(default)]
    pub guest_name: Option<String>,
    /// What the guest calls itself, by its command line: never to be trusted.
    #[serde(default)]
    pub own_name: Option<String>,
    /// The UUID on its command line: never to be trusted.
    #[serde(default)]
    pub own_uuid: Option<String>,
    /// The rule that gave its domain.
    #[serde(default)]
    pub rule: String,
    /// Its metrics.
    #[serde(flatten)]
    pub metrics: ClientMetrics,
    /// What its recycler does, if its guest marks free pages.
    pub recycling: Option<RecycleStatus>,
    /// The connection to its agent.
    pub state: ClientState,
    /// What there is to say of it.
    #[serde(flatten)]
    pub remarks: Remarks,
    /// Why not more of it is merged: the most important reason. `None`: nothing keeps it.
    #[serde(default)]
    pub why: Option<Why>,
    /// How long its writers can have waited in merge windows.
    #[serde(default)]
    pub writer_stall: Histogram,
}

/// What there is to say of a client, in sentences. `None`: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remarks {
    /// What could not be known of the guest, and the remedy.
    pub unknown: Option<String>,
    /// Why nothing of it is merged at present.
    pub refused: Option<String>,
    /// The file system or device over which it may do direct I/O that is not seen page by page, so
    /// that its pages cool down after a write.
    pub cooling: Option<String>,
    /// Why some of it stays unmerged: a limit of the program is too low.
    pub limited: Option<String>,
    /// How its agent differs from the daemon's build: it was loaded before an upgrade.
    pub outdated: Option<String>,
}

impl Remarks {
    /// What it is about, and the sentence, of each.
    pub fn told(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [
            ("guest not known", &self.unknown),
            ("not merged", &self.refused),
            ("pages wait after a write (direct_io_seconds), for direct I/O over", &self.cooling),
            ("merged in part", &self.limited),
            ("its agent is of another build", &self.outdated),
        ];
        all.into_iter().filter_map(|(about, text)| Some((about, text.as_deref()?)))
    }
}

/// Why not more of a client is merged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// One word, for a column.
    pub code: Reason,
    /// A sentence with the remedy.
    pub text: String,
}

/// The recycler of one client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleStatus {
    /// What it does.
    pub state: RecyclerState,
    /// Why it does not recycle.
    pub why: Option<String>,
    /// Its metrics.
    #[serde(flatten)]
    pub metrics: RecyclerMetrics,
}

/// What a value belongs to.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The daemon and its host.
    Host,
    /// The governor.
    Governor,
    /// A domain.
    Domain(&'a DomainStatus),
    /// A client, and its domain.
    Client(&'a DomainStatus, &'a ClientStatus),
    /// A client's recycler, and its domain.
    Recycler(&'a DomainStatus, &'a ClientStatus),
}

impl Source<'_> {
    /// The scope of the value's metric.
    pub fn scope(&self) -> Scope {
        match self {
            Source::Host => Scope::Host,
            Source::Governor => Scope::Governor,
            Source::Domain(_) => Scope::Domain,
            Source::Client(..) => Scope::Client,
            Source::Recycler(..) => Scope::Recycler,
        }
    }
}

impl ClientStatus {
    /// What it is called, on every screen: as its manager says, else as itself does, else as its
    /// program.
    pub fn called(&self) -> &str {
        let names = [self.guest_name.as_deref(), self.own_name.as_deref()];
        names.into_iter().flatten().find(|name| !name.is_empty()).unwrap_or(&self.name)
    }

    /// Its UUID or another identity, as its manager says, else as itself does.
    pub fn identity(&self) -> Option<&str> {
        self.guest.as_deref().or(self.own_uuid.as_deref())
    }
}

impl HostMetrics {
    /// CPU time of the daemon and all agents, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        self.daemon_cpu_seconds + self.agent_cpu_seconds
    }
}

impl Status {
    /// All clients, domain by domain.
    pub fn clients(&self) -> impl Iterator<Item = &ClientStatus> {
        self.domains.iter().flat_map(|domain| &domain.clients)
    }

    /// Calls `visit` with every value of every scope.
    pub fn for_each_metric(&self, visit: &mut dyn FnMut(Source<'_>, &'static Metric, Value)) {
        self.metrics.for_each_metric(&mut |metric, value| visit(Source::Host, metric, value));
        self.governor.metrics.for_each_metric(&mut |metric, value| visit(Source::Governor, metric, value));
        for domain in &self.domains {
            domain.metrics.for_each_metric(&mut |metric, value| visit(Source::Domain(domain), metric, value));
            for client in &domain.clients {
                let source = Source::Client(domain, client);
                client.metrics.for_each_metric(&mut |metric, value| visit(source, metric, value));
                let source = Source::Recycler(domain, client);
                if let Some(recycler) = &client.recycling {
                    recycler.metrics.for_each_metric(&mut |metric, value| visit(source, metric, value));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
