//! `pageone report`: a recording as one page, as tables, as JSON.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use monitor::report::{self, export};
use output::OutputFile;

use crate::cmd::{Force, replay, top};
use crate::{Code, Coded};

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
        Coded(Code::Usage, "say what to write: -o report.html, --csv DIR or --json FILE".into())
    );
    let create = |path: &Path| OutputFile::create(path, args.force.existing());
    let mut recording = replay::open(&args.file)?;
    // All of them are begun before one is written, and written before one has its name: one that
    // is refused leaves none of the others, in whose way the next try would be.
    let mut page = args.output.as_deref().map(create).transpose()?;
    let mut tables = args.csv.as_deref().map_or(Ok(Vec::new()), |directory| {
        output::directory::make(directory, 0o777).with_context(|| cannot(directory))?;
        let files = export::names().map(|name| create(&directory.join(name)));
        files.into_iter().collect::<Result<Vec<_>, _>>().map_err(anyhow::Error::from)
    })?;
    let mut json = args.json.as_deref().map(create).transpose()?;
    if let (Some(path), Some(out)) = (&args.output, &mut page) {
        let text = report::html(&mut recording, &top::name_of(&args.file))?;
        out.write_all(text.as_bytes()).with_context(|| cannot(path))?;
    }
    if let Some(directory) = &args.csv {
        let mut out: Vec<_> = tables.iter_mut().map(BufWriter::new).collect();
        export::csv(&mut recording, &mut out).with_context(|| cannot(directory))?;
        out.iter_mut().try_for_each(Write::flush).with_context(|| cannot(directory))?;
    }
    if let (Some(path), Some(out)) = (&args.json, &mut json) {
        let mut out = BufWriter::new(out);
        export::json(&mut recording, &mut out).with_context(|| cannot(path))?;
        out.flush().with_context(|| cannot(path))?;
    }
    page.into_iter().chain(tables).chain(json).try_for_each(|file| Ok(file.keep()?))
}

fn cannot(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

#[cfg(test)]
mod tests;
