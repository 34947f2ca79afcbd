//! `pageone replay`: `pageone top` on a recording.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use control::units::counted;
use monitor::ui::{self, App, Theme};
use monitor::{Recording, clock, view};

use crate::cmd::top;

/// Options of `pageone replay`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The time to begin at: 14:05, 2026-11-24 14:05:10, +10m after the first moment, -5m before
    /// the last [default: the first moment]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    at: Option<String>,
    /// Print that moment as plain text
    #[arg(long)]
    batch: bool,
}

/// Opens a recording, and says what is wrong with it.
pub(crate) fn open(path: &Path) -> Result<Recording> {
    let file = claims::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let recording = Recording::open(file).with_context(|| path.display().to_string())?;
    for damage in &recording.damage {
        output::note!(
            "{}: {} at {} cannot be read, nor {} behind; the rest is shown",
            path.display(),
            counted(damage.bytes as usize, "byte"),
            damage.offset,
            counted(damage.moments, "moment")
        );
    }
    Ok(recording)
}

/// Shows a recording until its user quits.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut recording = open(&args.file)?;
    let (first, last) = (recording.time(0).unwrap_or(0), recording.time(recording.len() - 1).unwrap_or(0));
    let at = match &args.at {
        Some(text) => {
            let from = if text.trim_start().starts_with('-') { last } else { first };
            clock::parse(text, first, last, from).map_err(|why| anyhow!("--at: {why}"))?
        }
        None => first,
    };
    if args.batch {
        let at = recording.find(at);
        let before = at.checked_sub(1).map(|before| recording.moment(before)).transpose()?;
        output::put!("{}", view::text(&recording.moment(at)?, before.as_ref()))?;
        return Ok(());
    }
    Ok(ui::run(App::replay(recording, top::name_of(&args.file), at, Theme::of_environment()), None)?)
}
