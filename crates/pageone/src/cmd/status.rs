//! `pageone status`: what is merged and what it costs.

use std::path::PathBuf;

use anyhow::Result;

use crate::paths;

/// Options of `pageone status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the status.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let status = control::client::status(&paths::candidates(dir))?;
    if args.json {
        output::line!("{}", serde_json::to_string_pretty(&status)?)?;
    } else {
        output::put!("{status}")?;
    }
    Ok(())
}
