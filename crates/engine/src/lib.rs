//! PageONE: finds identical pages across clients and makes them share one read-only frame.
//!
//! ```text
//!              sockets, process ends, periods
//!                        │ service
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
//! [`Engine::start`] runs it all; [`Engine::status`] says what it does. The safety of clients'
//! memory rests on three things only: an agent maps a frame over a page when it has compared the
//! two, byte by byte, with the page held still; a frame's bytes are never written again while a
//! mapping of it can exist (`store`); and everything that is not certain is kept. All the rest,
//! digests, ages, ledgers, may be wrong or late and costs at most a missed merge.

mod client;
mod config;
mod content;
mod daemon;
mod ledger;
mod merge;
mod pace;
mod recycle;
mod report;
mod world;

pub use config::{CommandOption, Config, ConfigError, DomainConfig, Range, SETTINGS, Setting};
pub use daemon::engine::{AGENT_SOCKET, DetachError, Engine, StartError};
pub use daemon::freeze::{Freeze, FreezeError};
pub use governor::Mode;
pub use report::rates::NotAClient;
pub use wire::HugePages;
