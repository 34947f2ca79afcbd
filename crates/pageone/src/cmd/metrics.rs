//! `pageone metrics`: the status for Prometheus, once or to whoever asks.
//!
//! A program of its own, and not a thread of the daemon: the daemon is root's and listens to no
//! network. It asks the daemon when it is scraped, so that nothing is old.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use control::{Format, Rows};
use exporter::{Figures, Listener, Names, Watched};
use output::Socket;

use crate::paths;

/// The program's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of `pageone metrics`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Answer at http://ADDRESS/metrics until a signal comes: the host's figures, and those of
    /// clients and domains for who gives a password or a certificate
    #[arg(long, value_name = "ADDRESS", conflicts_with = "socket")]
    listen: Option<SocketAddr>,
    /// TLS and passwords for ADDRESS, in the format of Prometheus' exporters; with passwords or
    /// certificates of clients ADDRESS need not be of the loopback
    #[arg(long = "web.config.file", value_name = "FILE", requires = "listen")]
    web_config: Option<PathBuf>,
    /// Show names of clients and domains to whoever reaches ADDRESS: every account of the host, and
    /// guests with user networking
    #[arg(long, requires = "listen")]
    names: bool,
    /// All at a Unix socket, which only this user may open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Prints the metrics, or serves them.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let directories = paths::candidates(dir);
    if args.listen.is_none() && args.socket.is_none() {
        let status = control::client::status(&directories)?;
        output::put!("{}", control::exposition(&status, VERSION, Rows::All, Format::OpenMetrics))?;
        return Ok(());
    }
    let ask = move || control::client::status(&directories).map_err(|error| format!("{:#}", anyhow::Error::new(error)));
    let figures = Figures::new(VERSION, Arc::new(ask));
    if let Some(path) = &args.socket {
        let socket = Socket::listen(path)?;
        output::note!("metrics at {}", path.display());
        return Ok(exporter::serve(Listener::Unix(socket), None, Names::ForAll, figures)?);
    }
    let Some(address) = args.listen else { return Ok(()) };
    let web = args.web_config.clone().map(Watched::new).transpose()?;
    let asks_who = web.as_ref().is_some_and(Watched::asks_who);
    let scheme = web.as_ref().map_or("http", Watched::scheme);
    ensure!(
        address.ip().is_loopback() || asks_who,
        "{address} is not of the loopback, and nobody is asked for a password: name a file with basic_auth_users, or \
         with certificates of clients, with --web.config.file, or listen on 127.0.0.1"
    );
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    output::note!("metrics at {scheme}://{}/metrics", listener.local_addr()?);
    for path in web.iter().flat_map(Watched::readable) {
        output::note!("every account can read the secrets in {}: chmod o-r it", path.display());
    }
    if !address.ip().is_loopback() && scheme == "http" {
        output::note!("passwords cross the network in the clear: give tls_server_config, too");
    }
    let names = match (args.names, asks_who) {
        (true, _) => Names::ForAll,
        (false, true) => Names::ForKnown,
        (false, false) => {
            output::note!(
                "figures of clients and domains are left out, since nobody is asked for a password: --web.config.file \
                 with basic_auth_users gives them to scrapers, --names to every account of this host"
            );
            Names::ForKnown
        }
    };
    Ok(exporter::serve(Listener::Tcp(listener), web, names, figures)?)
}
