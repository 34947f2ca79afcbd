//! `pageone detach`: unmerges a client.

use std::path::PathBuf;

use anyhow::Result;

use crate::paths;

/// Options of `pageone detach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Process that is to have its memory back
    #[arg(value_name = "PID")]
    pid: i32,
}

/// Detaches a client, and returns when its memory is its own again.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    control::client::detach(&paths::candidates(dir), args.pid)?;
    println!("process {} has its memory back", args.pid);
    Ok(())
}
