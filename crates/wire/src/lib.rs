//! The messages between the daemon and the agent inside a client.
//!
//! One `SOCK_SEQPACKET` connection per client; every packet is one message, encoded with
//! `postcard`. The order of the packets is the order of events: the agent queues a
//! [`ToDaemon::Report`] or [`ToDaemon::Discarded`] under the lock that it holds while it changes
//! mappings. So the daemon's ledger is right when it applies them in order.
//!
//! ```text
//! agent                                   daemon
//!   Hello ─────────────────────────────────▶
//!   RegionAdded … ─────────────────────────▶
//!   SegmentHeld + fd … (after a restart) ──▶   takes its store back
//!                    ◀──────────────────────── Welcome + fd of the control page
//!                    ◀──────────────────────── Segment + fd   (before its first use)
//!                    ◀──────────────────────── Digest
//!   Digests ───────────────────────────────▶
//!                    ◀──────────────────────── Merge
//!   Report (one for each window) ──────────▶
//!   Discarded / RegionShrunk (any time) ───▶
//! ```
//!
//! Neither side trusts the other: decoding is bounded, and what a message asks for is checked
//! against the receiver's own tables before it is done.

pub mod recycle;

mod page;
mod policy;

use serde::{Deserialize, Serialize};

pub use page::{PageNo, RegionId, Run, Slot};
pub use policy::{HugePages, UnknownPolicy};

/// Version of this protocol. Both sides must have the same.
pub const VERSION: u16 = 4;
/// Bytes in a packet at most.
pub const MAX_MESSAGE: usize = 64 << 10;
/// Pages in one segment of a store (64 MiB).
pub const SEGMENT_PAGES: u32 = 16_384;
/// Pages that one [`ToAgent::Merge`] may name at most: 16 MiB.
pub const MAX_BATCH_PAGES: u32 = 4_096;
/// Pages that a window spans at most, from its first run to its last: 2 MiB.
pub const MAX_WINDOW_PAGES: u32 = 512;
/// Runs that one [`ToAgent::Merge`] may name at most, so that it fits into a packet.
pub const MAX_BATCH_RUNS: usize = 2_048;
/// Pages that one [`ToAgent::Digest`] may name at most, so that the answer fits into a packet.
pub const MAX_DIGESTS: u32 = 1_024;

/// Path of the daemon's agent socket, in the environment of a started program.
pub const ENV_SOCKET: &str = "PAGEONE_SOCKET";
/// Name of the domain that the program asks to join.
pub const ENV_DOMAIN: &str = "PAGEONE_DOMAIN";
/// The name of a [`HugePages`] policy. With `split` (the default) the agent swallows
/// `madvise(MADV_HUGEPAGE)` on a region; with `keep` it lets the call through.
pub const ENV_HUGE_PAGES: &str = "PAGEONE_HUGEPAGES";

/// Layout of the control page: one page of memory shared by daemon and agent, made by the daemon.
pub mod control {
    /// Bytes in the control page.
    pub const LEN: usize = 4096;
    /// Offset of an `AtomicU64`: how many forks, which may have copied mappings of frames, the
    /// agent has seen. It is counted **before** the child exists, so a daemon that reads an old
    /// number knows of every child there can be.
    pub const FORKS: usize = 0;
    /// Offset of an `AtomicU64`: 1 while the agent may have pages taken away, which cannot be
    /// read then.
    pub const WINDOW: usize = 8;
}

/// A segment of a store: the inode number of its memfd, which also stands in `/proc/PID/maps`.
pub type SegmentId = u64;

/// What an agent tells the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first message. The daemon knows the process by the socket's credentials.
    Hello {
        /// [`VERSION`] of the agent.
        version: u16,
        /// Domain asked for; `None`: the one of the uid.
        domain: Option<String>,
        /// Name of the program, to be shown.
        name: String,
        /// Forks seen so far (see [`control::FORKS`]).
        forks: u64,
    },
    /// The program marked this memory as mergeable, and it is registered for asynchronous
    /// write-protection.
    RegionAdded {
        /// Its name from now on.
        region: RegionId,
        /// First byte, page aligned.
        start: u64,
        /// Bytes, page aligned.
        len: u64,
    },
    /// A segment that this client holds from an earlier daemon; its file descriptor comes with the
    /// packet.
    SegmentHeld {
        /// Which.
        segment: SegmentId,
    },
    /// The last message of the handshake: all regions and segments were sent.
    Ready,
    /// This part of a region is no longer managed: unmapped, moved, protected or given back. It
    /// maps no frame any more.
    RegionShrunk {
        /// The region.
        region: RegionId,
        /// The pages.
        run: Run,
    },
    /// The program discarded these pages; they are untouched anonymous memory now and map no frame.
    Discarded {
        /// The region.
        region: RegionId,
        /// The pages.
        run: Run,
    },
    /// The outcome of one window of a batch, or of several.
    Report(Report),
    /// Answer to [`ToAgent::Digest`].
    Digests(Digests),
    /// Everything was unmerged and given back; the agent will not connect again.
    Detached,
    /// The guest marks its free pages; the pool's descriptor comes with the packet.
    Pool(recycle::Pool),
    /// Pages were recycled.
    Recycled(recycle::Recycled),
    /// A sweep has ended.
    Swept(recycle::Sweep),
}

/// The outcome of a part of a batch: of one window, or several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The batch.
    pub batch: u64,
    /// Whether this was its last window. A batch always gets one such report, also when nothing of
    /// it could be done.
    pub last: bool,
    /// Outcomes, in the order of the runs asked for. An outcome may be a part of a run, or span
    /// several; none is left out.
    pub outcomes: Vec<RunOutcome>,
    /// CPU time that the agent's threads have used since the program started, in nanoseconds.
    pub cpu_ns: u64,
    /// How long writers to these pages could have waited, in nanoseconds.
    pub window_ns: u64,
    /// Mappings (VMAs) that the process has now, as estimated by the agent.
    pub maps: u32,
}

/// Consecutive pages of a window that had the same outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunOutcome {
    /// The pages.
    pub run: Run,
    /// Their outcome.
    pub outcome: Outcome,
}

/// The digests of pages, as far as they could be read. The agent may lie: nothing may depend on
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// Which [`Digest`] this answers.
    pub request: u64,
    /// xxh3 (64 bits) of each page, in the order asked for. They end where a page could not be
    /// read, or some pages before.
    pub digests: Vec<u64>,
    /// CPU time that the agent's threads have used since the program started, in nanoseconds.
    pub cpu_ns: u64,
}

/// What the merge window did with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// It equalled the target and maps it now.
    Merged,
    /// It differs from the target, or may by now ([`Merge::calm`]); nothing was changed.
    Differs,
    /// The region does not cover it any more, or the window could not be opened.
    Gone,
    /// Refused: the process has pinned pages (`VmPin`).
    Pinned,
    /// Refused: the process has locked memory (`VmLck`).
    Locked,
    /// Refused: it would take more mappings than the budget under `vm.max_map_count` allows.
    NoMaps,
    /// The kernel refused the mapping; the page is as it was.
    Failed,
}

/// What the daemon tells an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Answer to `Hello`; the control page's file descriptor comes with the packet.
    Welcome {
        /// [`VERSION`] of the daemon.
        version: u16,
    },
    /// The daemon will not serve this client; the agent says nothing to the program and tries again
    /// much later.
    Refused {
        /// Why, for the log.
        reason: String,
    },
    /// A segment of the domain's store; its file descriptor comes with the packet.
    Segment {
        /// Which.
        segment: SegmentId,
    },
    /// The segment is of no use to this client any more.
    DropSegment {
        /// Which.
        segment: SegmentId,
    },
    /// Map these runs, if their pages equal the targets.
    Merge(Merge),
    /// Tell the digests of these pages.
    Digest(Digest),
    /// Unmerge everything and give every region back.
    Detach,
    /// Where the guest's RAM lies.
    Ram(Vec<recycle::Extent>),
    /// Recycle what the guest has marked.
    Recycle {
        /// CPU time that it may take, in nanoseconds.
        budget_ns: u64,
    },
}

/// A batch: runs of one region, ascending and disjoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// The batch; reports name it.
    pub batch: u64,
    /// The region.
    pub region: RegionId,
    /// At most [`MAX_BATCH_RUNS`] runs of at most [`MAX_BATCH_PAGES`] pages together.
    pub runs: Vec<MergeRun>,
    /// Pages that were written since the last scan are skipped ([`Outcome::Differs`]): their writer
    /// may write again, and would wait.
    pub calm: bool,
}

/// Pages of one region whose digests are wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    /// The answer names it.
    pub request: u64,
    /// The region.
    pub region: RegionId,
    /// Seed of the digests.
    pub seed: u64,
    /// At most [`MAX_DIGESTS`] pages, ascending and disjoint.
    pub runs: Vec<Run>,
}

/// Consecutive pages to be merged with consecutive frames, or with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeRun {
    /// The pages.
    pub run: Run,
    /// What they are thought to equal.
    pub target: Target,
}

/// What a run is merged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// Frames from this slot on.
    Frames {
        /// The segment.
        segment: SegmentId,
        /// Slot of the first page's frame.
        slot: Slot,
    },
    /// Zeros: the pages become untouched anonymous memory.
    Zero,
}

/// A packet that is no message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The bytes do not decode.
    #[error("a packet of {len} bytes is no message of protocol version {VERSION}")]
    Malformed {
        /// Bytes in the packet.
        len: usize,
    },
    /// A list is longer than the protocol allows, out of order, or a number is out of bounds.
    #[error("a message breaks the protocol: {0}")]
    Invalid(&'static str),
}

/// Encodes a message as one packet.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    // Serialising plain data into a growing vector has no way to fail.
    postcard::to_allocvec(message).unwrap_or_default()
}

/// Decodes one packet from an agent. The result is well-formed, not trusted: regions and frames are
/// the caller's to check.
pub fn decode_to_daemon(packet: &[u8]) -> Result<ToDaemon, DecodeError> {
    let message = decode(packet)?;
    let bounded = match &message {
        ToDaemon::RegionAdded { start, len, .. } => {
            let page = kmem::PAGE_SIZE as u64;
            *len > 0
                && start % page == 0
                && len % page == 0
                && len / page <= u64::from(u32::MAX)
                && start.checked_add(*len).is_some_and(|end| end < 1 << 57)
        }
        ToDaemon::RegionShrunk { run, .. } | ToDaemon::Discarded { run, .. } => run.is_bounded(),
        ToDaemon::Digests(answer) => answer.digests.len() <= MAX_DIGESTS as usize,
        ToDaemon::Report(report) => report.outcomes.iter().all(|outcome| outcome.run.is_bounded()),
        ToDaemon::Pool(pool) => recycle::extents_are_sound(&pool.extents),
        ToDaemon::Recycled(recycled) => recycle::runs_are_sound(&recycled.runs),
        _ => true,
    };
    if bounded { Ok(message) } else { Err(DecodeError::Invalid("a range is out of bounds")) }
}

/// Decodes one packet from the daemon; a batch that comes out is ascending, disjoint and within the
/// limits.
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

    fn merge(runs: Vec<MergeRun>) -> Vec<u8> {
        encode(&ToAgent::Merge(Merge { batch: 1, region: RegionId(2), runs, calm: false }))
    }

    fn run(page: u32, len: u32, slot: u32) -> MergeRun {
        MergeRun { run: Run::new(PageNo(page), len), target: Target::Frames { segment: 9, slot: Slot(slot) } }
    }

    #[test]
    fn messages_survive_the_wire() {
        let hello = ToDaemon::Hello { version: VERSION, domain: Some("a".into()), name: "qemu".into(), forks: 3 };
        assert_eq!(decode_to_daemon(&encode(&hello)).unwrap(), hello);
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
        assert!(most.len() <= MAX_MESSAGE && decode_to_daemon(&most).is_ok());
        assert!(decode_to_daemon(&told(MAX_DIGESTS as usize + 1)).is_err());
    }

    #[test]
    fn regions_are_page_aligned_and_in_the_address_space() {
        let added = |start, len| encode(&ToDaemon::RegionAdded { region: RegionId(1), start, len });
        assert!(decode_to_daemon(&added(4096, 8192)).is_ok());
        for (start, len) in [(1, 4096), (4096, 1), (4096, 0), (u64::MAX - 4095, 4096), (0, !4095)] {
            assert!(decode_to_daemon(&added(start, len)).is_err(), "{start} {len}");
        }
    }
}
