//! The messages about recycling.
//!
//! ```text
//! agent                                          daemon
//!   Pool + fd of the pool (+ fd of QMP) ─────────▶
//!                           ◀───────────────────── Ram       (only if the agent did not know it)
//!                           ◀───────────────────── Recycle   (each period, if pages were freed)
//!   Recycled … Swept ────────────────────────────▶
//!                           ◀───────────────────── RenewPool (when the device is unplugged, and
//!   PoolRenewed + fd of the new pool ────────────▶            before one is plugged in)
//! ```

use std::ops::Range as Frames;

use serde::{Deserialize, Serialize};

use crate::{RegionId, Run};

/// The most extents that RAM can have.
pub const MAX_EXTENTS: usize = 64;
/// The most runs in one [`Recycled`]: each takes up to 10 bytes of a packet.
pub const MAX_RUNS: usize = 4096;

/// Number of the pool's file descriptor, in the environment of a program that `pageone run --ppr`
/// starts.
pub const ENV_POOL: &str = "PAGEONE_PPR_POOL";
/// Number of our end of a connected QMP socket, likewise.
pub const ENV_QMP: &str = "PAGEONE_PPR_QMP";
/// The same two for the daemon, where the program's memory is a file of `pageonefs`. They have
/// names of their own: an agent that is loaded later must not take the monitor, too.
pub const ENV_FILE_POOL: &str = "PAGEONE_PPR_FILE_POOL";
/// See [`ENV_FILE_POOL`].
pub const ENV_FILE_QMP: &str = "PAGEONE_PPR_FILE_QMP";
/// QEMU's name of the device whose memory is the pool. It may come and go.
pub const QEMU_DEVICE: &str = "pageone-ppr";
/// How QEMU's names of the objects behind the device begin. Each has a name of its own: QEMU ends
/// where a name comes again before its memory is gone.
pub const QEMU_POOL: &str = "pageone-ppr-pool-";
/// QEMU's name of the port that the device is plugged into, where a machine needs one.
pub const QEMU_PORT: &str = "pageone-ppr-port";
/// QEMU's name of a disk without content, which is there while the device is. It can hold no
/// snapshots, so that QEMU refuses `loadvm`: that would bring back memory to which the marks do not
/// belong. People read the name in QEMU's answer.
pub const QEMU_GUARD: &str = "pageone-ppr-pause-first";
/// The name in QEMU of the monitor by which the device comes and goes.
pub const QEMU_QMP: &str = "pageone-qmp";

/// Reclaim period that the program asks for, in milliseconds; without it, the daemon's.
pub const ENV_PERIOD: &str = "PAGEONE_PPR_PERIOD_MS";

/// Consecutive guest frames that lie in consecutive pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First guest frame.
    pub frame: u64,
    /// The region.
    pub region: RegionId,
    /// The pages.
    pub run: Run,
}

impl Extent {
    /// The frames.
    pub fn frames(&self) -> Frames<u64> {
        self.frame..self.frame + u64::from(self.run.len)
    }

    /// The pages of regions that a run of guest frames lies in. `extents` ascend by frame; frames
    /// that lie in none of them are left out.
    pub fn pages_of(extents: &[Extent], frames: &Frames<u64>) -> impl Iterator<Item = (RegionId, Run)> {
        let Frames { start, end } = *frames;
        let first = extents.partition_point(|extent| extent.frames().end <= start);
        extents[first..].iter().take_while(move |extent| extent.frame < end).map(move |extent| {
            let (start, end) = (start.max(extent.frame), end.min(extent.frames().end));
            let page = extent.run.page + (start - extent.frame) as u32;
            (extent.region, Run::new(page, (end - start) as u32))
        })
    }
}

/// A pool that the client's guest marks its free pages in; its descriptor comes with the packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Where the guest's RAM lies, ascending by frame. Empty: not known yet; then a connected QMP
    /// socket comes too, and the daemon answers with [`crate::ToAgent::Ram`]. From version 7 on the
    /// socket always comes, if there is one.
    pub extents: Vec<Extent>,
    /// Reclaim period that the client asks for, in milliseconds; 0: the daemon's.
    pub period_ms: u32,
}

/// These pages were recycled: they are untouched anonymous memory now and map no frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recycled {
    /// The region.
    pub region: RegionId,
    /// The pages, at most [`MAX_RUNS`] runs.
    pub runs: Vec<Run>,
}

/// A sweep has ended. Every [`crate::ToAgent::Recycle`] gets one such answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sweep {
    /// Pages recycled.
    pub pages: u64,
    /// Runs that they came in.
    pub runs: u64,
    /// Pages that the guest took back before they were claimed.
    pub lost: u64,
    /// The longest time that pages were claimed, in nanoseconds: a guest that needs one of them
    /// waits no longer.
    pub longest_ns: u64,
    /// CPU time of the sweep, in nanoseconds.
    pub sweep_ns: u64,
    /// CPU time that the agent's threads have used since the program started, in nanoseconds.
    pub cpu_ns: u64,
    /// The budget was spent before everything had been looked at.
    pub more: bool,
    /// Why nothing was recycled.
    pub refused: Option<Refusal>,
}

/// Why an agent does not recycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The process has pinned memory: a device would go on with the old frames.
    Pinned,
    /// The process has locked memory, which cannot be given back.
    Locked,
    /// The kernel would not take the pages back.
    Kernel,
    /// The pool's header is not what the host wrote: the guest is dropped.
    Header,
    /// There is no pool, or no map of the guest's RAM.
    NoPool,
}

impl Refusal {
    /// Whether it holds until the client ends.
    pub fn is_final(self) -> bool {
        matches!(self, Refusal::Header)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Pinned => "the process has pinned memory (VmPin): a device holds on to its frames",
            Refusal::Locked => "the process has locked memory (VmLck), which cannot be given back",
            Refusal::Kernel => "the kernel refused to take pages back (MADV_DONTNEED)",
            Refusal::Header => {
                "its guest has overwritten the pool's header; it is dropped from recycling until it is started again"
            }
            Refusal::NoPool => "its agent has no pool, or does not know where the guest's RAM lies",
        })
    }
}

/// Whether extents are ascending, disjoint in frames, bounded and not too many.
pub(crate) fn extents_are_sound(extents: &[Extent]) -> bool {
    let mut end = 0;
    extents.len() <= MAX_EXTENTS
        && extents.iter().all(|extent| {
            let sound = extent.frame >= end && extent.run.len > 0 && extent.frame < 1 << 52 && extent.run.is_bounded();
            end = extent.frame.saturating_add(extent.run.len.into());
            sound
        })
}

/// Whether runs are bounded and not too many.
pub(crate) fn runs_are_sound(runs: &[Run]) -> bool {
    runs.len() <= MAX_RUNS && runs.iter().all(Run::is_bounded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageNo, ToAgent, ToDaemon, VERSION, decode_to_agent, decode_to_daemon, encode};

    fn extent(frame: u64, page: u32, len: u32) -> Extent {
        Extent { frame, region: RegionId(1), run: Run::new(PageNo(page), len) }
    }

    #[test]
    fn extents_are_ascending_disjoint_and_bounded() {
        let decodes = |extents: Vec<Extent>| {
            let pool = Pool { extents: extents.clone(), period_ms: 0 };
            let there = decode_to_daemon(&encode(&ToDaemon::Pool(pool)), VERSION).is_ok();
            assert_eq!(there, decode_to_agent(&encode(&ToAgent::Ram(extents))).is_ok());
            there
        };
        assert!(decodes(vec![extent(256, 256, 100), extent(1 << 20, 400, 5)]));
        assert!(!decodes(vec![extent(256, 0, 100), extent(300, 400, 5)]), "overlap");
        assert!(!decodes(vec![extent(256, 0, 0)]), "empty");
        assert!(!decodes(vec![extent(0, u32::MAX, 2)]), "pages wrap");
        assert!(!decodes(vec![extent(u64::MAX, 0, 2)]), "frames wrap");
        assert!(!decodes((0..=MAX_EXTENTS as u64).map(|i| extent(i, 0, 1)).collect()), "too many");
    }

    #[test]
    fn runs_of_frames_are_cut_at_extents() {
        let run = |start, len| Run::new(PageNo(start), len);
        let extents = [
            Extent { frame: 256, region: RegionId(1), run: run(256, 100) },
            Extent { frame: 356, region: RegionId(2), run: run(7, 10) },
            Extent { frame: 1000, region: RegionId(1), run: run(400, 50) },
        ];
        let of = |frames: Frames<u64>| {
            Extent::pages_of(&extents, &frames).map(|(region, run)| (region.0, run)).collect::<Vec<_>>()
        };
        assert_eq!(of(300..310), [(1, run(300, 10))]);
        assert_eq!(of(350..360), [(1, run(350, 6)), (2, run(7, 4))]);
        assert_eq!(of(360..1001), [(2, run(11, 6)), (1, run(400, 1))]);
        assert!(of(0..256).is_empty() && of(366..1000).is_empty() && of(1050..2000).is_empty());
    }

    #[test]
    fn as_many_runs_as_are_allowed_fit_into_a_packet() {
        let recycled = |count| {
            let runs = vec![Run::new(PageNo(u32::MAX - 9), 9); count];
            encode(&ToDaemon::Recycled(Recycled { region: RegionId(u32::MAX), runs }))
        };
        assert!(
            recycled(MAX_RUNS).len() <= crate::MAX_MESSAGE && decode_to_daemon(&recycled(MAX_RUNS), VERSION).is_ok()
        );
        assert!(decode_to_daemon(&recycled(MAX_RUNS + 1), VERSION).is_err());
        let run = Run::new(PageNo(u32::MAX), 2);
        let message = ToDaemon::Recycled(Recycled { region: RegionId(1), runs: vec![run] });
        assert!(decode_to_daemon(&encode(&message), VERSION).is_err(), "pages wrap");
    }
}
