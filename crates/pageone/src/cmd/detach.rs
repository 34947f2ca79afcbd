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
    let mut told = None;
    let retained = control::client::detach(&paths::candidates(dir), args.pid, |pages, seconds| {
        // Once for each number of pages: the time runs by itself.
        if told.replace(pages) != Some(pages) {
            eprintln!(
                "waiting for {pages} pages that were written lately, up to {seconds} s: a device may be writing to them"
            );
        }
    })?;
    println!("process {} has its memory back", args.pid);
    if retained > 0 {
        println!(
            "{retained} pages stay in mappings of the store: they are pinned, or written all the time; the program keeps them"
        );
    }
    Ok(())
}
