//! PageONE: finds identical pages across clients and makes them share one read-only frame.
//!
//! ```text
//!              sockets, process ends, periods
//!                        │ daemon
//!                        ▼
//!   work queue ──▶ workers: merge ──▶ client ──batch──▶ agent (in the client's process)
//!                     │                 │ ledger            │
//!                     ▼                 ▼                   ▼
//!                index (SD tree)     PAGEMAP_SCAN       merge window: protect, compare, map
//!                     │
//!                     ▼
//!                  store (sealed memfds) ◀── adopt (a restarted daemon takes all this back)
//! ```
//!
//! Folders are floors. Imports go down only:
//!
//! | floor | what it is |
//! |---|---|
//! | `report` | status and dirty rates, and the answers to the control socket |
//! | `daemon` | the engine, the event loop, handshakes, taking clients back, freezing |
//! | `merge`, `recycle` | merge passes and scans; the recycling of guests' free pages |
//! | `world` | what all threads share: clients, domains, the workers' queue |
//! | `client` | one client: connection, batches under way, requests to it, changes |
//! | `ledger` | one region: what is known of each page, and how long it has been clean |
//! | `content` | frames, the store, the index, domains |
//! | `tenants` | what manages a client, and the tenant that it belongs to |
//! | `pace`, `config` | clocks and limits; settings |
//!
//! [`Engine::start`] runs it all; [`Engine::status`] tells what it does. The safety of clients'
//! memory rests on three things. An agent maps a frame over a page only after it has compared the
//! two, byte by byte, while writers wait. A frame's bytes are never written again while a mapping
//! of it can exist (`content::store`). What is not certain is kept. Digests, ages and ledgers may
//! be wrong or late; that costs at most a missed merge.

mod client;
mod config;
mod content;
mod daemon;
mod files;
mod ledger;
mod merge;
mod pace;
mod recycle;
mod report;
mod tenants;
#[cfg(test)]
mod testing;
mod users;
mod world;

pub use config::{
    Changes, CommandOption, Config, ConfigError, DomainConfig, Effect, ManagedBy, Range, SETTINGS, Setting, TenantBy,
    TenantRule,
};
pub use daemon::detach::{DetachError, Detaching};
pub use daemon::engine::{AGENT_SOCKET, Engine, StartError};
pub use daemon::freeze::{Freeze, FreezeError};
pub use governor::Mode;
pub use recycle::device::PlugError;
pub use report::rates::NotAClient;
pub use wire::HugePages;
