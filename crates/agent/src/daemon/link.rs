//! The connection to the daemon.
//!
//! The daemon may be missing, slow, stopped, restarted or hostile. Nothing here waits for it with
//! the lock held, and a peer that breaks the protocol is left and tried again later. All traffic is
//! non-blocking and under the lock, so that no fork copies a descriptor that the child does not
//! know of.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use kmem::peer::{Peer, is_trusted};
use kmem::raw;
use kmem::seqpacket::Conn;
use rustix::io::Errno;
use wire::{ToAgent, ToDaemon};

use crate::daemon::detach::detach;
use crate::daemon::error::LinkError;
use crate::daemon::requests::{Handled, Requests};
use crate::daemon::send::flush;
use crate::runtime::denied::{self, Need};
use crate::runtime::descriptors::Descriptor;
use crate::runtime::lifecycle::{Leaving, Phase, leaving, phase, set_leaving, set_phase};
use crate::runtime::log;
use crate::runtime::poll;
use crate::runtime::prctl;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::waker::WAKE;

/// First pause before the next attempt to connect; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause after the daemon has refused this client: it will hardly change its mind.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// Messages of a daemon that has closed the connection, among which its reason is looked for.
const LAST_WORDS: u32 = 16;
/// How often spans that could not be tracked again are tried, in milliseconds.
const TRACK_EVERY_MS: i32 = 1000;

enum End {
    Detached,
    Refused(String),
    Failed(LinkError),
}

/// Serves daemons, one after the other, until one detaches this client, or management ends.
pub(crate) fn serve(path: &Path) {
    let mut pause = FIRST_PAUSE;
    let mut requests = Requests::new();
    loop {
        let end = session(path, &mut requests);
        STATE.lock().uplink.disconnect();
        prctl::permit_tracer(None);
        if requests.is_welcome() {
            pause = FIRST_PAUSE;
        }
        let wait = match end {
            End::Detached => {
                log::line(format_args!("detached"));
                return;
            }
            End::Refused(reason) => {
                log::line(format_args!("refused: {reason}"));
                REFUSED_PAUSE
            }
            End::Failed(error @ (LinkError::LostDescriptors | LinkError::Ksm)) => {
                set_phase(Phase::Ended);
                STATE.lock().end();
                log::line(format_args!("{error}"));
                return;
            }
            End::Failed(_) if phase() == Phase::Ended => return,
            End::Failed(error) => {
                if let LinkError::Io(error) = &error {
                    denied::tell(Need::Socket(path), error);
                }
                log::line(format_args!("connection to {}: {error}", path.display()));
                pause
            }
        };
        rest(wait);
        if leave() {
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Waits for a time, or until the program asks the agent to leave.
fn rest(time: Duration) {
    let end = Instant::now() + time;
    while let left = end.saturating_duration_since(Instant::now())
        && !left.is_zero()
        && leaving() != Leaving::Asked
    {
        let ear = poll::interest(WAKE.fd(), libc::POLLIN);
        if !poll::wait(&mut [ear], left.as_millis().max(1) as i32) {
            std::thread::sleep(left);
        }
        WAKE.clear();
    }
}

/// Gives everything back if the program asks for that; whether that is done.
fn leave() -> bool {
    if leaving() != Leaving::Asked {
        return false;
    }
    let done = detach();
    if !done {
        set_leaving(Leaving::Failed);
    }
    done
}

fn session(path: &Path, requests: &mut Requests) -> End {
    requests.begin();
    match connect(path) {
        Ok(()) => log::line(format_args!("connected to {}", path.display())),
        Err(error) => return End::Failed(error),
    }
    let mut packet = vec![0; wire::MAX_MESSAGE];
    loop {
        let received = exchange(&mut packet);
        let handled = received.and_then(|received| match received {
            Some(message) => requests.handle(message),
            None => Ok(Handled::Done),
        });
        match handled {
            Ok(Handled::Done) if leave() => return End::Detached,
            Ok(Handled::Done) => {}
            Ok(Handled::Detached) => return End::Detached,
            Ok(Handled::Refused(reason)) => return End::Refused(reason),
            Err(error) => return refusal(&mut packet).map_or(End::Failed(error), End::Refused),
        }
    }
}

/// Why the daemon has closed the connection, if it said so. Where it left messages unread, the
/// kernel tells of that before it hands over what the daemon said.
fn refusal(packet: &mut [u8]) -> Option<String> {
    let state = STATE.lock();
    let conn = state.uplink.conn.as_ref().filter(|_| check_descriptors(&state).is_ok())?;
    let mut fds = Vec::new();
    for _ in 0..LAST_WORDS {
        match conn.recv(packet, &mut fds) {
            Ok(Some(len @ 1..)) => {
                if let Ok(ToAgent::Refused { reason }) = wire::decode_to_agent(&packet[..len]) {
                    return Some(reason);
                }
            }
            Ok(_) => return None,
            Err(_) => {}
        }
    }
    None
}

fn connect(path: &Path) -> Result<(), LinkError> {
    let mut state = STATE.lock();
    if phase() == Phase::Ended {
        return Err(LinkError::Closed);
    }
    let conn = Conn::connect(path)?;
    let peer = Peer::of(&conn)?;
    if !is_trusted(peer.uid) {
        return Err(LinkError::Peer(peer.uid));
    }
    // A daemon that runs as root may read the process anyway.
    if peer.uid != 0 {
        prctl::permit_tracer(Some(peer.pid));
    }
    let account = account(&state);
    state.uplink.conn = Some(Descriptor::new(conn)?);
    state.uplink.outbox.open(account.into_iter());
    Ok(())
}

/// The first messages of a connection: what this client is, and what it has.
fn account(state: &State) -> Vec<ToDaemon> {
    let mut account = vec![ToDaemon::Hello {
        version: wire::VERSION,
        domain: std::env::var(wire::ENV_DOMAIN).ok().filter(|domain| !domain.is_empty()),
        name: program_name(),
        forks: state.uplink.control.forks(),
    }];
    for region in state.regions.iter() {
        let (start, len) = (region.range.start as u64, region.range.len as u64);
        account.push(ToDaemon::RegionAdded { region: region.id, start, len });
        account.extend(region.holes().map(|run| ToDaemon::RegionShrunk { region: region.id, run }));
    }
    account.extend(state.segments.iter().map(|held| ToDaemon::SegmentHeld { segment: held.id }));
    account.push(ToDaemon::Ready);
    account
}

fn program_name() -> String {
    let name = std::env::current_exe().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_default()
}

/// Nothing may be read from or written to a file of the program.
fn check_descriptors(state: &State) -> Result<(), LinkError> {
    if state.has_lost_descriptors() {
        return Err(LinkError::LostDescriptors);
    }
    if prctl::has_process() { Err(LinkError::Ksm) } else { Ok(()) }
}

/// Sends what it can, waits, and returns the next message; its descriptor is in the uplink.
fn exchange(packet: &mut [u8]) -> Result<Option<ToAgent>, LinkError> {
    let (conn, more, untracked) = {
        let mut state = STATE.lock();
        check_descriptors(&state)?;
        state.count_unseen_forks();
        let more = flush(&mut state)?;
        let conn = state.uplink.conn.as_ref().ok_or(LinkError::Closed)?.as_fd().as_raw_fd();
        (conn, more, state.uffds.has_untracked())
    };
    let events = if more { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
    let mut fds = [poll::interest(conn, events), poll::interest(WAKE.fd(), libc::POLLIN)];
    if !poll::wait(&mut fds, if untracked { TRACK_EVERY_MS } else { -1 }) {
        return Err(LinkError::Poll(Errno::from_raw_os_error(raw::errno())));
    }
    if fds[1].revents != 0 {
        WAKE.clear();
    }
    let mut state = STATE.lock();
    check_descriptors(&state)?;
    if untracked {
        state.track_again();
    }
    let mut fds = Vec::new();
    let Some(conn) = &state.uplink.conn else { return Ok(None) };
    match conn.recv(packet, &mut fds)? {
        None => Ok(None),
        Some(0) => Err(LinkError::ClosedByDaemon),
        Some(len) => {
            let message = wire::decode_to_agent(&packet[..len])?;
            let wanted = matches!(message, ToAgent::Welcome { .. } | ToAgent::Segment { .. });
            if fds.len() != usize::from(wanted) {
                return Err(LinkError::Descriptors);
            }
            state.uplink.received = fds.pop();
            Ok(Some(message))
        }
    }
}
