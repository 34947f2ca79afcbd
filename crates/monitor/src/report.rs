//! Reports of a recording: one page of HTML, tables as CSV, everything as JSON.
//!
//! ```text
//! recording ──▶ data ──▶ page ──▶ report.html
//!     │                   └── plot: SVG
//!     └──▶ export ──▶ *.csv, JSON
//! ```
//!
//! The page needs nothing else: no network, no script. Its plots are SVG within it; what a point or
//! a cell is, is said when the mouse rests on it. Plots are made here, since a library would not
//! spare more than the few lines that draw a path, and its text could not follow the page's style.

mod data;
pub mod export;
mod page;
mod plot;

use crate::recording::{Error, Recording};

/// The page of a recording. `name`: what it is called, for the title.
///
/// # Errors
///
/// When a moment cannot be read.
pub fn html(recording: &mut Recording, name: &str) -> Result<String, Error> {
    let data = data::Data::gather(recording)?;
    Ok(page::page(&data, name))
}

#[cfg(test)]
mod tests;
