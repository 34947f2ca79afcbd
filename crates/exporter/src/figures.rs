//! What scrapers are told, made once for all that come within [`FRESH`].
//!
//! The daemon is asked by one thread at a time, however many scrape, and a text is made once for
//! each format. A failure is kept as long as an answer: while a daemon is silent nobody waits
//! twice.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{Format, Rows, Status};
use hyper::body::Bytes;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// How long an answer counts as new. Scrapers ask every few seconds.
const FRESH: Duration = Duration::from_secs(1);

/// Asks the daemon for its status, or says why there is none.
pub type Ask = dyn Fn() -> Result<Status, String> + Send + Sync;

/// The daemon's status for all who scrape.
pub struct Figures {
    ask: Arc<Ask>,
    /// The program's version.
    pub(crate) version: &'static str,
    last: Arc<Mutex<Option<Last>>>,
}

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Figures").field("version", &self.version).finish_non_exhaustive()
    }
}

struct Last {
    at: Instant,
    status: Result<Status, String>,
    texts: HashMap<(Rows, Format), Bytes>,
}

impl Figures {
    /// `version`: of the program. `ask` may take its time.
    pub fn new(version: &'static str, ask: Arc<Ask>) -> Self {
        Self { ask, version, last: Arc::default() }
    }

    /// The text, or why there is none.
    pub(crate) async fn text(&self, rows: Rows, format: Format) -> Result<Bytes, String> {
        let (ask, version) = (self.ask.clone(), self.version);
        let mut last = self.last.clone().lock_owned().await;
        // The lock goes with the thread: it ends its work though the scraper goes away.
        let work = spawn_blocking(move || {
            let fresh = last.take().filter(|last| last.at.elapsed() < FRESH);
            // The time is taken when the daemon has answered.
            let new = || Last { status: ask(), at: Instant::now(), texts: HashMap::new() };
            let Last { status, texts, .. } = last.insert(fresh.unwrap_or_else(new));
            let status = status.as_ref().map_err(Clone::clone)?;
            let text = texts.entry((rows, format));
            Ok(text.or_insert_with(|| control::exposition(status, version, rows, format).into()).clone())
        });
        work.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

#[cfg(test)]
mod tests;
