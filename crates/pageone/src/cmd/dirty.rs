//! `pageone dirty`: which pages clients write, how fast, and whether a pre-copy migration would
//! converge.
//!
//! The daemon scans a client when it is asked (`engine::report::rates`). So this program asks at
//! least once a second, and prints a report after each interval.

mod migration;
mod text;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail};
use control::DirtyStatus;
use guests::Found;
use serde::Serialize;

use crate::cmd::Json;
use crate::paths;

use migration::{Link, Migration};

/// Options of `pageone dirty`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Clients to report [default: all]
    #[arg(value_name = "PID|NAME|UUID")]
    targets: Vec<String>,
    /// Seconds between two reports; in JSON each is a line
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    interval: f64,
    /// End after this many reports [default: never]
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    json: Json,
    /// Say whether a pre-copy migration over a link of this many MiB a second would converge
    #[arg(long, value_name = "MIB_S")]
    bandwidth: Option<f64>,
    /// Longest downtime at the end of that migration, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300.0)]
    downtime: f64,
}

/// One report.
#[derive(Serialize)]
struct Report {
    /// Time of the report, seconds since 1970.
    time: f64,
    clients: Vec<Client>,
}

/// One client of a report.
#[derive(Serialize)]
struct Client {
    #[serde(flatten)]
    status: DirtyStatus,
    /// MB (of 1,000,000 bytes) a second.
    mb_per_second: f64,
    /// How a migration would go; needs `--bandwidth`, and a client watched for a second.
    migration: Option<Migration>,
}

/// Prints reports until the program is stopped.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let sensible = |value: f64, most: f64| value.is_finite() && value > 0.0 && value <= most;
    if !sensible(args.interval, 86_400.0) || args.interval < 0.1 {
        bail!("--interval {}: between 0.1 and 86400 seconds", args.interval);
    }
    if !args.bandwidth.is_none_or(|b| sensible(b, 1e9)) || !sensible(args.downtime, 1e9) {
        bail!("--bandwidth and --downtime must be more than 0");
    }
    let link = args.bandwidth.map(|bandwidth| Link::new(bandwidth, args.downtime));
    let directories = paths::candidates(dir);
    let find = |target: &String| guests::find(Path::new("/"), target);
    let targets = args.targets.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let ask = || -> Result<Vec<DirtyStatus>> {
        let pids: Vec<i32> = targets.iter().map(Found::pid).collect::<Result<_, _>>()?;
        Ok(control::client::dirty(&directories, &pids)?)
    };
    // The daemon watches clients from the first request on.
    ask()?;
    let mut next = Instant::now();
    let mut reports = 0;
    while args.count.is_none_or(|count| reports < count) {
        next += Duration::from_secs_f64(args.interval);
        let clients = watch_until(next, ask)?;
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let clients = clients.into_iter().map(|status| Client::new(status, link.as_ref())).collect();
        print(&Report { time, clients }, args)?;
        reports += 1;
    }
    Ok(())
}

/// Asks at least once a second until `end`; returns the last answer.
fn watch_until<T>(end: Instant, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        std::thread::sleep(left.min(Duration::from_secs(1)));
        let answer = ask()?;
        if Instant::now() >= end {
            return Ok(answer);
        }
    }
}

impl Client {
    fn new(status: DirtyStatus, link: Option<&Link>) -> Self {
        let mb_per_second = status.pages_per_second * kmem::PAGE_SIZE as f64 / 1e6;
        let migration = link.and_then(|link| migration::predict(&status, link));
        Self { status, mb_per_second, migration }
    }
}

fn print(report: &Report, args: &Args) -> Result<()> {
    // Cursor to the top left, and clear the screen.
    if !args.json.is_asked() && std::io::stdout().is_terminal() {
        output::stdout::control("\x1b[H\x1b[2J")?;
    }
    args.json.line(report, || text::report(report).trim_end().into())
}
