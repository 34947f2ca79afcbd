//! What the daemon does, to look at: live, recorded, and as a report.
//!
//! ```text
//! daemon ── control::client ──▶ sampler ──▶ Moment ──▶ recording ──▶ FILE, or memory
//!                                                          │
//!                    terminal ◀── ui ◀── view ◀────────────┤
//!              report.html, CSV, JSON ◀── report ◀─────────┘
//! ```
//!
//! A [`Moment`] is the daemon's status at one time. `top` keeps the last hour of them in memory in
//! the format in which `record` writes them, so going back in time is one thing for both. What a
//! screen or a page shows is computed in [`view`], without a terminal.

pub mod clock;
pub mod moment;
pub mod recording;
pub mod report;
pub mod sampler;
pub mod ui;
pub mod view;

pub use moment::{Depth, Moment};
pub use recording::Recording;
