//! The connection to the daemon.
//!
//! The daemon may be missing, slow, stopped, restarted or mad: nothing here waits for it with the
//! lock held, and a peer that says what the protocol does not allow is left and tried again later.
//! All traffic is non-blocking and done under the agent's lock, so that a fork never copies a
//! descriptor that the child does not know of.

#![allow(unsafe_code)] // prctl(2), getrlimit(2).

use crate::daemon::batch::Merger;
use crate::daemon::digest;
use crate::recycle::{self, Recycler};
use crate::runtime::log;
use crate::runtime::regions::Pages;
use crate::runtime::state::{self, ENDED, PHASE, STATE, Segment, State};
use crate::runtime::threads::{interest, wait};
use crate::window::Twin;
use crate::window::pins::Waiting;
use kmem::seqpacket::Conn;
use kmem::{memfd, raw};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;
use wire::{RegionId, SEGMENT_PAGES, ToAgent, ToDaemon, control};

/// First pause before the next attempt to connect; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause after the daemon has refused this client.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// Bytes in a segment.
const SEGMENT_LEN: usize = SEGMENT_PAGES as usize * kmem::PAGE_SIZE;

/// Why a connection ended.
enum End {
    /// Everything was given back.
    Detached,
    /// The daemon does not want this client.
    Refused(String),
    /// The connection failed, or the peer broke the protocol.
    Lost(String),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Lost(error.to_string())
    }
}

/// Serves daemons, one after the other, until one detaches this client.
pub fn serve(path: &Path, wake: &OwnedFd) {
    let mut pause = FIRST_PAUSE;
    let mut merger = Merger::new();
    loop {
        let mut welcomed = false;
        let end = session(path, wake, &mut merger, &mut welcomed);
        STATE.lock().disconnect();
        pause = if welcomed { FIRST_PAUSE } else { pause };
        let wait = match end {
            End::Detached => {
                log::line(format_args!("detached"));
                return;
            }
            End::Refused(reason) => {
                log::line(format_args!("refused: {reason}"));
                REFUSED_PAUSE
            }
            End::Lost(reason) => {
                log::line(format_args!("connection to {}: {reason}", path.display()));
                pause
            }
        };
        std::thread::sleep(wait);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn session(path: &Path, wake: &OwnedFd, merger: &mut Merger, welcomed: &mut bool) -> End {
    match connect(path) {
        Ok(()) => log::line(format_args!("connected to {}", path.display())),
        Err(end) => return end,
    }
    let mut packet = vec![0; wire::MAX_MESSAGE];
    loop {
        let turn = match turn(wake, &mut packet) {
            Ok(turn) => turn,
            Err(end) => return end,
        };
        let Some((message, fds)) = turn else { continue };
        if let Err(end) = handle(message, fds, merger, welcomed) {
            return end;
        }
    }
}

fn connect(path: &Path) -> Result<(), End> {
    let mut state = STATE.lock();
    let conn = Conn::connect(path)?;
    let peer = conn.peer()?;
    if peer.uid != 0 && peer.uid != rustix::process::geteuid().as_raw() {
        return Err(End::Lost(format!("the peer runs as uid {}, not as root or this user", peer.uid)));
    }
    // Where Yama asks for it, the daemon is allowed to read this process. It fails where there is no
    // Yama.
    // SAFETY: takes a number.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, peer.pid as libc::c_ulong, 0, 0, 0) };
    let hello = ToDaemon::Hello {
        version: wire::VERSION,
        domain: std::env::var(wire::ENV_DOMAIN).ok().filter(|domain| !domain.is_empty()),
        name: program_name(),
        forks: state.forks,
    };
    state.conn = Some(conn);
    let mut account = vec![hello];
    for region in &state.regions {
        let (start, len) = (region.range.start as u64, region.range.len as u64);
        account.push(ToDaemon::RegionAdded { region: region.id, start, len });
        let shrunk = |hole: Pages| ToDaemon::RegionShrunk { region: region.id, run: hole.into() };
        account.extend(region.holes().map(shrunk));
    }
    account.extend(state.segments.iter().map(|held| ToDaemon::SegmentHeld { segment: held.id }));
    account.push(ToDaemon::Ready);
    account.extend(state.recycler.as_ref().map(Recycler::account));
    state.outbox.open(account.into_iter());
    Ok(())
}

/// Name of the program, without its path.
fn program_name() -> String {
    let name = std::env::current_exe().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_default()
}

/// Sends what can be sent and returns the next message, or nothing after a while.
fn turn(wake: &OwnedFd, packet: &mut [u8]) -> Result<Option<(ToAgent, Vec<OwnedFd>)>, End> {
    let (conn, more, untracked) = {
        let mut state = STATE.lock();
        let more = state.flush()?;
        let conn = state.conn.as_ref().map(|conn| state::number(&conn.as_fd())).ok_or(End::Lost("closed".into()))?;
        (conn, more, !state.untracked.is_empty())
    };
    let events = if more { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
    let mut fds = [interest(conn, events), interest(state::number(wake), libc::POLLIN)];
    if !wait(&mut fds, if untracked { 1000 } else { -1 }) {
        return Err(End::Lost(format!("poll: {}", Errno::from_raw_os_error(raw::errno()))));
    }
    if fds[1].revents != 0 {
        let _ = rustix::io::read(wake, &mut [0u8; 8]);
        state::woken();
    }
    let mut state = STATE.lock();
    if untracked {
        state.track_again();
    }
    let mut fds = Vec::new();
    let Some(conn) = &state.conn else { return Ok(None) };
    match conn.recv(packet, &mut fds)? {
        None => Ok(None),
        Some(0) => Err(End::Lost("closed by the daemon".into())),
        Some(len) => {
            let message = wire::decode_to_agent(&packet[..len]).map_err(|error| End::Lost(error.to_string()))?;
            let wanted = matches!(message, ToAgent::Welcome { .. } | ToAgent::Segment { .. });
            if fds.len() != usize::from(wanted) {
                return Err(End::Lost("a message with the wrong number of descriptors".into()));
            }
            Ok(Some((message, fds)))
        }
    }
}

impl State {
    /// Sends until the socket is full; true if messages are left.
    fn flush(&mut self) -> Result<bool, End> {
        if self.outbox.has_overflowed() {
            return Err(End::Lost("the daemon does not read; starting over".into()));
        }
        let Some(conn) = &self.conn else { return Ok(false) };
        while let Some(message) = self.outbox.front() {
            let held = match message {
                ToDaemon::SegmentHeld { segment } => self.segments.iter().find(|held| held.id == *segment),
                _ => None,
            };
            let fds: Vec<_> = match (message, &self.recycler) {
                (ToDaemon::Pool(_), Some(recycler)) => recycler.fds(),
                _ => held.map(|held| held.fd.as_fd()).into_iter().collect(),
            };
            if matches!(message, ToDaemon::SegmentHeld { .. }) && fds.is_empty() {
                // Dropped in the meantime.
                self.outbox.sent();
                continue;
            }
            match conn.send(&wire::encode(message), &fds) {
                Ok(()) => self.outbox.sent(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }
}

fn handle(message: ToAgent, mut fds: Vec<OwnedFd>, merger: &mut Merger, welcomed: &mut bool) -> Result<(), End> {
    let fd = fds.pop();
    match (message, fd) {
        (ToAgent::Refused { reason }, _) => return Err(End::Refused(reason)),
        (ToAgent::Welcome { version }, _) if version != wire::VERSION => {
            let ours = wire::VERSION;
            return Err(End::Refused(format!(
                "the daemon speaks version {version} of the protocol, this library {ours}"
            )));
        }
        (ToAgent::Welcome { .. }, Some(fd)) if !*welcomed => {
            STATE.lock().take_control_page(fd)?;
            *welcomed = true;
        }
        (ToAgent::Segment { segment }, Some(fd)) if *welcomed => STATE.lock().take_segment(segment, fd)?,
        (ToAgent::DropSegment { segment }, _) if *welcomed => {
            STATE.lock().segments.retain(|held| held.id != segment);
        }
        (ToAgent::Merge(merge), _) if *welcomed => merger.batch(merge, || {
            // What cannot be sent now, and why, comes up again in the next turn.
            let _ = STATE.lock().flush();
        }),
        (ToAgent::Digest(asked), _) if *welcomed => digest::answer(&asked),
        (ToAgent::Ram(extents), _) if *welcomed => STATE.lock().set_ram(extents),
        (ToAgent::Recycle { budget_ns }, _) if *welcomed => {
            recycle::sweep(Duration::from_nanos(budget_ns), || {
                let _ = STATE.lock().flush();
            });
        }
        (ToAgent::Detach, _) if *welcomed => return Err(detach()),
        _ => return Err(End::Lost("a message out of turn".into())),
    }
    Ok(())
}

impl State {
    fn take_control_page(&mut self, fd: OwnedFd) -> Result<(), End> {
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from)?;
        // Touching a page that the file no longer has would raise SIGBUS.
        let cannot_shrink = memfd::seals(&fd).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        if !cannot_shrink || stat.st_size != control::LEN as i64 {
            return Err(End::Lost("the control page is no memfd of one page, sealed against shrinking".into()));
        }
        let page = memfd::map_shared(&fd, control::LEN).map_err(|error| End::Lost(format!("control page: {error}")))?;
        page.atomic_u64(control::FORKS).store(self.forks, Ordering::SeqCst);
        self.control = Some(page);
        Ok(())
    }

    fn take_segment(&mut self, id: wire::SegmentId, fd: OwnedFd) -> Result<(), End> {
        if self.segments.iter().any(|held| held.id == id) {
            return Ok(());
        }
        memfd::require_seals(&fd).map_err(|error| End::Lost(format!("segment: {error}")))?;
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from)?;
        if stat.st_ino != id || stat.st_size != SEGMENT_LEN as i64 {
            return Err(End::Lost("a segment that is not what its message says".into()));
        }
        if self.segments.len() >= most_segments() {
            // Merges with it fail, and nothing else.
            return Ok(());
        }
        let map = memfd::map_readonly(&fd, SEGMENT_LEN).map_err(|error| End::Lost(format!("segment: {error}")))?;
        // SAFETY: changes no memory.
        let _ = unsafe { raw::madvise(map.as_ptr() as usize, SEGMENT_LEN, libc::MADV_DONTFORK) };
        self.segments.push(Segment { id, fd, map });
        Ok(())
    }
}

/// A quarter of the descriptors that the program may open: the rest is its own.
fn most_segments() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    (limit.unwrap_or(u64::MAX) / 4) as usize
}

/// Gives a region its plain memory back, window by window; the program gets its turn in between.
fn restore(id: RegionId, pages: u32) -> Result<(), Errno> {
    let mut twin: Option<Twin> = None;
    for start in (0..pages).step_by(crate::window::MAX_PAGES as usize) {
        let mut state = STATE.lock();
        let Some(index) = state.position(id) else { break };
        let region = &mut state.regions[index];
        let window = Pages { start, end: pages.min(start + crate::window::MAX_PAGES) };
        if twin.is_none() {
            if !region.mapped.any(Pages::new(0, pages)) {
                break;
            }
            twin = Some(Twin::new(region)?);
        }
        let bytes = region.bytes(window);
        let parts: Vec<Pages> = region.managed_in(bytes).collect();
        for part in parts {
            if let Some(twin) = &mut twin {
                state.restore(id, part, twin)?;
            }
        }
        drop(state);
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

/// Turns everything back into plain anonymous memory.
fn detach() -> End {
    // Nothing is taken from here on.
    PHASE.store(ENDED, Ordering::Release);
    let regions: Vec<_> = STATE.lock().regions.iter().map(|region| (region.id, region.range.pages() as u32)).collect();
    for (id, pages) in regions {
        if let Err(error) = restore(id, pages) {
            PHASE.store(crate::runtime::state::RUNNING, Ordering::Release);
            return End::Lost(format!("memory could not be unmerged: {error}"));
        }
    }
    let mut state = STATE.lock();
    for (id, pages) in state.pieces(kmem::range::Range::new(0, usize::MAX)) {
        if let Some(bytes) = state.bytes(id, pages) {
            state.untrack(bytes);
        }
        state.give_up(id, pages);
    }
    state.outbox.push(ToDaemon::Detached);
    state.tracking = None;
    state.waiting.take().into_iter().for_each(Waiting::close);
    state.segments.clear();
    state.recycler = None;
    let conn = state.conn.as_ref().map(|conn| state::number(&conn.as_fd()));
    drop(state);
    // The daemon may be slow, but not for ever.
    for _ in 0..50 {
        match (STATE.lock().flush(), conn) {
            (Ok(true), Some(conn)) => drop(wait(&mut [interest(conn, libc::POLLOUT)], 100)),
            _ => break,
        }
    }
    End::Detached
}
