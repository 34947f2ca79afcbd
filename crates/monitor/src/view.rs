//! What a screen shows of a moment, computed without a terminal.
//!
//! ```text
//! Moment ──▶ rows ──▶ columns ──▶ text (plain), ui, report
//!        └─▶ host ────────────────▶
//! ```
//!
//! The metrics of a row, their titles and widths are those of the table in `control`.

mod columns;
mod host;
mod rows;
mod text;

pub use columns::{Column, Place, Sort, layout};
pub use host::{Host, Span, graph};
pub use rows::{Row, rows};
pub use text::text;

#[cfg(test)]
mod tests;
