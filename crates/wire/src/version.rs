//! Versions of the protocol: which one two builds speak with each other, and what a new one may
//! change.
//!
//! A build speaks its own version and the one before. The agent says its own in
//! [`ToDaemon::Hello`]; the daemon answers with the newest that both speak in [`ToAgent::Welcome`],
//! or refuses the agent and says which side is the older.
//!
//! Within a version nothing changes. A new version obeys these rules:
//!
//! * A message keeps its number, its fields, and the variants of the types in it. What is new is a
//!   new message, at the end of its enum; `since` says its first version. A number is never used
//!   again.
//! * What is sent before the welcome is the same in all versions.
//! * On a connection, only messages of its version are sent; a later one ends the connection.
//! * A word of the control page that the other side does not write is 0, and that is safe.
//! * The constants of this crate that bound messages and segments stay.
//!
//! Tests keep the bytes of every message.

use std::ops::RangeInclusive;

use crate::{ToAgent, ToDaemon};

/// Version of this build.
pub const VERSION: u16 = 8;
/// The oldest that it speaks.
pub const OLDEST: u16 = VERSION - 1;
/// The first that two builds of different versions can speak with each other.
const FIRST: u16 = 5;

/// An agent and a daemon that speak no version in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// The agent is too old.
    #[error(
        "its agent speaks protocol {agent}, and this daemon {} and {daemon}: start the program again, so that it loads \
         this version's agent; until then it keeps what it has merged", daemon - 1
    )]
    AgentOlder {
        /// The agent's newest version.
        agent: u16,
        /// The daemon's.
        daemon: u16,
    },
    /// The daemon is too old.
    #[error(
        "its agent speaks protocol {} and {agent}, and this daemon {} and {daemon}: upgrade the daemon; until then the \
         program keeps what it has merged", agent - 1, daemon - 1
    )]
    DaemonOlder {
        /// The agent's newest version.
        agent: u16,
        /// The daemon's.
        daemon: u16,
    },
}

/// The versions that a build of this version speaks.
fn spoken(newest: u16) -> RangeInclusive<u16> {
    newest.saturating_sub(1).max(FIRST).min(newest)..=newest
}

fn between(agent: u16, daemon: u16) -> Result<u16, VersionError> {
    let newest = agent.min(daemon);
    if spoken(agent).contains(&newest) && spoken(daemon).contains(&newest) {
        Ok(newest)
    } else if agent < daemon {
        Err(VersionError::AgentOlder { agent, daemon })
    } else {
        Err(VersionError::DaemonOlder { agent, daemon })
    }
}

/// The version that a daemon of this build speaks with an agent of version `agent`.
///
/// # Errors
///
/// [`VersionError`]: there is none.
pub fn agreed(agent: u16) -> Result<u16, VersionError> {
    between(agent, VERSION)
}

impl ToDaemon {
    /// The first version that has this message.
    pub fn since(&self) -> u16 {
        match self {
            Self::Library { .. } => 6,
            Self::PoolRenewed { .. } => 7,
            Self::CpuTime { .. } | Self::Zeros(_) => 8,
            _ => FIRST,
        }
    }
}

impl ToAgent {
    /// The first version that has this message.
    pub fn since(&self) -> u16 {
        match self {
            Self::RenewPool => 7,
            _ => FIRST,
        }
    }
}

#[cfg(test)]
mod tests;
