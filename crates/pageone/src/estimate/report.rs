//! From what was seen to figures, and how they are printed.

use std::fmt::Write;

use serde::Serialize;

use super::cost::{self, Merging, Pages};
use super::counter::Tally;
use super::index::Index;
use super::target::LeftOut;

/// Contents in common are counted for pairs of so many targets, the first ones.
const PAIRED: usize = 256;
/// Pairs in the report, those with most in common.
const PAIRS_JSON: usize = 1000;
const PAIRS_TEXT: usize = 10;

/// A sum over contents, of which perhaps only a sample is known: with its variance.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    value: f64,
    variance: f64,
}

impl Sum {
    /// Adds `value` for a content that had a chance of 1 in `weight` to be known.
    fn add(&mut self, weight: f64, value: f64) {
        self.value += weight * value;
        self.variance += weight * (weight - 1.0) * value * value;
    }

    /// Two standard deviations: 95 times of 100 the truth is that near.
    fn plus_minus(&self) -> u64 {
        (2.0 * self.variance.sqrt()).round() as u64
    }

    fn rounded(&self) -> u64 {
        self.value.round() as u64
    }
}

/// One target. Counts are of chunks.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TargetReport {
    pub(super) target: String,
    pub(super) kind: &'static str,
    /// The program, of a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) program: Option<String>,
    /// Looked at.
    pub(super) chunks: u64,
    pub(super) zero: u64,
    /// With contents that are several times in this target, and in no other.
    pub(super) shared_within: u64,
    pub(super) shared_within_plus_minus: u64,
    /// With contents that are in other targets too.
    pub(super) shared_with_others: u64,
    pub(super) shared_with_others_plus_minus: u64,
    /// With contents that are nowhere else.
    pub(super) unique: u64,
    /// Mappings that PageONE would need at most for what is shared.
    pub(super) mappings: u64,
}

/// What two targets have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Pair {
    pub(super) a: String,
    pub(super) b: String,
    /// Contents that are in both, each counted once: what sharing between the two would save.
    pub(super) chunks: u64,
}

/// All targets together, in KSM's words; counts are of chunks.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Total {
    pub(super) chunks: u64,
    pub(super) pages_zero: u64,
    /// Contents that are there more than once.
    pub(super) pages_shared: u64,
    /// Further chunks with such contents: what is saved.
    pub(super) pages_sharing: u64,
    pub(super) pages_sharing_plus_minus: u64,
    /// Contents that are there once.
    pub(super) pages_unshared: u64,
    /// Bytes of `pages_sharing` and `pages_zero`.
    pub(super) saved_bytes: u64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) chunk_bytes: usize,
    /// 1: every content was counted. Otherwise memory was short, and one content in so many was;
    /// the figures are estimates, `…_plus_minus` says how good.
    pub(super) sampled_one_in: u64,
    pub(super) total: Total,
    pub(super) targets: Vec<TargetReport>,
    pub(super) pairs: Vec<Pair>,
    /// Only for chunks that are pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ksm: Option<Merging>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pageone: Option<Merging>,
    pub(super) left_out: Vec<LeftOut>,
    pub(super) notes: Vec<String>,
    /// Read and hashed; holes are not.
    pub(super) bytes_read: u64,
    pub(super) index_bytes: u64,
    /// The most memory that this program had resident.
    pub(super) peak_bytes: u64,
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
    pub(super) threads: usize,
}

/// What is known of a target beside its contents.
pub(super) struct Looked {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) program: Option<String>,
    pub(super) tally: Tally,
}

impl Report {
    /// Figures from what was seen. Time and what was left out are for the caller to fill in.
    pub(super) fn new(looked: Vec<Looked>, index: &Index, chunk: usize) -> Self {
        let mut within = vec![Sum::default(); looked.len()];
        let mut others = vec![Sum::default(); looked.len()];
        let (mut sharing, mut frames, mut ksm_frames) = (Sum::default(), Sum::default(), Sum::default());
        let paired = looked.len().min(PAIRED);
        let mut common = vec![0.0; paired * paired];
        index.for_each(|weight, sightings| {
            let total: u64 = sightings.iter().map(|&(_, count)| count).sum();
            if total < 2 {
                return;
            }
            frames.add(weight, 1.0);
            ksm_frames.add(weight, total.div_ceil(cost::KSM_SHARING) as f64);
            sharing.add(weight, (total - 1) as f64);
            let sums = if sightings.len() == 1 { &mut within } else { &mut others };
            for (i, &(target, count)) in sightings.iter().enumerate() {
                sums[usize::from(target)].add(weight, count as f64);
                // The list is from the latest target to the first.
                for &(earlier, _) in &sightings[i + 1..] {
                    if usize::from(target) < paired {
                        common[usize::from(earlier) * paired + usize::from(target)] += weight;
                    }
                }
            }
        });

        let mut sum = Tally::default();
        looked.iter().for_each(|one| sum.add(&one.tally));
        let shared = sharing.value + frames.value;
        // Pages that were the first with their content are in runs like those that came later.
        // Where memory was short before the first one was seen again, nothing is known of runs.
        let per_page = if sum.repeats == 0 { 1.0 } else { sum.mappings as f64 / sum.repeats as f64 };
        let unique = (sum.chunks as f64 - sum.zero as f64 - shared).max(0.0);
        let pages = Pages {
            all: sum.chunks as f64,
            zero: sum.zero as f64,
            frames: frames.value,
            ksm_frames: ksm_frames.value,
            shared,
            unique,
            mappings: shared * per_page,
        };
        let total = Total {
            chunks: sum.chunks,
            pages_zero: sum.zero,
            pages_shared: frames.rounded(),
            pages_sharing: sharing.rounded(),
            pages_sharing_plus_minus: sharing.plus_minus(),
            pages_unshared: unique.round() as u64,
            saved_bytes: (sharing.rounded() + sum.zero) * chunk as u64,
        };

        let mut pairs: Vec<Pair> = Vec::new();
        for a in 0..paired {
            for b in a + 1..paired {
                let chunks = common[a * paired + b].round() as u64;
                if chunks > 0 {
                    pairs.push(Pair { a: looked[a].name.clone(), b: looked[b].name.clone(), chunks });
                }
            }
        }
        pairs.sort_by_key(|pair| std::cmp::Reverse(pair.chunks));
        pairs.truncate(PAIRS_JSON);

        let targets = looked.into_iter().zip(within.iter().zip(&others));
        let targets = targets.map(|(one, (within, others))| {
            let Tally { chunks, zero, repeats, mappings, .. } = one.tally;
            let shared = within.rounded() + others.rounded();
            let per_page = if repeats == 0 { per_page } else { mappings as f64 / repeats as f64 };
            TargetReport {
                target: one.name,
                kind: one.kind,
                program: one.program,
                chunks,
                zero,
                shared_within: within.rounded(),
                shared_within_plus_minus: within.plus_minus(),
                shared_with_others: others.rounded(),
                shared_with_others_plus_minus: others.plus_minus(),
                unique: (chunks - zero).saturating_sub(shared),
                mappings: (shared as f64 * per_page).round() as u64,
            }
        });
        let is_page = chunk == kmem::PAGE_SIZE;
        Report {
            chunk_bytes: chunk,
            sampled_one_in: 1 << index.level(),
            total,
            targets: targets.collect(),
            pairs,
            ksm: is_page.then(|| pages.ksm()),
            pageone: is_page.then(|| pages.pageone()),
            left_out: Vec::new(),
            notes: Vec::new(),
            bytes_read: sum.bytes_read,
            index_bytes: index.bytes(),
            peak_bytes: 0,
            seconds: 0.0,
            cpu_seconds: 0.0,
            threads: 0,
        }
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        // Writing into a string has no way to fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let unit = if self.chunk_bytes == kmem::PAGE_SIZE {
            "pages".into()
        } else {
            format!("chunks of {} bytes", self.chunk_bytes)
        };
        let total = &self.total;
        if self.sampled_one_in > 1 {
            writeln!(
                out,
                "memory was short: one content in {} was counted, so what follows is an estimate; --limit-memory lets more in\n",
                self.sampled_one_in
            )?;
        }
        writeln!(
            out,
            "{:<32} {:>9} {:>12} {:>12} {:>14} {:>14} {:>12}",
            "target",
            "MiB",
            unit.split(' ').next().unwrap_or_default(),
            "zero",
            "shared within",
            "with others",
            "unique"
        )?;
        for one in &self.targets {
            let name = match &one.program {
                Some(program) => format!("{} {program}", one.target),
                None => one.target.clone(),
            };
            writeln!(
                out,
                "{:<32} {:>9} {:>12} {:>12} {:>14} {:>14} {:>12}",
                short(&name, 32),
                self.mib(one.chunks),
                one.chunks,
                one.zero,
                with_error(one.shared_within, one.shared_within_plus_minus),
                with_error(one.shared_with_others, one.shared_with_others_plus_minus),
                one.unique
            )?;
        }
        if !self.pairs.is_empty() {
            writeln!(out, "\nin common, {unit} (each content once)")?;
            for pair in self.pairs.iter().take(PAIRS_TEXT) {
                writeln!(
                    out,
                    "  {:>12} {:>7} MiB  {} + {}",
                    pair.chunks,
                    self.mib(pair.chunks),
                    short(&pair.a, 40),
                    short(&pair.b, 40)
                )?;
            }
            if self.pairs.len() > PAIRS_TEXT {
                writeln!(out, "  and {} more pairs: --json has them", self.pairs.len() - PAIRS_TEXT)?;
            }
        }
        writeln!(
            out,
            "\nall, {unit}: pages_shared {} · pages_sharing {} · pages_unshared {} · pages_zero {}",
            total.pages_shared,
            with_error(total.pages_sharing, total.pages_sharing_plus_minus),
            total.pages_unshared,
            total.pages_zero
        )?;
        let share = total.saved_bytes as f64 * 100.0 / (total.chunks.max(1) * self.chunk_bytes as u64) as f64;
        writeln!(out, "could be saved: {} MiB of {}, {share:.1} %", total.saved_bytes >> 20, self.mib(total.chunks))?;
        if let (Some(ksm), Some(pageone)) = (&self.ksm, &self.pageone) {
            writeln!(
                out,
                "\n{:<8} {:>12} {:>12} {:>22} {:>16} {:>16}",
                "", "saves MiB", "costs MiB", "general_profit MiB", "CPU to merge s", "CPU a scan s"
            )?;
            for (name, m) in [("KSM", ksm), ("PageONE", pageone)] {
                let mib = |bytes: f64| bytes / f64::from(1 << 20);
                writeln!(
                    out,
                    "{name:<8} {:>12.0} {:>12.1} {:>22.0} {:>16.2} {:>16.4}",
                    mib(m.saved_bytes),
                    mib(m.own_bytes),
                    mib(m.general_profit),
                    m.merge_cpu_seconds,
                    m.scan_cpu_seconds
                )?;
            }
        }
        for note in &self.notes {
            writeln!(out, "note: {note}")?;
        }
        let rate = if self.cpu_seconds > 0.0 { self.bytes_read as f64 / self.cpu_seconds / 1e9 } else { 0.0 };
        writeln!(
            out,
            "\nread {} MiB in {:.2} s, {:.2} s of CPU ({rate:.1} GB/s a core); memory: {} MiB, {} of it for the index",
            self.bytes_read >> 20,
            self.seconds,
            self.cpu_seconds,
            self.peak_bytes >> 20,
            self.index_bytes >> 20
        )
    }

    fn mib(&self, chunks: u64) -> u64 {
        (chunks * self.chunk_bytes as u64) >> 20
    }
}

fn with_error(value: u64, plus_minus: u64) -> String {
    if plus_minus == 0 { value.to_string() } else { format!("{value}±{plus_minus}") }
}

/// The end of a name tells more than its beginning.
fn short(name: &str, width: usize) -> String {
    let len = name.chars().count();
    if len <= width {
        return name.into();
    }
    let tail: String = name.chars().skip(len - (width - 1)).collect();
    format!("…{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::index::Taker;

    fn report(contents: &[&[u64]], zero: u64) -> Report {
        let index = Index::new(1 << 30);
        let mut looked = Vec::new();
        for (target, digests) in contents.iter().enumerate() {
            index.see(digests, target as u16, &mut Taker::default(), &mut Vec::new());
            let tally = Tally { chunks: digests.len() as u64 + zero, zero, ..Tally::default() };
            looked.push(Looked { name: format!("t{target}"), kind: "file", program: None, tally });
        }
        Report::new(looked, &index, 4096)
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
        for word in ["t1", "pages_sharing 5 ", "KSM", "PageONE"] {
            assert!(report.text().contains(word), "{word} in {}", report.text());
        }
    }

    #[test]
    fn ksm_needs_a_further_frame_for_every_256_users() {
        let digests = vec![9; 600];
        let report = report(&[&digests], 0);
        assert_eq!(report.ksm.unwrap().saved_bytes, 597.0 * 4096.0);
        assert_eq!(report.pageone.unwrap().saved_bytes, 599.0 * 4096.0);
    }

    #[test]
    fn an_exact_sum_has_no_error_and_a_sampled_one_has() {
        let mut sum = Sum::default();
        sum.add(1.0, 100.0);
        assert_eq!((sum.rounded(), sum.plus_minus()), (100, 0));
        (0..100).for_each(|_| sum.add(4.0, 1.0));
        // Variance 100 · 4 · 3.
        assert_eq!((sum.rounded(), sum.plus_minus()), (500, 69));
        assert_eq!(with_error(500, 69), "500±69");
    }

    #[test]
    fn long_names_keep_their_end() {
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("/very/long/ä.img", 6), "…ä.img");
    }
}
