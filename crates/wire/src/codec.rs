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
        ToDaemon::Recycled(recycled) => recycle::runs_are_sound(&recycled.runs),
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
mod tests {
    use super::*;
    use crate::{Digest, Digests, MAX_MESSAGE, PageNo, RegionId, Slot};

    fn merge(runs: Vec<MergeRun>) -> Vec<u8> {
        encode(&ToAgent::Merge(Merge { batch: 1, region: RegionId(2), runs, calm: false }))
    }

    fn run(page: u32, len: u32, slot: u32) -> MergeRun {
        MergeRun { run: Run::new(PageNo(page), len), target: Target::Frames { segment: 9, slot: Slot(slot) } }
    }

    #[test]
    fn messages_survive_the_wire() {
        let hello = ToDaemon::Hello { version: VERSION, domain: Some("a".into()), name: "qemu".into(), forks: 3 };
        assert_eq!(decode_to_daemon(&encode(&hello), VERSION).unwrap(), hello);
        let batch = ToAgent::Merge(Merge {
            batch: 7,
            region: RegionId(1),
            runs: vec![run(0, 4, 3), MergeRun { run: Run::new(PageNo(9), 1), target: Target::Zero }],
            calm: true,
        });
        assert_eq!(decode_to_agent(&encode(&batch)).unwrap(), batch);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(matches!(decode_to_agent(&[]), Err(DecodeError::Malformed { len: 0 })));
        assert!(decode_to_agent(&[0xff; 64]).is_err());
        let mut trailing = encode(&ToAgent::Detach);
        trailing.push(0);
        assert!(decode_to_agent(&trailing).is_err(), "bytes behind a message");
        let empty = encode(&ToDaemon::RegionAdded { region: RegionId(1), start: 4096, len: 0 });
        let out_of_bounds = decode_to_daemon(&empty, VERSION).unwrap_err().to_string();
        assert_eq!(out_of_bounds, "a message breaks the protocol: a range is out of bounds");
    }

    #[test]
    fn batches_are_ascending_disjoint_and_bounded() {
        assert!(decode_to_agent(&merge(vec![run(0, 4, 0), run(4, 1, 9)])).is_ok());
        assert!(decode_to_agent(&merge(vec![run(0, 4, 0), run(3, 1, 9)])).is_err(), "overlap");
        assert!(decode_to_agent(&merge(vec![run(0, 0, 0)])).is_err(), "empty run");
        assert!(decode_to_agent(&merge(vec![run(0, 2, SEGMENT_PAGES - 1)])).is_err(), "past the segment");
        assert!(decode_to_agent(&merge(vec![run(0, MAX_BATCH_PAGES + 1, 0)])).is_err(), "too many pages");
        assert!(decode_to_agent(&merge(vec![run(u32::MAX, 2, 0)])).is_err(), "page numbers wrap");
    }

    #[test]
    fn digests_are_requested_in_ascending_runs_and_bounded() {
        let asked = |runs: &[(u32, u32)]| {
            let runs = runs.iter().map(|&(page, len)| Run::new(PageNo(page), len)).collect();
            decode_to_agent(&encode(&ToAgent::Digest(Digest { request: 1, region: RegionId(2), seed: 3, runs })))
                .is_ok()
        };
        assert!(asked(&[]) && asked(&[(0, 4), (4, 1), (u32::MAX - 1, 1)]) && asked(&[(0, MAX_DIGESTS)]));
        for bad in [&[(0, 0)][..], &[(0, 4), (3, 1)], &[(0, 1), (1, MAX_DIGESTS)], &[(u32::MAX, 2)]] {
            assert!(!asked(bad), "{bad:?}");
        }
        let told = |count| {
            let answer = Digests { request: u64::MAX, digests: vec![u64::MAX; count], cpu_ns: u64::MAX };
            encode(&ToDaemon::Digests(answer))
        };
        let most = told(MAX_DIGESTS as usize);
        assert!(most.len() <= MAX_MESSAGE && decode_to_daemon(&most, VERSION).is_ok());
        assert!(decode_to_daemon(&told(MAX_DIGESTS as usize + 1), VERSION).is_err());
    }

    #[test]
    fn regions_are_page_aligned_and_in_the_address_space() {
        let added = |start, len| encode(&ToDaemon::RegionAdded { region: RegionId(1), start, len });
        assert!(decode_to_daemon(&added(4096, 8192), VERSION).is_ok());
        for (start, len) in [(1, 4096), (4096, 1), (4096, 0), (u64::MAX - 4095, 4096), (0, !4095)] {
            assert!(decode_to_daemon(&added(start, len), VERSION).is_err(), "{start} {len}");
        }
    }
}
