//! The page ledger: what is known of each page of each region, and which pages are to be read next.
//!
//! ```text
//!   a scan ──▶ written ──▶ region ──▶ entries      what is known of each page
//!                            │──────▶ ages         which pages are candidates, and when
//!                            │        └▶ hot       which are written all the time
//!                            │──────▶ huge         huge pages that are split only if it pays
//!                            │──────▶ emptied      which may have been filled unseen
//!                            │──────▶ free_pages   what the guest has marked as free
//!                            └──────▶ stamps       when pages were written, for dirty rates
//!
//!   a file  ──▶ sparse ──▶ regions, of the parts that have pages
//! ```

mod ages;
mod emptied;
mod entries;
mod few;
pub(crate) mod free_pages;
mod hot;
pub(crate) mod huge;
mod region;
mod sparse;
pub(crate) mod stamps;
pub(crate) mod written;

pub(crate) use ages::Cool;
pub(crate) use emptied::Emptied;
#[cfg(test)]
pub(crate) use entries::Counts;
pub(crate) use entries::Entry;
pub(crate) use region::{LedgerError, Region};
pub(crate) use sparse::{ALL, PAGES, Sparse};
