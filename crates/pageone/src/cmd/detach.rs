//! `pageone detach`: unmerges a client.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::paths;

/// Options of `pageone detach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Process or guest that is to have its memory back
    #[arg(value_name = "PID|NAME|UUID")]
    target: String,
}

/// Detaches a client, and returns when its memory is its own again.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let target = guests::find(Path::new("/"), &args.target)?;
    let (pid, mut told) = (target.pid()?, None);
    let retained = control::client::detach(&paths::candidates(dir), pid, |pages, seconds| {
        // Once for each number of pages: the time runs by itself.
        if told.replace(pages) != Some(pages) {
            output::note!(
                "waiting for {pages} pages that were written lately, up to {seconds} s: a device may be writing to them"
            );
        }
    })?;
    output::line!("process {pid} has its memory back")?;
    if retained > 0 {
        output::line!(
            "{retained} pages stay in mappings of the store: they are pinned, or written all the time; the program keeps them"
        )?;
    }
    Ok(())
}
