//! `pageone daemon`: runs the engine in the foreground.

pub(crate) mod settings;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use engine::{Engine, StartError};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{Code, Coded, paths};

/// Options of `pageone daemon`.
#[derive(clap::Args)]
#[command(after_help = "An option goes before the key of the same name in the configuration file.")]
pub(crate) struct Args {
    /// Configuration file [default: /etc/pageone.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: settings::Options,
    /// Log as JSON, one object a line
    #[arg(long)]
    log_json: bool,
}

/// Runs until SIGTERM or SIGINT.
pub(crate) fn run(args: Args, dir: Option<PathBuf>) -> Result<()> {
    start_log(args.log_json);
    let mut config = settings::load(args.config.as_deref())?;
    args.settings.apply(&mut config)?;
    config.check().map_err(|e| Coded(Code::Configuration, e.to_string()))?;
    config.directory = dir.unwrap_or_else(paths::own_directory);
    paths::check_owner(&config.directory)?;
    raise_descriptor_limit();

    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).context("cannot catch signals")?;
    let (directory, period, threads) = (config.directory.clone(), config.merge_period, config.workers());
    let engine = match Engine::start(config) {
        Ok(engine) => Arc::new(engine),
        Err(e @ StartError::SecondDaemon(_)) => {
            return Err(Coded(Code::SecondDaemon, e.to_string()).into());
        }
        Err(e) => return Err(e.into()),
    };
    let socket = || directory.join(control::SOCKET).display().to_string();
    control::server::serve(engine.clone(), &directory).with_context(|| format!("cannot listen on {}", socket()))?;
    tracing::info!(directory = %directory.display(), merge_period = period, threads, "pageone daemon {} is ready", env!("CARGO_PKG_VERSION"));
    tell_service_manager();
    while !engine.ended() {
        if let Some(signal) = signals.pending().next() {
            tracing::info!(signal, "stopping; what is merged stays merged");
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    engine.stop();
    Ok(())
}

fn start_log(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PAGEONE_LOG_FILTER").unwrap_or_else(|_| "info".into());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A second subscriber can only come from a test.
    let _ = if json { log.json().try_init() } else { log.with_ansi(false).try_init() };
}

/// Each client takes three descriptors and each 64 MiB of store one.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!("cannot raise the limit of open files to {:?}: {e}", limit.maximum);
    }
}

/// `READY=1` for systemd's Type=notify (sd_notify(3)).
fn tell_service_manager() {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Ok(datagram) = std::os::unix::net::UnixDatagram::unbound()
    {
        let _ = datagram.send_to(b"READY=1", PathBuf::from(socket));
    }
}
