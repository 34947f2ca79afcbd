//! The segments that an agent hands over: of an earlier daemon, and of a snapshot's RAM.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kmem::{PAGE_SIZE, memfd};
use wire::{SEGMENT_PAGES, SegmentId};

use super::{Handshake, HandshakeError};
use crate::store::Segment;
use crate::store::domain::Domain;
use crate::users::{Claim, Kind, User, log_of};
use crate::world::shared::Shared;

/// A segment that an agent has.
pub(super) enum Held {
    /// Some store has it.
    Stored,
    /// An earlier daemon made it, and the store is to take it back.
    Earlier(OwnedFd, Claim),
    /// It is a part of a snapshot's RAM, which nobody can change any more.
    Snapshot(OwnedFd, Claim),
    /// No daemon of this directory made it.
    Unknown(Claim),
}

/// What is made of the segments that an agent has.
#[derive(Default)]
pub(super) struct Adopted {
    /// Those of its domain's store.
    pub(super) own: Vec<Arc<Segment>>,
    /// Those that are not taken: it is to close them. Its pages keep their frames.
    pub(super) others: Vec<SegmentId>,
}

/// Notes a segment that an agent holds. Kept are descriptors of snapshots' RAM, and of segments
/// that the state file lists and no store has; one of a store's is closed, any other stays in
/// `fds`. For which domain it was made is asked later.
pub(super) fn hold(
    shared: &Shared,
    handshake: &mut Handshake,
    segment: SegmentId,
    fds: &mut Vec<OwnedFd>,
) -> Result<(), HandshakeError> {
    if handshake.segments.contains_key(&segment) {
        return Err(HandshakeError::SegmentTwice(segment));
    }
    // Its seals first: if the file is no memfd, other calls on it may never return.
    let has_identity = |fd: &OwnedFd| memfd::identity(fd).is_ok_and(|id| id.ino == segment);
    if let Some(fd) = fds.pop_if(|fd| is_of_snapshot(fd) && has_identity(fd)) {
        let held = Held::Snapshot(fd, handshake.user.claim(Kind::Segments, 1)?);
        handshake.segments.insert(segment, held);
        return Ok(());
    }
    let stored = shared.domains().iter().any(|domain| domain.store.hold(segment).is_some());
    let is_it = |fd: &OwnedFd| memfd::require_kept(fd).is_ok() && has_identity(fd);
    let known = stored || shared.state_file.lock().has(segment);
    let fd = if known { fds.pop_if(|fd| is_it(fd)) } else { None };
    if !stored && fd.is_none() {
        let why = "it holds a segment that no earlier daemon of this directory made; not taken";
        log_of!(handshake.user, warn, pid = handshake.peer.pid, segment, "{why}");
        if let Ok(claim) = handshake.user.claim(Kind::Segments, 1) {
            handshake.segments.insert(segment, Held::Unknown(claim));
        }
        return Ok(());
    }
    let held = match fd.filter(|_| !stored) {
        Some(fd) => Held::Earlier(fd, handshake.user.claim(Kind::Segments, 1)?),
        None => Held::Stored,
    };
    handshake.segments.insert(segment, held);
    Ok(())
}

/// Whether a file is a part of a snapshot's RAM: unchangeable, and as long as a segment.
fn is_of_snapshot(fd: &OwnedFd) -> bool {
    let len = SEGMENT_PAGES as u64 * PAGE_SIZE as u64;
    memfd::require_written(fd).is_ok() && rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size as u64 == len)
}

/// Takes back segments made for the agent's domain, and snapshots'.
pub(super) fn adopt(
    shared: &Shared,
    domain: &Domain,
    user: &User,
    pid: i32,
    held: BTreeMap<SegmentId, Held>,
) -> Adopted {
    // Clients are admitted by threads of their own, and hand over the same segments.
    let one_at_a_time = shared.state_file.lock();
    let of = domain.key.to_string();
    let mut adopted = Adopted::default();
    for (segment, handed) in held {
        if let Some((_, there)) = domain.store.hold(segment) {
            adopted.own.push(there);
            continue;
        }
        let taken = match handed {
            Held::Snapshot(fd, _claim) => domain.store.adopt_snapshot(segment, fd),
            Held::Earlier(fd, _claim) if one_at_a_time.knows(segment, &of) => domain.store.adopt(segment, fd),
            Held::Earlier(..) | Held::Stored => {
                let why = "it holds a segment that was made for another domain; not taken";
                log_of!(user, warn, pid, segment, domain = of, "{why}");
                adopted.others.push(segment);
                continue;
            }
            Held::Unknown(_claim) => {
                adopted.others.push(segment);
                continue;
            }
        };
        match taken {
            Ok(taken) => adopted.own.push(taken),
            Err(e) => log_of!(user, warn, pid, segment, "cannot take a segment: {e}"),
        }
    }
    adopted
}
