//! PageONE: finds identical pages across clients and makes them share one read-only frame.
//!
//! ```text
//!              sockets, process ends, periods
//!                        │ daemon
//!                        ▼
//!   work queue ──▶ workers: agent ──▶ client ──batch──▶ agent (in the client's process)
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
//! | `backend/lend` | what clients and files share; only this names both back ends |
//! | `backend/agent`, `backend/module` | what merges: agents in clients, the kernel's module for files |
//! | `world` | what all threads share: clients, domains, the workers' queue |
//! | `client` | one client: connection, batches under way, requests to it, changes |
//! | `core/recycle` | guests' free pages: where their RAM lies, their device |
//! | `core/ledger` | one region: what is known of each page, and how long it has been clean |
//! | `store` | the frames of a domain, and compaction |
//! | `core/merge` | a pass, whichever back end |
//! | `core/content` | the index of contents |
//! | `tenants` | what manages a client, and the tenant that it belongs to |
//! | `pace`, `config`, `sync` | clocks and limits; settings; locks |
//!
//! [`Engine::start`] runs it all; it answers as a [`control::Handler`]. The safety of clients'
//! memory rests on three things. An agent maps a frame over a page only after it has compared the
//! two, byte by byte, while writers wait. A frame's bytes are never written again while a mapping
//! of it can exist (`store`). What is not certain is kept. Digests, ages and ledgers may
//! be wrong or late; that costs at most a missed merge.

mod access;
mod backend;
mod client;
mod config;
mod core;
mod daemon;
mod pace;
mod report;
mod store;
mod sync;
mod tenants;
#[cfg(test)]
mod testing;
mod users;
mod world;

pub use config::{
    Changes, CommandOption, Config, ConfigError, DomainConfig, Effect, ManagedBy, Range, SETTINGS, Setting, TenantBy,
    TenantRule,
};
pub use daemon::engine::Engine;
pub use daemon::place::{AGENT_SOCKET, StartError};
pub use governor::Mode;
pub use wire::HugePages;
