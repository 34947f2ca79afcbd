//! The messages on the control socket: one line of JSON each.
//!
//! ```text
//! client                                  daemon
//!   Request ───────────────────────────────▶
//!         ◀─────────────────────────────────── Answer
//!   Mark (only after Answer::Frozen) ──────▶    the client is frozen until the connection closes
//!         ◀─────────────────────────────────── Answer::Done
//! ```
//!
//! Command and daemon may be of different builds. Fields that one of them does not know are left
//! out; a request or an answer that it does not know is an error with the remedy.
//!
//! The names in JSON are older than those in code: a freeze is called `hold` there.

use serde::{Deserialize, Serialize};

use crate::dirty::DirtyStatus;
use crate::sharing::{ClientMap, SharingMatrix};
use crate::status::Status;

/// How a daemon's answer begins to what it does not know. Every build has it.
pub(crate) const NOT_A_REQUEST: &str = "not a request";
/// The longest request, in bytes.
pub(crate) const MAX_REQUEST: u64 = 4096;
/// The longest mark, in bytes: it lists parts of memory.
pub(crate) const MAX_MARK: u64 = 16 << 20;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// The daemon's status.
    Status,
    /// Unmerge this process.
    Detach(i32),
    /// Unplug the device for free pages of this process's guest.
    Pause(i32),
    /// Plug it in again.
    Resume(i32),
    /// What these processes write; none: all clients.
    Dirty(Vec<i32>),
    /// A map of this process's memory.
    Map(i32),
    /// Who shares with whom.
    Sharing,
    /// Neither scan nor merge this process while the connection is open.
    #[serde(rename = "hold")]
    Freeze(i32),
}

/// What the daemon answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Dirty`].
    Dirty(Vec<DirtyStatus>),
    /// To [`Request::Map`].
    Map(Box<ClientMap>),
    /// To [`Request::Sharing`].
    Sharing(Box<SharingMatrix>),
    /// The mark is set, or the device is unplugged or plugged in.
    Done,
    /// The process is detached; this number of pages stays in mappings of the store.
    Detached(u64),
    /// The detach waits for copies to cool down. Another answer follows.
    Cooling {
        /// How many pages.
        pages: u64,
        /// How much longer, at most.
        seconds: u64,
    },
    /// The process is frozen; what it has changed since the last mark, if that is known.
    #[serde(rename = "held")]
    Frozen(Option<ChangeLog>),
    /// No such client.
    Unknown(String),
    /// Another connection has frozen the client.
    Busy(String),
    /// The request cannot be fulfilled.
    Failed(String),
}

/// What may follow a freeze: the client's memory was stored.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// The next freeze is told this label.
    pub(crate) label: String,
    /// See [`crate::Freeze::mark`].
    pub(crate) written: Option<Vec<(u64, u64)>>,
}

/// What a client has changed since a moment that was marked with a label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeLog {
    /// The label that was given to [`Freeze::mark`](crate::Freeze::mark).
    pub label: String,
    /// Address and length in bytes of each part, ascending.
    pub changed: Vec<(u64, u64)>,
}
