//! Dirty rates: how many pages clients write, and where, while somebody asks.
//!
//! Every scan of a client's memory, for merging or for this, finds the pages written since the
//! last; while a client is watched its regions keep for each page when it was last found so. A
//! watched client is scanned whenever somebody asks ([`Engine::dirty`]): who wants to tell a second
//! from the next asks each second. Such a scan makes no page older: pages that it finds are
//! kept for the next merge period's, so that watching does not change what is merged. It costs what
//! any scan costs, and its protecting makes the client's next write to each of those pages a
//! microsecond slower.
//!
//! A page found by a scan was written at some time since the scan before. A scan belongs to a
//! window if the middle of that time does.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wire::PageNo;

use crate::client::{Client, State};
use crate::daemon::service::Engine;

/// Windows of which distinct pages are counted, in tenths of a second.
const WINDOWS: [u16; 9] = [2, 5, 10, 20, 50, 100, 200, 300, 600];
/// The window of the heat map.
const HEAT: u16 = 100;
/// Parts of a heat map, and the pages of the smallest one.
const PARTS: u32 = 1024;
const PART_PAGES: u32 = 512;
/// How long after the last question a client is watched.
const PATIENCE: Duration = Duration::from_secs(10);
/// Several who ask at once share a scan.
const SHARED: Duration = Duration::from_millis(50);
/// When stamps are counted back, and by how much. What is older than the longest window is as good
/// as never.
const REBASE_AT: u16 = 60_000;
const REBASE_BY: u16 = 50_000;

/// When each page of a region was last found written: in tenths of a second, 0 for never.
pub(crate) struct Stamps {
    pages: Box<[u16]>,
    now: u16,
    found: u64,
}

impl Stamps {
    pub(crate) fn record(&mut self, page: PageNo) {
        if let Some(stamp) = self.pages.get_mut(page.index()) {
            *stamp = self.now;
            self.found += 1;
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.len() * 2
    }

    /// Pages by the age of their stamp; in the last place those that are older than all windows.
    fn ages(&self, histogram: &mut [u64; WINDOWS[WINDOWS.len() - 1] as usize + 1]) {
        let last = histogram.len() - 1;
        for &stamp in &self.pages {
            let age = if stamp == 0 { last } else { usize::from(self.now - stamp).min(last) };
            histogram[age] += 1;
        }
    }

    fn heat(&self, youngest: u16) -> (u32, Vec<u32>) {
        let part = (self.pages.len() as u32).div_ceil(PARTS).next_multiple_of(PART_PAGES).max(PART_PAGES);
        let hot = |stamp: &&u16| **stamp != 0 && self.now - **stamp <= youngest;
        (part, self.pages.chunks(part as usize).map(|pages| pages.iter().filter(hot).count() as u32).collect())
    }
}

/// That a client is watched.
pub(crate) struct Watch {
    /// The time that stamps count from, and when watching began.
    base: Instant,
    since: Instant,
    asked: Instant,
    scanned: Instant,
    /// Between the last two scans of a watch.
    interval: Duration,
    found: u64,
}

impl Watch {
    fn new(now: Instant) -> Self {
        Self { base: now, since: now, asked: now, scanned: now, interval: Duration::ZERO, found: 0 }
    }

    fn tick(&self, now: Instant) -> u16 {
        (now.duration_since(self.base).as_millis() / 100 + 1).min(u128::from(u16::MAX)) as u16
    }
}

/// A scan begins: what it finds is stamped with this time. Ends watching when nobody has asked for
/// long.
pub(crate) fn begin_scan(state: &mut State, now: Instant) {
    let Some(watch) = &mut state.watch else { return };
    if now.duration_since(watch.asked) > PATIENCE {
        state.watch = None;
        state.regions.values_mut().for_each(|region| region.stamps = None);
        return;
    }
    let back = watch.tick(now) > REBASE_AT;
    if back {
        watch.base += Duration::from_millis(100) * u32::from(REBASE_BY);
    }
    let tick = watch.tick(now);
    for stamps in state.regions.values_mut().filter_map(|region| region.stamps.as_mut()) {
        stamps.now = tick;
        if back {
            stamps.pages.iter_mut().for_each(|stamp| *stamp = stamp.saturating_sub(REBASE_BY));
        }
    }
}

/// Somebody asks: scans, if it is time and nothing is under way.
fn ask(client: &Client, state: &mut State) -> Result<(), rustix::io::Errno> {
    let now = Instant::now();
    let fresh = state.watch.is_none();
    let watch = state.watch.get_or_insert_with(|| Watch::new(now));
    watch.asked = now;
    let due = fresh || now.duration_since(watch.scanned) >= SHARED;
    if !due || !state.connected || state.detached || state.outstanding > 0 {
        return Ok(());
    }
    client.scan(state, false)?;
    let Some(watch) = &mut state.watch else { return Ok(()) };
    let tick = watch.tick(now);
    let mut counted = false;
    watch.found = 0;
    for region in state.regions.values_mut() {
        match &mut region.stamps {
            Some(stamps) => {
                counted = true;
                watch.found += std::mem::take(&mut stamps.found);
            }
            // What this scan has found was written before anybody watched.
            None => {
                let pages = vec![0; region.pages as usize].into();
                region.stamps = Some(Stamps { pages, now: tick, found: 0 });
            }
        }
    }
    if counted {
        watch.interval = now.duration_since(watch.scanned);
    } else {
        watch.since = now;
    }
    watch.scanned = now;
    Ok(())
}

/// What a client writes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DirtyStatus {
    /// Process.
    pub pid: i32,
    /// Program.
    pub name: String,
    /// Pages under management.
    pub pages: u64,
    /// For how long it has been watched, up to the last scan.
    pub watched_seconds: f64,
    /// Between the last two scans; 0 before the second.
    pub interval_seconds: f64,
    /// Pages found written by scans within that time, a second.
    pub pages_per_second: f64,
    /// Distinct pages written within the last seconds, for several windows, of which none is
    /// shorter than the time between two scans.
    pub windows: Vec<Window>,
    /// Where.
    pub regions: Vec<Heat>,
    /// Why there is no newer figure.
    pub held_up: Option<String>,
}

/// Distinct pages written within some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// The time.
    pub seconds: f64,
    /// The pages.
    pub pages: u64,
    /// Whether the client has been watched for so long.
    pub complete: bool,
}

/// Where a region is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heat {
    /// First byte in the client's memory.
    pub start: u64,
    /// Its pages.
    pub pages: u32,
    /// Pages of a part; the last part may have fewer.
    pub part_pages: u32,
    /// For each part, how many of its pages were written within the last ten seconds.
    pub parts: Vec<u32>,
}

/// No client.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} is no client of this daemon, so nobody notes what it writes: start it with `pageone run`; `pageone status` lists clients"
)]
pub struct NotAClient(pub i32);

impl Engine {
    /// Which pages clients write: of these processes, or of all if there are none. Scans them
    /// first. `uid`: only what belongs to this user.
    ///
    /// # Errors
    ///
    /// [`NotAClient`], for the first that is none.
    pub fn dirty(&self, pids: &[i32], uid: Option<u32>) -> Result<Vec<DirtyStatus>, NotAClient> {
        let mut clients = self.shared.clients();
        clients.retain(|client| uid.is_none_or(|uid| uid == client.uid));
        if let Some(&pid) = pids.iter().find(|&&pid| !clients.iter().any(|client| client.pid == pid)) {
            return Err(NotAClient(pid));
        }
        clients.retain(|client| pids.is_empty() || pids.contains(&client.pid));
        Ok(clients.iter().map(|client| status(client)).collect())
    }
}

fn status(client: &Client) -> DirtyStatus {
    let mut state = client.state();
    let failed = ask(client, &mut state).err();
    let mut out = DirtyStatus { pid: client.pid, name: client.name.clone(), ..DirtyStatus::default() };
    out.held_up = match (failed, state.detached, state.connected, state.outstanding) {
        (Some(e), ..) => Some(format!("its memory can't be scanned: {e}")),
        (_, true, ..) => Some("it is detached".into()),
        (_, _, false, _) => Some("its agent is not connected".into()),
        (.., pages @ 1..) => Some(format!("{pages} pages are being merged")),
        _ => None,
    };
    let Some(watch) = &state.watch else { return out };
    out.watched_seconds = watch.scanned.duration_since(watch.since).as_secs_f64();
    out.interval_seconds = watch.interval.as_secs_f64();
    if !watch.interval.is_zero() {
        out.pages_per_second = watch.found as f64 / out.interval_seconds;
    }
    let mut histogram = [0; WINDOWS[WINDOWS.len() - 1] as usize + 1];
    // Half of the time that a scan stands for.
    let half = (out.interval_seconds * 5.0) as u16;
    let youngest = |window: u16| window.saturating_sub(half + 1);
    for region in state.regions.values() {
        out.pages += u64::from(region.managed);
        let Some(stamps) = &region.stamps else { continue };
        stamps.ages(&mut histogram);
        let (part_pages, parts) = stamps.heat(youngest(HEAT));
        out.regions.push(Heat { start: region.start, pages: region.pages, part_pages, parts });
    }
    for window in WINDOWS.into_iter().filter(|&window| f64::from(window) >= out.interval_seconds * 9.0) {
        let seconds = f64::from(window) / 10.0;
        let pages = histogram[..=usize::from(youngest(window))].iter().sum();
        out.windows.push(Window {
            seconds,
            pages,
            complete: out.watched_seconds + 0.5 * out.interval_seconds >= seconds,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(pages: &[u16], now: u16) -> Stamps {
        Stamps { pages: pages.into(), now, found: 0 }
    }

    #[test]
    fn pages_are_counted_by_the_age_of_their_stamp() {
        let mut histogram = [0; 601];
        stamps(&[0, 700, 699, 690, 100, 1], 700).ages(&mut histogram);
        assert_eq!((histogram[0], histogram[1], histogram[10], histogram[600]), (1, 1, 1, 3));
    }

    #[test]
    fn heat_is_counted_by_parts() {
        let mut pages = vec![0; 1300];
        pages[511] = 100;
        pages[512] = 95;
        pages[513] = 2;
        pages[1299] = 100;
        assert_eq!(stamps(&pages, 100).heat(90), (512, vec![1, 1, 1]));
        let (part, parts) = stamps(&vec![7; 512 * 1024 + 1], 7).heat(90);
        assert_eq!((part, parts.len(), parts[0], parts[512]), (1024, 513, 1024, 1));
    }

    #[test]
    fn a_page_is_recorded_once_a_scan() {
        let mut one = stamps(&[0; 4], 5);
        [3, 3, 9].into_iter().for_each(|page| one.record(PageNo(page)));
        assert_eq!((one.pages.as_ref(), one.found), (&[0, 0, 0, 5][..], 2));
    }
}
