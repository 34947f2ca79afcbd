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
//!   Mapped, Library, CpuTime, Zeros … ─────▶   proves whose memory it is
//!                    ◀──────────────────────── Segment + fd   (before its first use)
//!                    ◀──────────────────────── Digest
//!   Digests ───────────────────────────────▶
//!                    ◀──────────────────────── Merge
//!   Report (one for each window) ──────────▶
//!   Discarded / RegionShrunk (any time) ───▶
//! ```
//!
//! The two sides may be builds of different versions: `version.rs` says what they then speak, and
//! what a new version may change.
//!
//! Neither side trusts the other: decoding is bounded, and what a message asks for is checked
//! against the receiver's own tables before it is done.

pub mod recycle;
pub mod template;

mod codec;
mod page;
mod policy;
mod snapshot;
mod version;

use serde::{Deserialize, Serialize};

pub use codec::{DecodeError, decode_to_agent, decode_to_daemon, encode};
pub use page::{PageNo, RegionId, Run, Slot};
pub use policy::{HugePages, UnknownPolicy};
pub use snapshot::{Part, decode_parts, encode_parts};
pub use version::{OLDEST, VERSION, VersionError, agreed};

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
/// Device and inode, in decimal with a colon between them, of the file that QEMU maps for its RAM.
/// The agent maps private memory in its place.
pub const ENV_SNAPSHOT_RAM: &str = "PAGEONE_SNAPSHOT_RAM";
/// Numbers of descriptors with commas between them: a pipe that gets a byte when the agent has put
/// the snapshot's RAM into that memory, a file with the parts of that ([`encode_parts`]), and the
/// segments with the RAM, in order.
pub const ENV_SNAPSHOT_LOAD: &str = "PAGEONE_SNAPSHOT_LOAD";
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
    /// Offset of two words that the daemon writes and reads back through `/proc/PID/mem`, at the
    /// address that [`ToDaemon::Mapped`](super::ToDaemon::Mapped) names. They tell it whose memory
    /// the descriptor reads. Later it writes the first one before each `process_vm_readv(2)`, and
    /// reads it in that call.
    pub const NONCE: usize = 16;
    /// Offset of an `AtomicU64`: 1 while no memory of this host has failed, as far as the daemon
    /// knows; 0 if some has, or that is not known. It is written before each batch is sent. Then
    /// the agent need not ask the kernel for each frame whether it can be read.
    pub const SOUND: usize = 32;
}

/// A segment of a store: the inode number of its memfd, which also stands in `/proc/PID/maps`.
pub type SegmentId = u64;

/// What an agent tells the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first message. The daemon knows the process by the socket's credentials.
    Hello {
        /// The newest version that the agent speaks; it speaks the one before, too.
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
    /// A segment that this client holds, from an earlier daemon or of its snapshot; its file
    /// descriptor comes with the packet.
    SegmentHeld {
        /// Which.
        segment: SegmentId,
    },
    /// All regions and segments were sent. The daemon answers with `Welcome`, and waits for
    /// [`ToDaemon::Mapped`].
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
    /// These pages left management, and may still map frames, or lie in a mapping of a segment:
    /// they were moved or protected past the agent, or a device may write to them. The program
    /// keeps them; the frames that they map must keep their bytes for as long as their segment
    /// lives.
    Retained {
        /// The region.
        region: RegionId,
        /// The pages.
        run: Run,
    },
    /// The program has so few descriptors that this segment was left out: no page can be merged
    /// with frames of it.
    SegmentLeftOut {
        /// Which.
        segment: SegmentId,
        /// Segments that the agent keeps at most.
        most: u32,
    },
    /// A detach goes on.
    Detaching(Detaching),
    /// The detach has failed; the memory stays managed.
    DetachFailed {
        /// The kernel's error.
        errno: i32,
    },
    /// Everything was given back; the agent will not connect again.
    Detached,
    /// The guest marks its free pages; the pool's descriptor comes with the packet.
    Pool(recycle::Pool),
    /// Pages were recycled.
    Recycled(recycle::Recycled),
    /// A sweep has ended.
    Swept(recycle::Sweep),
    /// Ends the handshake: the control page is mapped.
    Mapped {
        /// The address of its first byte in the agent's process.
        address: u64,
    },
    /// Which build of the library the program has loaded: it outlives upgrades. (Version 6.)
    Library {
        /// The version of its package.
        version: String,
    },
    /// Answer to [`ToAgent::RenewPool`]: the new pool's descriptor comes with the packet.
    /// (Version 7.)
    PoolRenewed {
        /// The number of that descriptor in the agent's process.
        descriptor: u32,
    },
    /// After the handshake: CPU time that the agent's threads have used since the program started.
    /// (Version 8.)
    CpuTime {
        /// In nanoseconds.
        cpu_ns: u64,
    },
    /// After the handshake: pages that were given back as zeros before, and are untouched since.
    /// [`ToDaemon::Recycled`] names those that were recycled. (Version 8.)
    Zeros(recycle::Recycled),
}

/// What a detach waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detaching {
    /// Copies in mappings of segments that are cooling down.
    pub cooling: u64,
    /// How long at most, in milliseconds; then what is not cool stays where it is.
    pub wait_ms: u64,
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
    /// The page cannot be read: it is gone, or poisoned by a memory error. It was left alone.
    Unreadable,
}

/// What the daemon tells an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Answer to `Hello`; the control page's file descriptor comes with the packet.
    Welcome {
        /// The version that this connection speaks.
        version: u16,
        /// Longest time that one direct I/O request into the client's memory may take, in
        /// milliseconds. A copy in a mapping of a segment may be replaced only when it was not
        /// written for so long.
        direct_io_ms: u32,
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
    /// Unmerge everything and give every region back. The daemon neither scans nor merges the
    /// client from then on: the kernel's notes of writes are the agent's.
    Detach,
    /// Where the guest's RAM lies.
    Ram(Vec<recycle::Extent>),
    /// Recycle what the guest has marked.
    Recycle {
        /// CPU time that it may take, in nanoseconds.
        budget_ns: u64,
    },
    /// Forget the pool and every mark in it, and make a new, empty one of the same length.
    /// (Version 7.)
    RenewPool,
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
