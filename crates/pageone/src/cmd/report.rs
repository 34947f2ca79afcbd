//! `pageone report`: a recording as one page, as tables, as JSON.

use std::io::BufWriter;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use monitor::report::{self, export};
use output::OutputFile;

use crate::cmd::{Force, replay, top};

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
    #[command(flatten)]
    force: Force,
}

/// Writes what is asked for.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        args.output.is_some() || args.csv.is_some() || args.json.is_some(),
        "say what to write: -o report.html, --csv DIR or --json FILE"
    );
    let existing = args.force.existing();
    let mut recording = replay::open(&args.file)?;
    if let Some(path) = &args.output {
        let page = report::html(&mut recording, &top::name_of(&args.file))?;
        output::file::write(path, existing, page.as_bytes())?;
    }
    if let Some(directory) = &args.csv {
        let cannot = || format!("cannot write to {}", directory.display());
        std::fs::create_dir_all(directory).with_context(cannot)?;
        let files = export::names().map(|name| OutputFile::create(&directory.join(name), existing).map(BufWriter::new));
        let mut files = files.into_iter().collect::<Result<Vec<_>, _>>()?;
        export::csv(&mut recording, &mut files).with_context(cannot)?;
        for file in files {
            file.into_inner().map_err(|error| error.into_error()).with_context(cannot)?.keep()?;
        }
    }
    if let Some(path) = &args.json {
        let cannot = || format!("cannot write {}", path.display());
        let mut out = BufWriter::new(OutputFile::create(path, existing)?);
        export::json(&mut recording, &mut out).with_context(cannot)?;
        out.into_inner().map_err(|error| error.into_error()).with_context(cannot)?.keep()?;
    }
    Ok(())
}
