//! Scan-rate control: "look at everything within 30 s, never more than 20 % of a CPU" instead of
//! `pages_to_scan`.
//!
//! Pure arithmetic: its input is time and counters, its output a rate and the reason. Nothing here
//! reads a clock, a file or a random number; equal readings give equal decisions.
//!
//! * [`Governor`] governs a scanner that works in batches and sleeps between them, as the kernel's
//!   ksmd does. It decides how many pages a batch may have. Its [`Mode`]s are `none`, `scan-time`
//!   ([`kernel`], the arithmetic of the kernel's own advisor) and `target` ([`law`], PageONE's
//!   own).
//! * [`Pace`] governs a scanner that knows how much it has to do and can wait at any moment, as
//!   PageONE's workers can. It decides how long they wait, and has the same modes. [`Schedule`]
//!   spreads the work, [`Bucket`] is its CPU limit.
//! * [`Window`] and [`guard`](window::guard) are the CPU limit of [`Governor`].
//!
//! ```text
//!  reading ─▶ Model (work, cost, pause of a whole scan) ─▶ pages that meet the target ─┐
//!     │                                        the lesser, but at least the minimum ─▶ decision
//!     └──────▶ Window (CPU time of the last 10 s) ─▶ pages that keep the limit ─────────┘
//! ```
//!
//! `docs/design/governor.md` has the control law, the argument for its stability, and the
//! measurements.

mod bucket;
mod decision;
mod governor;
pub mod kernel;
pub mod law;
mod pace;
mod schedule;
mod settings;
pub mod window;

pub use bucket::Bucket;
pub use decision::{Cause, Decision};
pub use governor::{Governor, Reading};
pub use pace::{Pace, PaceDecision, PaceSettings, PacedScan};
pub use schedule::Schedule;
pub use settings::{Mode, Settings, SettingsError};
pub use window::Window;

#[cfg(test)]
mod tests;
