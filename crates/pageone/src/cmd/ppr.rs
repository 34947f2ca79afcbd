//! `pageone ppr`: pauses and resumes the recycling of a guest's free pages.

use std::path::PathBuf;

use anyhow::Result;

use crate::paths;

/// What to do.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Unplug the device in which the guest marks its free pages, so that the guest can be saved or
    /// migrated; returns when that is possible
    Pause(Args),
    /// Plug it in again, with no marks
    Resume(Args),
}

/// The guest.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// QEMU's process, started by `pageone run --ppr`
    #[arg(value_name = "PID")]
    pid: i32,
}

/// Pauses or resumes.
pub(crate) fn run(command: &Command, dir: Option<PathBuf>) -> Result<()> {
    let directories = paths::candidates(dir);
    match command {
        Command::Pause(Args { pid }) => {
            control::client::pause(&directories, *pid)?;
            println!("the guest of process {pid} marks nothing any more, and can be saved and migrated");
        }
        Command::Resume(Args { pid }) => {
            control::client::resume(&directories, *pid)?;
            println!("the guest of process {pid} has its device, and marks free pages as soon as its module is there");
        }
    }
    Ok(())
}
