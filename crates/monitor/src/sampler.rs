//! Asks the daemon, again and again.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use control::{ClientMap, client};

use crate::clock;
use crate::moment::{Depth, Moment, coarsen};

/// Time between two looks at a client's memory, while somebody looks at it.
const MAP_EVERY: Duration = Duration::from_secs(5);
/// Cells of a client's map in a recording.
const RECORDED_CELLS: usize = 256;
/// Clients whose maps are recorded at most, the largest.
const RECORDED_MAPS: usize = 64;

/// The daemon's status now, or why it cannot be had.
pub fn moment(directories: &[PathBuf]) -> Moment {
    let answer = client::status(directories);
    let time = clock::now();
    match answer {
        Ok(status) => Moment { time, status: Some(status), away: None },
        Err(error) => Moment { time, status: None, away: Some(sentence(&error)) },
    }
}

/// Who shares with whom, and maps of the largest clients of this moment.
///
/// # Errors
///
/// When no daemon answers, or one that does not know the question.
pub fn depth(directories: &[PathBuf], moment: &Moment) -> Result<Depth, client::Error> {
    let sharing = client::sharing(directories)?;
    let mut clients: Vec<_> = moment.status.iter().flat_map(|status| status.clients()).collect();
    clients.sort_by_key(|client| std::cmp::Reverse(client.metrics.region_bytes));
    // A client may have ended in between.
    let maps = clients.iter().take(RECORDED_MAPS).filter_map(|client| {
        let map = client::map(directories, client.pid).ok()?;
        Some((client.pid, coarsen(map, RECORDED_CELLS)))
    });
    let maps = maps.collect();
    Ok(Depth { time: clock::now(), sharing, maps })
}

/// An error with its causes in one line.
fn sentence(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// What a sampler finds.
pub enum Found {
    /// A moment.
    Moment(Box<Moment>),
    /// A client's memory, or why it cannot be told.
    Map(i32, Result<ClientMap, String>),
}

/// Asks every `every` until nobody listens. `wanted`: the client whose memory somebody looks at.
pub fn run(
    directories: &[PathBuf],
    every: Duration,
    wanted: &Receiver<Option<i32>>,
    found: &mut dyn FnMut(Found) -> bool,
) {
    let mut next = Instant::now();
    let mut client: Option<(i32, Instant)> = None;
    loop {
        let now = Instant::now();
        if now >= next {
            if !found(Found::Moment(Box::new(moment(directories)))) {
                return;
            }
            // Moments that a suspended program missed are not made up for.
            next = (next + every).max(Instant::now());
        }
        if let Some((pid, due)) = client.filter(|(_, due)| now >= *due) {
            let map = client::map(directories, pid).map_err(|error| sentence(&error));
            client = Some((pid, due.max(Instant::now()) + MAP_EVERY));
            if !found(Found::Map(pid, map)) {
                return;
            }
        }
        let until = client.map_or(next, |(_, due)| due.min(next));
        match wanted.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(pid) => client = pid.map(|pid| (pid, Instant::now())),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
