//! The merge pass: what becomes of a client's pages, from a scan to the batches its agent works on.
//!
//! ```text
//!   period ──▶ scan ──▶ ledger            which pages were written: each merge period
//!
//!   pass: pick ──▶ read ──▶ lookup ──▶ plan ──▶ send       each page that stayed clean, once
//!          │        │         │          ▲
//!       predict     │         │          └── requests of other clients' passes
//!          │        │         └── index, zero page, replicas, promotion; requests to others
//!          │        └── bytes from outside, or digests by the agent
//!          └── pages planned without being read
//! ```
//!
//! A page goes through these files once, in this order. Each stage hands the next a type of its
//! own: a [`Chunk`](read::Chunk) of pages with their digests, a [`Candidate`](lookup::Candidate)
//! for each page of it, a [`Verdict`](plan::Verdict) on each candidate, and a [`Plan`](plan::Plan)
//! of runs.

pub(crate) mod device;
mod lookup;
mod moves;
pub(crate) mod pass;
mod period;
mod plan;
pub(crate) mod ram;
mod read;
mod requests;
pub(crate) mod scan;
pub(crate) mod sweeps;
mod verify;

use crate::store::GrowError;

/// Why a pass ends early. Only `Fatal` needs an operator.
#[derive(Debug)]
enum Stop {
    /// The client is gone or does not answer, or this worker was held up in its memory.
    Client,
    /// The agent has enough to do; requests wait.
    Full,
    /// A client of another user waits, and this pass has had its time.
    Turn,
    Store(GrowError),
    /// The client cannot be read; the text says why.
    Fatal(String),
}
