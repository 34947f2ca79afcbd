//! `pageone top`: the host and its guests, live.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use monitor::ui::{self, App, Theme};
use monitor::{sampler, view};

use crate::{Code, Coded, paths};

/// Options of `pageone top`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    every: f64,
    /// Print plain text instead of the screen: for logs, and terminals that cannot show it
    #[arg(long)]
    batch: bool,
    /// With --batch: end after this many looks [default: never]
    #[arg(long, value_name = "N", requires = "batch")]
    count: Option<u64>,
}

/// The time between two looks.
pub(crate) fn every(seconds: f64) -> Result<Duration> {
    if !(0.1..=3600.0).contains(&seconds) {
        bail!(Coded(Code::Usage, format!("--every {seconds}: between 0.1 and 3600 seconds")));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Shows the screen until its user quits.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let every = every(args.every)?;
    let directories = paths::candidates(dir);
    if args.batch {
        return batch(&directories, every, args.count);
    }
    Ok(ui::run(App::live(Theme::of_environment()), Some((directories, every)))?)
}

/// Prints a look at a time.
fn batch(directories: &[PathBuf], every: Duration, count: Option<u64>) -> Result<()> {
    let mut before = None;
    let mut looks = 0;
    while count.is_none_or(|count| looks < count) {
        if looks > 0 {
            std::thread::sleep(every);
            output::line!("")?;
        }
        let moment = sampler::moment(directories);
        output::put!("{}", view::text(&moment, before.as_ref()))?;
        before = Some(moment);
        looks += 1;
    }
    Ok(())
}

/// A file's name, for titles.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
