//! `pageone report`: a recording as one page, as tables, as JSON.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use monitor::report::{self, export};

use crate::cmd::{replay, top};

/// Options of `pageone report`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write one page of HTML, with its plots in it
    #[arg(short, long, value_name = "HTML")]
    output: Option<PathBuf>,
    /// Write host.csv, governor.csv, domains.csv and guests.csv into this directory
    #[arg(long, value_name = "DIR")]
    csv: Option<PathBuf>,
    /// Write every moment as one JSON object
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Writes what is asked for.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        args.output.is_some() || args.csv.is_some() || args.json.is_some(),
        "say what to write: -o report.html, --csv DIR or --json FILE"
    );
    let mut recording = replay::open(&args.file)?;
    if let Some(path) = &args.output {
        let page = report::html(&mut recording, &top::name_of(&args.file))?;
        std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(directory) = &args.csv {
        export::csv(&mut recording, directory).with_context(|| format!("cannot write to {}", directory.display()))?;
    }
    if let Some(path) = &args.json {
        let cannot = || format!("cannot write {}", path.display());
        let mut out = BufWriter::new(std::fs::File::create(path).with_context(cannot)?);
        export::json(&mut recording, &mut out).with_context(cannot)?;
        out.flush().with_context(cannot)?;
    }
    Ok(())
}
