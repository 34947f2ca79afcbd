//! `pageone status`: what is merged and what it costs.

use std::path::PathBuf;

use anyhow::Result;

use crate::cmd::Json;
use crate::paths;

/// Options of `pageone status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    json: Json,
    /// Show all columns and whole lines, also on a terminal that is too narrow for them
    #[arg(long)]
    wide: bool,
}

/// Prints the status.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let status = control::client::status(&paths::candidates(dir))?;
    let width = output::width().filter(|_| !args.wide);
    args.json.print(&status, || width.map_or_else(|| status.to_string(), |width| status.within(width)))
}
