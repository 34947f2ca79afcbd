//! `pageone metrics`: the status for Prometheus, once or to whoever asks.
//!
//! A program of its own, and not a thread of the daemon: the daemon is root's and listens to no
//! network. It asks the daemon at each scrape, so that nothing is kept and nothing is old.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

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
        let listener = bind(path)?;
        output::note!("metrics at {}", path.display());
        return http::serve(|| listener.accept().map(|(stream, _)| stream), &ask);
    }
    output::put!("{}", ask()?)?;
    Ok(())
}

/// A socket that only this user may open. One that nobody listens to any more is replaced.
fn bind(path: &Path) -> Result<UnixListener> {
    if let Err(error) = std::os::unix::net::UnixStream::connect(path) {
        // To connect to a file or a directory is refused, too, and these stay.
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
        if error.kind() == std::io::ErrorKind::ConnectionRefused && is_socket {
            std::fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
        }
    } else {
        bail!("somebody listens on {} already; name another path with --socket, or end that program", path.display());
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_to_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, file) = (dir.path().join("socket"), dir.path().join("file"));
        let error = |path: &Path| format!("{:#}", bind(path).unwrap_err());
        let listener = bind(&socket).unwrap();
        assert!(error(&socket).starts_with("somebody listens on "), "{}", error(&socket));
        drop(listener);
        assert_eq!(bind(&socket).unwrap().local_addr().unwrap().as_pathname(), Some(&*socket));
        std::fs::write(&file, "kept").unwrap();
        assert!(error(&file).starts_with("cannot listen on "), "{}", error(&file));
        assert!(error(dir.path()).starts_with("cannot listen on "), "{}", error(dir.path()));
        assert_eq!(std::fs::read(&file).unwrap(), b"kept");
    }
}
