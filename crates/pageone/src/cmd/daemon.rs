//! `pageone daemon`: runs the engine in the foreground.

pub(crate) mod file;
pub(crate) mod settings;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use engine::{Changes, Config, Engine, StartError};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::{Code, Coded, paths, service};

/// Options of `pageone daemon`.
#[derive(clap::Args)]
#[command(after_help = "An option goes before the key of the same name in the configuration file.")]
pub(crate) struct Args {
    /// Configuration file [default: /etc/pageone/pageone.toml, if it is there]
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
    start_log(&args);
    let mut config = args.read(Some(file::PATIENCE))?;
    config.directory = dir.unwrap_or_else(paths::own_directory);
    paths::check_owner(&config.directory, "--dir")?;
    raise_descriptor_limit();

    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot catch signals")?;
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
    service::notify("READY=1");
    'running: while !engine.ended() {
        for signal in signals.pending() {
            if signal != SIGHUP {
                tracing::info!(signal, "stopping; what is merged stays merged");
                break 'running;
            }
            reload(&args, &engine);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    service::notify("STOPPING=1");
    engine.stop();
    Ok(())
}

impl Args {
    /// The file's settings with the command line's in their place, checked.
    fn read(&self, patience: Option<Duration>) -> Result<Config> {
        let mut config = file::load(self.config.as_deref(), patience)?;
        self.settings.apply(&mut config)?;
        config.check().map_err(|e| Coded(Code::Configuration, e.to_string()))?;
        Ok(config)
    }
}

/// Reads the configuration again. A file with a problem changes nothing.
fn reload(args: &Args, engine: &Engine) {
    service::notify_reloading();
    match args.read(None) {
        Ok(config) => {
            let Changes { at_once, new_clients, restart } = engine.reconfigure(config);
            let total = at_once.len() + new_clients.len() + restart.len();
            tracing::info!("the configuration was read again; {total} settings differ");
            for (keys, when) in [
                (at_once, "in effect"),
                (new_clients, "in effect for clients that come from now on"),
                (restart, "in effect when the daemon is started again, which changes nothing for clients"),
            ] {
                if !keys.is_empty() {
                    tracing::info!("{}: {when}", keys.join(", "));
                }
            }
        }
        Err(e) => tracing::error!("the configuration was not changed: {e:#}"),
    }
    service::notify("READY=1");
}

fn start_log(args: &Args) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PAGEONE_LOG_FILTER").unwrap_or_else(|_| "info".into());
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(service::Log).with_target(false);
    // A second subscriber can only come from a test. The journal has a time of its own.
    let _ = match (args.log_json, service::logs_to_journal()) {
        (true, _) => log.json().try_init(),
        (false, false) => log.try_init(),
        (false, true) => log.without_time().with_level(false).with_writer(service::Journal).try_init(),
    };
}

/// Each client takes three descriptors and each 64 MiB of store one.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!("cannot raise the limit of open files to {:?}: {e}", limit.maximum);
    }
}
