//! The daemon's control socket: protocol, server, client, and the status that it gives.
//!
//! ```text
//! pageone, benches ── client ──▶ control.sock ──▶ server ── Handler ──▶ engine
//!                        │                           │
//!                        └────────── protocol ───────┘
//!                                       │
//!                                    status ◀── metrics (one table)
//!                                       └──▶ openmetrics (for Prometheus)
//! ```
//!
//! This crate knows nothing of the engine: the server calls a [`Handler`], which the engine
//! implements. The types of an answer are here, so that a program can ask a daemon without the
//! engine's code. Every metric is one entry of the table in [`metrics`]: its field, its key in
//! JSON, its sum, its column on screens, its sample and its line in the reference come from it.
//! States and reasons are enums ([`Reason`]); figures are written in one way ([`units`]).

pub mod client;
pub mod metrics;
pub mod server;
pub mod units;

mod dirty;
mod histogram;
mod openmetrics;
mod protocol;
mod sharing;
mod states;
mod status;
mod table;
mod text;

pub use dirty::{DirtyStatus, Heat, Window};
pub use histogram::{BOUNDS, Histogram};
pub use metrics::{Kind, Metric, Scope, Unit, Value};
pub use openmetrics::{ALIASES, Format, OTHER_SAMPLES, Rows, Sample, exposition};
pub use protocol::ChangeLog;
pub use server::{DetachStep, Detaching, Freeze, Handler, Peer, Refusal};
pub use sharing::{
    Cell, ClientMap, Content, DomainSharing, HotRange, MOST_CELLS, MOST_CONTENTS, MOST_HOT, MOST_SHARERS, Pair,
    RegionMap, Sharer, SharingMatrix,
};
pub use states::{ClientState, GovernorMode, Reason, RecyclerState};
pub use status::{
    ClientStatus, DomainStatus, GovernorStatus, RecycleStatus, RefusedStatus, Remarks, Source, Status, Why,
};
pub use table::{ClientMetrics, DomainMetrics, GovernorMetrics, HostMetrics, METRICS, RecyclerMetrics, columns};

/// Name of the control socket in the daemon's directory.
pub const SOCKET: &str = "control.sock";
