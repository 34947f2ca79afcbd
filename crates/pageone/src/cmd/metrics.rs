//! `pageone metrics`: the status for Prometheus, once or to whoever asks.
//!
//! A program of its own, and not a thread of the daemon: the daemon is root's and listens to no
//! network. It asks the daemon at each scrape, so that nothing is kept and nothing is old.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use output::Socket;

use crate::paths;

mod http;

/// Options of `pageone metrics`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Answer at http://ADDRESS/metrics until a signal comes; an address of this host's loopback,
    /// since every guest's name is told
    #[arg(long, value_name = "ADDRESS", conflicts_with = "socket")]
    listen: Option<SocketAddr>,
    /// The same at a Unix socket, which only this user may open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Prints the metrics, or serves them.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let directories = paths::candidates(dir);
    let ask = move || {
        let status = control::client::status(&directories)?;
        Ok(control::openmetrics(&status, env!("CARGO_PKG_VERSION")))
    };
    if let Some(address) = args.listen {
        ensure!(
            address.ip().is_loopback(),
            "{address} is not of the loopback: the metrics name every guest; let Prometheus' agent on this host, or a \
             proxy that asks for a password, fetch them from 127.0.0.1"
        );
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        output::note!("metrics at http://{}/metrics", listener.local_addr()?);
        return http::serve(|| listener.accept().map(|(stream, _)| stream), &ask);
    }
    if let Some(path) = &args.socket {
        let socket = Socket::listen(path)?;
        output::note!("metrics at {}", path.display());
        return http::serve(|| socket.accept(), &ask);
    }
    output::put!("{}", ask()?)?;
    Ok(())
}
