//! `pageone ppr`: pauses and resumes the recycling of a guest's free pages.

use std::path::{Path, PathBuf};

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
    /// QEMU's process or the guest's name, started by `pageone run --ppr`
    #[arg(value_name = "PID|NAME|UUID")]
    target: String,
}

/// Pauses or resumes.
pub(crate) fn run(command: &Command, dir: Option<PathBuf>) -> Result<()> {
    let directories = paths::candidates(dir);
    let (Command::Pause(Args { target }) | Command::Resume(Args { target })) = command;
    let target = guests::find(Path::new("/"), target)?;
    let pid = target.pid()?;
    match command {
        Command::Pause(_) => {
            control::client::pause(&directories, pid)?;
            output::line!("the guest of process {pid} marks nothing any more, and can be saved and migrated")?;
        }
        Command::Resume(_) => {
            control::client::resume(&directories, pid)?;
            output::line!(
                "the guest of process {pid} has its device, and marks free pages as soon as its module is there"
            )?;
        }
    }
    Ok(())
}
