//! `pageone detach`: unmerges a client.

use std::path::{Path, PathBuf};

use anyhow::Result;
use control::units::counted;
use serde_json::json;

use crate::cmd::Json;
use crate::paths;

/// Options of `pageone detach`.
#[derive(clap::Args)]
#[command(after_help = "JSON: `pid`; `pages_retained`, the pages that stay in mappings of the store.")]
pub(crate) struct Args {
    /// Process or guest that is to have its memory back
    #[arg(value_name = "PID|NAME|UUID")]
    target: String,
    #[command(flatten)]
    json: Json,
}

/// Detaches a client, and returns when its memory is its own again.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let target = guests::find(Path::new("/"), &args.target)?;
    let (pid, mut told) = (target.pid()?, None);
    let retained = control::client::detach(&paths::candidates(dir), pid, |pages, seconds| {
        // Once for each number of pages: the time runs by itself.
        if told.replace(pages) != Some(pages) {
            output::note!(
                "waiting up to {seconds} s for what was written lately, {}: a device may be writing to it",
                counted(pages as usize, "page")
            );
        }
    })?;
    args.json.line(&json!({ "pid": pid, "pages_retained": retained }), || match retained {
        0 => format!("process {pid} has its memory back"),
        _ => format!(
            "process {pid} has its memory back\nin mappings of the store the program keeps what is pinned, or written \
             all the time: {}",
            counted(retained as usize, "page")
        ),
    })
}
