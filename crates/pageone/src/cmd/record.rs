//! `pageone record`: what `pageone top` shows, into a file.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use monitor::recording::Writer;
use monitor::sampler;

use crate::cmd::{Force, top};
use crate::{Code, Coded, paths};

/// Time between two looks at who shares with whom.
const DEPTH_EVERY: Duration = Duration::from_secs(60);
/// The first of them: nothing is shared at once.
const FIRST_DEPTH: Duration = Duration::from_secs(5);

/// Options of `pageone record`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Seconds between two moments
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    every: f64,
    /// End after this many seconds [default: at a signal]
    #[arg(long = "for", value_name = "S")]
    duration: Option<f64>,
}

/// Records until a signal comes, or the time is over.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let every = top::every(args.every)?;
    if args.duration.is_some_and(|seconds| !(seconds.is_finite() && seconds > 0.0)) {
        bail!(Coded(Code::Usage, "--for must be more than 0 seconds".into()));
    }
    let directories = paths::candidates(dir);
    // A recording is begun for a daemon that is there; later it may come and go.
    control::client::status(&directories)?;
    let cannot = || format!("cannot write {}", args.output.display());
    let file = output::file::begin(&args.output, args.force.existing())?;
    let mut writer = Writer::new(file).with_context(cannot)?;
    let (ended, end) = channel();
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])?;
    std::thread::spawn(move || {
        signals.forever().next();
        let _ = ended.send(());
    });
    let start = Instant::now();
    let last = args.duration.and_then(|seconds| start.checked_add(Duration::try_from_secs_f64(seconds).ok()?));
    let (mut next, mut depth_due) = (start, start + FIRST_DEPTH);
    let mut moments = 0u64;
    loop {
        let moment = sampler::moment(&directories);
        writer.append(&moment).with_context(cannot)?;
        moments += 1;
        if Instant::now() >= depth_due && moment.status.is_some() {
            // A daemon of another build may not know the question: the rest is recorded.
            if let Ok(depth) = sampler::depth(&directories, &moment) {
                writer.append_depth(&depth).with_context(cannot)?;
            }
            depth_due = Instant::now() + DEPTH_EVERY;
        }
        next = (next + every).max(Instant::now());
        let until = last.map_or(next, |last| next.min(last));
        let signal = end.recv_timeout(until.saturating_duration_since(Instant::now()));
        if signal != Err(RecvTimeoutError::Timeout) || last.is_some_and(|last| Instant::now() >= last) {
            break;
        }
    }
    // The last look is what the report shows of who shares with whom.
    if let Ok(depth) = sampler::depth(&directories, &sampler::moment(&directories)) {
        writer.append_depth(&depth).with_context(cannot)?;
    }
    output::note!("{moments} moments, {} KiB in {}", writer.bytes.div_ceil(1024), args.output.display());
    Ok(())
}
