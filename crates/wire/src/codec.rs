//! Encoding and bounded decoding of packets.

use serde::{Deserialize, Serialize};

use crate::recycle;
use crate::{
    MAX_BATCH_PAGES, MAX_BATCH_RUNS, MAX_DIGESTS, Merge, MergeRun, OLDEST, Run, SEGMENT_PAGES, Target, ToAgent,
    ToDaemon, VERSION,
};

/// A packet that is no message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The bytes do not decode.
    #[error("a packet of {len} bytes is no message of protocol {OLDEST} or {VERSION}")]
    Malformed {
        /// Bytes in the packet.
        len: usize,
    },
    /// A list is longer than the protocol allows, out of order, or a number is out of bounds.
    #[error("a message breaks the protocol: {0}")]
    Invalid(&'static str),
    /// The message belongs to a later version than the connection speaks.
    #[error("a message of protocol {since} on a connection that speaks {version}")]
    Later {
        /// Its first version.
        since: u16,
        /// The connection's.
        version: u16,
    },
}

/// Encodes a message as one packet.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    // Serialising plain data into a growing vector has no way to fail.
    postcard::to_allocvec(message).unwrap_or_default()
}

/// Decodes one packet from an agent, on a connection that speaks `version`. The message is
/// well-formed, not trusted: the caller must check that its regions and pages exist.
///
/// # Errors
///
/// [`DecodeError`]: it is no message of this version, or a number in it is out of bounds.
pub fn decode_to_daemon(packet: &[u8], version: u16) -> Result<ToDaemon, DecodeError> {
    let message: ToDaemon = decode(packet)?;
    if message.since() > version {
        return Err(DecodeError::Later { since: message.since(), version });
    }
    let bounded = match &message {
        ToDaemon::RegionAdded { start, len, .. } => {
            let page = kmem::PAGE_SIZE as u64;
            *len > 0
                && start % page == 0
                && len % page == 0
                && len / page <= u64::from(u32::MAX)
                && start.checked_add(*len).is_some_and(|end| end < 1 << 57)
        }
        ToDaemon::RegionShrunk { run, .. } | ToDaemon::Discarded { run, .. } | ToDaemon::Retained { run, .. } => {
            run.is_bounded()
        }
        ToDaemon::Digests(answer) => answer.digests.len() <= MAX_DIGESTS as usize,
        ToDaemon::Report(report) => report.outcomes.iter().all(|outcome| outcome.run.is_bounded()),
        ToDaemon::Pool(pool) => recycle::extents_are_sound(&pool.extents),
        ToDaemon::Recycled(recycled) | ToDaemon::Zeros(recycled) => recycle::runs_are_sound(&recycled.runs),
        _ => true,
    };
    if bounded { Ok(message) } else { Err(DecodeError::Invalid("a range is out of bounds")) }
}

/// Decodes one packet from the daemon. The runs of a batch are ascending, disjoint and within the
/// limits.
///
/// # Errors
///
/// [`DecodeError`]: it is no message of these versions, or breaks a limit.
pub fn decode_to_agent(packet: &[u8]) -> Result<ToAgent, DecodeError> {
    let message = decode(packet)?;
    if let ToAgent::Merge(merge) = &message {
        check_batch(merge)?;
    }
    if let ToAgent::Digest(digest) = &message {
        check_digest(&digest.runs)?;
    }
    if let ToAgent::Ram(extents) = &message
        && !recycle::extents_are_sound(extents)
    {
        return Err(DecodeError::Invalid("extents are out of order or out of bounds"));
    }
    Ok(message)
}

fn decode<'a, M: Deserialize<'a>>(packet: &'a [u8]) -> Result<M, DecodeError> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Ok(message),
        _ => Err(DecodeError::Malformed { len: packet.len() }),
    }
}

fn check_digest(runs: &[Run]) -> Result<(), DecodeError> {
    let Some((pages, end)) = measure(runs.iter().copied()) else {
        return Err(DecodeError::Invalid("the runs of a digest request are not ascending and disjoint"));
    };
    if pages > u64::from(MAX_DIGESTS) || end > u64::from(u32::MAX) {
        return Err(DecodeError::Invalid("a digest request names too many pages"));
    }
    Ok(())
}

fn check_batch(merge: &Merge) -> Result<(), DecodeError> {
    if merge.runs.len() > MAX_BATCH_RUNS {
        return Err(DecodeError::Invalid("too many runs in a batch"));
    }
    let Some((pages, end)) = measure(merge.runs.iter().map(|merge| merge.run)) else {
        return Err(DecodeError::Invalid("the runs of a batch are not ascending and disjoint"));
    };
    let leaves_segment = |merge: &MergeRun| match merge.target {
        Target::Frames { slot, .. } => u64::from(slot.0) + u64::from(merge.run.len) > u64::from(SEGMENT_PAGES),
        Target::Zero => false,
    };
    if merge.runs.iter().any(leaves_segment) {
        return Err(DecodeError::Invalid("a run leaves its segment"));
    }
    if pages > u64::from(MAX_BATCH_PAGES) || end > u64::from(u32::MAX) {
        return Err(DecodeError::Invalid("a batch names too many pages"));
    }
    Ok(())
}

/// The pages of some runs and the end of the last. `None`: they are not ascending and disjoint, or
/// one is empty.
fn measure(runs: impl Iterator<Item = Run>) -> Option<(u64, u64)> {
    let (mut pages, mut end) = (0u64, 0u64);
    for run in runs {
        if run.len == 0 || u64::from(run.page) < end {
            return None;
        }
        end = u64::from(run.page) + u64::from(run.len);
        pages += u64::from(run.len);
    }
    Some((pages, end))
}

#[cfg(test)]
mod tests;
