//! From counts to figures.

mod sums;

use serde::Serialize;

use crate::cost::{Merging, Pages};
use crate::counter::Tally;
use crate::index::Index;
use crate::target::{LeftOut, Note};

use sums::Sums;

/// One target. Counts are of chunks.
#[derive(Clone, Debug, Serialize)]
pub struct TargetReport {
    /// Its name.
    pub target: String,
    /// `process`, `guest`, `file` or `directory`.
    pub kind: &'static str,
    /// The program of a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// What the guest in it calls itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// Chunks scanned.
    pub chunks: u64,
    /// Chunks of zeros.
    pub zero: u64,
    /// Chunks with contents that occur several times in this target, and in no other.
    pub shared_within: u64,
    /// Two standard deviations of `shared_within`, if it is an estimate.
    pub shared_within_plus_minus: u64,
    /// Chunks with contents that other targets have too.
    pub shared_with_others: u64,
    /// Two standard deviations of `shared_with_others`, if it is an estimate.
    pub shared_with_others_plus_minus: u64,
    /// Chunks with contents that occur once.
    pub unique: u64,
    /// The most mappings that PageONE would need for the shared chunks.
    pub mappings: u64,
}

/// What two targets have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// One target.
    pub a: String,
    /// The other target.
    pub b: String,
    /// Contents of both, each counted once: the chunks that sharing between the two would save.
    pub chunks: u64,
}

/// All targets together, in KSM's words; counts are of chunks.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Total {
    /// Chunks scanned.
    pub chunks: u64,
    /// Chunks of zeros.
    pub pages_zero: u64,
    /// Contents that occur several times.
    pub pages_shared: u64,
    /// Further chunks with such contents, which would be saved.
    pub pages_sharing: u64,
    /// Two standard deviations of `pages_sharing`, if it is an estimate.
    pub pages_sharing_plus_minus: u64,
    /// Contents that occur once.
    pub pages_unshared: u64,
    /// Bytes of `pages_sharing` and `pages_zero`.
    pub saved_bytes: u64,
}

/// An estimate.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Size of a chunk.
    pub chunk_bytes: usize,
    /// 1: every content was counted. Otherwise memory was short, and one content in this many was
    /// counted. The figures are estimates then; `…_plus_minus` is their error.
    pub sampled_one_in: u64,
    /// All targets together.
    pub total: Total,
    /// The targets that were scanned.
    pub targets: Vec<TargetReport>,
    /// Pairs of targets, those with most in common first.
    pub pairs: Vec<Pair>,
    /// What KSM would save; only for chunks that are pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm: Option<Merging>,
    /// What PageONE would save; only for chunks that are pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pageone: Option<Merging>,
    /// What was not scanned.
    pub left_out: Vec<LeftOut>,
    /// What the user should know.
    pub notes: Vec<Note>,
    /// What the estimate took.
    #[serde(flatten)]
    pub took: Took,
}

/// What an estimate took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Took {
    /// Bytes read and hashed: without holes.
    pub bytes_read: u64,
    /// Memory of the index, bytes.
    pub index_bytes: u64,
    /// The most memory that this program had resident, bytes.
    pub peak_bytes: u64,
    /// Its time.
    pub seconds: f64,
    /// CPU time of this program.
    pub cpu_seconds: f64,
    /// Number of threads.
    pub threads: usize,
}

/// A scanned target, without its contents, which are in the index.
pub(crate) struct Scanned {
    pub(crate) name: String,
    pub(crate) kind: &'static str,
    pub(crate) program: Option<String>,
    pub(crate) guest: Option<String>,
    pub(crate) tally: Tally,
}

impl Report {
    /// Figures from counts. The caller fills in time, memory, notes and what was left out.
    pub(crate) fn new(scanned: Vec<Scanned>, index: &Index, chunk: usize) -> Self {
        let sums = Sums::of(index, scanned.len());
        let mut all = Tally::default();
        scanned.iter().for_each(|one| all.add(&one.tally));
        let shared = sums.sharing.value + sums.frames.value;
        let unique = (all.chunks as f64 - all.zero as f64 - shared).max(0.0);
        // The first pages of contents are in runs like later ones. If memory was short before any
        // content was seen again, nothing is known about runs.
        let per_page = mappings_per_page(&all).unwrap_or(1.0);
        let pages = Pages {
            all: all.chunks as f64,
            zero: all.zero as f64,
            frames: sums.frames.value,
            ksm_frames: sums.ksm_frames.value,
            shared,
            unique,
            mappings: shared * per_page,
        };
        let total = Total {
            chunks: all.chunks,
            pages_zero: all.zero,
            pages_shared: sums.frames.rounded(),
            pages_sharing: sums.sharing.rounded(),
            pages_sharing_plus_minus: sums.sharing.plus_minus(),
            pages_unshared: unique.round() as u64,
            saved_bytes: (sums.sharing.rounded() + all.zero) * chunk as u64,
        };
        let pairs = sums.pairs(&scanned);
        let targets = scanned.into_iter().enumerate().map(|(i, one)| target_report(one, &sums, i, per_page));
        let is_page = chunk == kmem::PAGE_SIZE;
        Self {
            chunk_bytes: chunk,
            sampled_one_in: 1 << index.level(),
            total,
            targets: targets.collect(),
            pairs,
            ksm: is_page.then(|| pages.ksm()),
            pageone: is_page.then(|| pages.pageone()),
            left_out: Vec::new(),
            notes: Vec::new(),
            took: Took { bytes_read: all.bytes_read, index_bytes: index.bytes(), ..Took::default() },
        }
    }
}

/// Mappings for a chunk with a known content; `None` without such chunks.
fn mappings_per_page(tally: &Tally) -> Option<f64> {
    (tally.repeats > 0).then(|| tally.mappings as f64 / tally.repeats as f64)
}

/// The report of target number `i`; `per_page`: mappings for a shared chunk of all targets.
fn target_report(one: Scanned, sums: &Sums, i: usize, per_page: f64) -> TargetReport {
    let (within, others) = (&sums.within[i], &sums.others[i]);
    let shared = within.rounded() + others.rounded();
    let per_page = mappings_per_page(&one.tally).unwrap_or(per_page);
    TargetReport {
        target: one.name,
        kind: one.kind,
        program: one.program,
        guest: one.guest,
        chunks: one.tally.chunks,
        zero: one.tally.zero,
        shared_within: within.rounded(),
        shared_within_plus_minus: within.plus_minus(),
        shared_with_others: others.rounded(),
        shared_with_others_plus_minus: others.plus_minus(),
        unique: (one.tally.chunks - one.tally.zero).saturating_sub(shared),
        mappings: (shared as f64 * per_page).round() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Reserved;

    fn report(contents: &[&[u64]], zero: u64) -> Report {
        let index = Index::new(1 << 30);
        let mut scanned = Vec::new();
        for (target, digests) in contents.iter().enumerate() {
            index.see(digests, target as u16, &mut Reserved::default(), &mut Vec::new());
            let tally = Tally { chunks: digests.len() as u64 + zero, zero, ..Tally::default() };
            scanned.push(Scanned { name: format!("t{target}"), kind: "file", program: None, guest: None, tally });
        }
        Report::new(scanned, &index, 4096)
    }

    #[test]
    fn every_chunk_is_in_one_column() {
        let report = report(&[&[1, 1, 2, 3, 4], &[1, 5, 5, 5, 6], &[2, 7]], 10);
        let columns = |i: usize| {
            let t = &report.targets[i];
            (t.chunks, t.zero, t.shared_within, t.shared_with_others, t.unique)
        };
        assert_eq!(columns(0), (15, 10, 0, 3, 2));
        assert_eq!(columns(1), (15, 10, 3, 1, 1));
        assert_eq!(columns(2), (12, 10, 0, 1, 1));
        let total = report.total;
        assert_eq!((total.pages_shared, total.pages_sharing, total.pages_unshared), (3, 5, 4));
        assert_eq!(total.pages_shared + total.pages_sharing + total.pages_unshared + total.pages_zero, total.chunks);
        assert_eq!(total.saved_bytes, (5 + 30) * 4096);
        assert_eq!(total.pages_sharing_plus_minus, 0);
        let pair = |a: &str, b: &str| Pair { a: a.into(), b: b.into(), chunks: 1 };
        assert_eq!(report.pairs, [pair("t0", "t1"), pair("t0", "t2")]);
        assert_eq!(report.ksm.unwrap().saved_bytes, report.pageone.unwrap().saved_bytes);
    }

    #[test]
    fn ksm_needs_a_further_frame_for_every_256_users() {
        let digests = vec![9; 600];
        let report = report(&[&digests], 0);
        assert_eq!(report.ksm.unwrap().saved_bytes, 597.0 * 4096.0);
        assert_eq!(report.pageone.unwrap().saved_bytes, 599.0 * 4096.0);
    }
}
