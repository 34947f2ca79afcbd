//! Connections: many at once, each with one request, and bounds on all of them.
//!
//! | of a connection | bound |
//! |---|---|
//! | the handshake of TLS, and the request | [`ASKING`] each |
//! | all of it, with the answer | [`WHOLE`] |
//! | bytes of a request | [`MOST_BYTES`] |
//!
//! There are [`MOST`] at once. One more takes the place of the oldest that has not asked yet: who
//! asks at once, as a scraper does, is answered though others hold all places and say nothing.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use output::Socket;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::answer::{Caller, Names, Shared, answer};
use crate::figures::Figures;
use crate::users::Checks;
use crate::web::Watched;

/// Connections at once: each has a descriptor, and with TLS some 50 KiB.
const MOST: usize = 256;
/// Bytes of a request at most: the least that hyper takes.
const MOST_BYTES: usize = 8 << 10;
/// Header fields of a request at most.
const MOST_FIELDS: usize = 64;
/// Time for the handshake of TLS, and for a request.
const ASKING: Duration = Duration::from_secs(5);
/// Time for all of a connection: a stopped daemon is waited for ten seconds.
const WHOLE: Duration = Duration::from_secs(30);
/// Pause after a connection could not be accepted, as without descriptors.
const RETRY: Duration = Duration::from_millis(50);
/// Threads that ask the daemon or check a password.
const WORKERS: usize = 2;

/// A connection's bytes.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Where scrapers connect.
#[derive(Debug)]
pub enum Listener {
    /// An address.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(Socket),
}

/// A connection.
#[derive(Debug)]
struct Guest {
    has_asked: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Answers for ever.
///
/// # Errors
///
/// When nothing can be waited for: no descriptors at the start.
pub fn serve(listener: Listener, web: Option<Watched>, names: Names, figures: Figures) -> io::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(WORKERS).build()?;
    let shared = Arc::new(Shared { figures, checks: Checks::new()?, names });
    runtime.block_on(async {
        match &listener {
            Listener::Tcp(tcp) => {
                tcp.set_nonblocking(true)?;
                let tcp = tokio::net::TcpListener::from_std(tcp.try_clone()?)?;
                accept(async || tcp.accept().await.map(|(stream, _)| Box::new(stream) as _), web, shared).await
            }
            Listener::Unix(socket) => {
                let unix = UnixListener::from(socket.as_fd().try_clone_to_owned()?);
                unix.set_nonblocking(true)?;
                let unix = tokio::net::UnixListener::from_std(unix)?;
                accept(async || unix.accept().await.map(|(stream, _)| Box::new(stream) as _), web, shared).await
            }
        }
    })
}

async fn accept(
    next: impl AsyncFn() -> io::Result<Box<dyn Stream>>,
    mut web: Option<Watched>,
    shared: Arc<Shared>,
) -> io::Result<()> {
    let mut guests = VecDeque::new();
    loop {
        let Ok(stream) = next().await else {
            // Those that are here go on, and give their descriptors back.
            sleep(RETRY).await;
            continue;
        };
        make_room(&mut guests);
        let web = web.as_mut().map(Watched::now);
        let caller = Caller { web, has_asked: Arc::default(), has_certificate: false };
        let has_asked = caller.has_asked.clone();
        let task = tokio::spawn(timeout(WHOLE, connection(stream, caller, shared.clone())));
        guests.push_back(Guest { has_asked, task: task.abort_handle() });
    }
}

/// Forgets connections that have ended, and ends one if there are too many.
fn make_room(guests: &mut VecDeque<Guest>) {
    guests.retain(|guest| !guest.task.is_finished());
    if guests.len() >= MOST {
        let silent = guests.iter().position(|guest| !guest.has_asked.load(Ordering::Relaxed));
        if let Some(guest) = guests.remove(silent.unwrap_or(0)) {
            guest.task.abort();
        }
    }
}

async fn connection(stream: Box<dyn Stream>, mut caller: Caller, shared: Arc<Shared>) {
    let Some(tls) = caller.web.as_ref().and_then(|web| web.tls.clone()) else {
        return http(stream, caller, shared).await;
    };
    let Ok(Ok(stream)) = timeout(ASKING, TlsAcceptor::from(tls).accept(stream)).await else { return };
    // The handshake ends with one that is not good.
    caller.has_certificate = stream.get_ref().1.peer_certificates().is_some();
    http(stream, caller, shared).await;
}

/// One request. Who goes away, or is too slow, misses a sample, which a scraper knows.
async fn http(stream: impl Stream, caller: Caller, shared: Arc<Shared>) {
    let caller = Arc::new(caller);
    let service = service_fn(move |request| answer(request, caller.clone(), shared.clone()));
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(MOST_BYTES).max_headers(MOST_FIELDS);
    // An answer is sent from where it is, not from a copy for each connection.
    http.timer(TokioTimer::new()).header_read_timeout(ASKING).writev(true);
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

#[cfg(test)]
mod tests;
