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
}

/// Prints the status.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let status = control::client::status(&paths::candidates(dir))?;
    args.json.print(&status, || status.to_string())
}
