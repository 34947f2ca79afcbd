//! `pageone attach`: merges a program that runs already.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use attach::{AttachError, Attached, Request};
use control::client::Error::NoDaemon;
use control::{ClientState, Status};
use kmem::peer::may_be_asked;
use serde_json::json;
use snapshot::still::Still;

use crate::cmd::{Json, run};
use crate::paths;
use crate::{Code, Coded};

/// Pause between two looks at the daemon's clients.
const PAUSE: Duration = Duration::from_millis(10);

/// Options of `pageone attach`.
#[derive(clap::Args)]
#[command(
    after_help = "JSON: `pid`; `loaded`, whether this command has loaded the agent; `client`, whether the daemon has the \
    process as a client, null with --socket."
)]
pub(crate) struct Args {
    /// Process or guest to merge: the memory that it has marked as mergeable, as QEMU does with
    /// guest RAM
    #[arg(value_name = "PID|NAME|UUID")]
    target: String,
    /// The daemon's socket for agents, as the process sees it [default: that of the daemon that
    /// runs]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Seconds to wait until the process waits for events, and then for each call in it
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    #[command(flatten)]
    json: Json,
}

/// Loads the agent into a process.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let library = paths::agent_library()?;
    let candidates = paths::candidates(dir.clone());
    let socket = match &args.socket {
        Some(socket) => std::path::absolute(socket)?,
        None => {
            // Whether it is believed is for the agent in the process to say.
            let running = run::running(&candidates, may_be_asked).ok_or_else(|| NoDaemon(candidates.clone()))?;
            std::path::absolute(running.join(engine::AGENT_SOCKET))?
        }
    };
    let target = guests::find(Path::new("/"), &args.target)?;
    let (pid, timeout) = (target.pid()?, Duration::from_secs(args.timeout));
    // Not asked of the process, which may never come to where it can be.
    if args.socket.is_none() && has(&control::client::status(&candidates)?, pid) {
        let value = json!({ "pid": pid, "loaded": false, "client": true });
        return args.json.line(&value, || format!("process {pid} is a client already"));
    }
    let guard = &paths::guard(dir.as_deref())?;
    let request = Request { pid, library: &library, socket: &socket, timeout, guard, stands: false };
    let attached = attach(&request)?;
    let client = match (&attached, &args.socket) {
        (Attached::Now(_), None) => Some(becomes_client(&candidates, pid, timeout)?),
        (Attached::Already, None) => Some(false),
        (_, Some(_)) => None,
    };
    let value = json!({ "pid": pid, "loaded": attached != Attached::Already, "client": client });
    args.json.line(&value, || match attached {
        Attached::Now(_) if client == Some(false) => format!(
            "process {pid} has the agent, which connects when all threads have been seen at work, and a clone's memory is \
             loaded: see `pageone status`"
        ),
        Attached::Now(regions) => format!("process {pid} is attached: {regions}"),
        Attached::Already => format!("process {pid} was attached already"),
    })
}

/// Attaches. A guest whose RAM has to be replaced is stopped meanwhile.
fn attach(request: &Request<'_>) -> Result<Attached> {
    let refused = match attach::attach(request) {
        Err(refused @ AttachError::MustStand { .. }) => refused,
        done => return done.map_err(coded),
    };
    let still = Still::begin(request.pid, request.guard).map_err(|why| anyhow!("{refused}, and not now: {why}"))?;
    let attached = attach::attach(&Request { stands: true, ..*request }).map_err(coded);
    let gone_on = still.go_on();
    attached.and_then(|attached| Ok(gone_on.map(|()| attached)?))
}

/// Whether the daemon has it as a client. After a detach it may still show the client that it was.
fn has(status: &Status, pid: i32) -> bool {
    status.clients().any(|client| client.pid == pid && client.state == ClientState::Merging)
}

/// Waits until the daemon has it as a client. Its agent connects when no thread can be in a call
/// that passed it by.
fn becomes_client(candidates: &[PathBuf], pid: i32, timeout: Duration) -> Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        let status = control::client::status(candidates)?;
        if has(&status, pid) {
            return Ok(true);
        }
        if let Some(refused) = status.refused.iter().find(|refused| refused.pid == pid) {
            bail!("process {pid} has the agent, and the daemon refuses it: {}", refused.reason);
        }
        if Instant::now() >= end {
            return Ok(false);
        }
        sleep(PAUSE);
    }
}

/// The error with the exit code that fits.
fn coded(error: AttachError) -> anyhow::Error {
    let code = match error {
        AttachError::NoPermission { .. } | AttachError::NotHere => Code::HostLacks,
        AttachError::NoProcess(_) => Code::NoClient,
        _ => return error.into(),
    };
    Coded(code, error.to_string()).into()
}
