//! `pageone status`: what is merged and what it costs.

use std::path::PathBuf;

use anyhow::Result;

use crate::cmd::table::Tabular;
use crate::paths;

/// Options of `pageone status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    answer: Tabular,
}

/// Prints the status.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let status = control::client::status(&paths::candidates(dir))?;
    args.answer.print(&status, |width| width.map_or_else(|| status.to_string(), |width| status.within(width)))
}
