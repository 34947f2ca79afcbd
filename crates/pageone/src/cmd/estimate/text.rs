//! The report of `pageone estimate` as text.

use std::fmt::{Result, Write};

use estimate::Report;
use output::text::printable;

use crate::cmd::table::Column::{Number, Text};
use crate::cmd::table::Table;

/// Pairs in the text, those with most in common.
const PAIRS: usize = 10;

/// The report for a terminal.
pub(super) fn text(report: &Report, width: Option<usize>) -> String {
    let unit = if report.chunk_bytes == kmem::PAGE_SIZE {
        "pages".into()
    } else {
        format!("chunks of {} bytes", report.chunk_bytes)
    };
    let mut out = String::new();
    // Writing into a string cannot fail.
    let _ = targets(&mut out, report, &unit, width)
        .and_then(|()| pairs(&mut out, report, &unit))
        .and_then(|()| total(&mut out, report, &unit))
        .and_then(|()| costs(&mut out, report))
        .and_then(|()| means(&mut out, report));
    out
}

/// The table of targets.
fn targets(out: &mut String, report: &Report, unit: &str, width: Option<usize>) -> Result {
    if report.sampled_one_in > 1 {
        writeln!(
            out,
            "memory was short: one content in {} was counted, so what follows is an estimate; --limit-memory lets more in\n",
            report.sampled_one_in
        )?;
    }
    let chunks = if unit == "pages" { "pages" } else { "chunks" };
    let [mebibytes, chunks, zero, within, others, unique] =
        ["MiB", chunks, "zero", "shared within", "with others", "unique"].map(Number);
    let mut table = Table::new([Text("target"), mebibytes, chunks, zero, within, others, unique]);
    for one in &report.targets {
        table.row([
            short(&title(report, &one.target), 32),
            mib(report, one.chunks).to_string(),
            one.chunks.to_string(),
            one.zero.to_string(),
            with_error(one.shared_within, one.shared_within_plus_minus),
            with_error(one.shared_with_others, one.shared_with_others_plus_minus),
            one.unique.to_string(),
        ]);
    }
    out.write_str(&table.within(width))
}

/// A target as people call it: with its guest's name, or its program's.
fn title(report: &Report, target: &str) -> String {
    let one = report.targets.iter().find(|one| one.target == target);
    match one.and_then(|one| one.guest.as_ref().or(one.program.as_ref())) {
        Some(name) if name != target => printable(&format!("{target} {name}")),
        _ => printable(target),
    }
}

/// What pairs of targets have in common.
fn pairs(out: &mut String, report: &Report, unit: &str) -> Result {
    if report.pairs.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nin common, {unit} (each content once)")?;
    for pair in report.pairs.iter().take(PAIRS) {
        let (a, b) = (short(&title(report, &pair.a), 40), short(&title(report, &pair.b), 40));
        writeln!(out, "  {:>12} {:>7} MiB  {a} + {b}", pair.chunks, mib(report, pair.chunks))?;
    }
    if report.pairs.len() > PAIRS {
        writeln!(out, "  and {} more pairs: --json has them", report.pairs.len() - PAIRS)?;
    }
    Ok(())
}

/// All targets together.
fn total(out: &mut String, report: &Report, unit: &str) -> Result {
    let total = &report.total;
    writeln!(
        out,
        "\nall, {unit}: pages_shared {} · pages_sharing {} · pages_unshared {} · pages_zero {}",
        total.pages_shared,
        with_error(total.pages_sharing, total.pages_sharing_plus_minus),
        total.pages_unshared,
        total.pages_zero
    )?;
    let share = total.saved_bytes as f64 * 100.0 / (total.chunks.max(1) * report.chunk_bytes as u64) as f64;
    let (saved, all) = (total.saved_bytes >> 20, mib(report, total.chunks));
    writeln!(out, "could be saved: {saved} MiB of {all}, {share:.1} %")
}

/// What KSM and PageONE would save and cost.
fn costs(out: &mut String, report: &Report) -> Result {
    let (Some(ksm), Some(pageone)) = (&report.ksm, &report.pageone) else { return Ok(()) };
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
    Ok(())
}

/// The notes, and what the estimate took.
fn means(out: &mut String, report: &Report) -> Result {
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    let busy = report.took.cpu_seconds > 0.0;
    let rate = if busy { report.took.bytes_read as f64 / report.took.cpu_seconds / 1e9 } else { 0.0 };
    writeln!(
        out,
        "\nread {} MiB in {:.2} s, {:.2} s of CPU ({rate:.1} GB/s a core); memory: {} MiB, {} of it for the index",
        report.took.bytes_read >> 20,
        report.took.seconds,
        report.took.cpu_seconds,
        report.took.peak_bytes >> 20,
        report.took.index_bytes >> 20
    )
}

fn mib(report: &Report, chunks: u64) -> u64 {
    (chunks * report.chunk_bytes as u64) >> 20
}

fn with_error(value: u64, plus_minus: u64) -> String {
    if plus_minus == 0 { value.to_string() } else { format!("{value}±{plus_minus}") }
}

/// The end of a name, which says more than its beginning.
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

    #[test]
    fn the_text_has_targets_sums_and_both_ways_of_merging() {
        let dir = tempfile::tempdir().unwrap();
        let contents: [&[u8]; 2] = [&[1, 1, 2, 3], &[1, 2, 5]];
        let targets = contents.iter().enumerate().map(|(i, pages)| {
            let path = dir.path().join(format!("t{i}"));
            let bytes: Vec<u8> = pages.iter().flat_map(|&page| [page; kmem::PAGE_SIZE]).collect();
            std::fs::write(&path, bytes).unwrap();
            path.display().to_string()
        });
        let options = estimate::Options {
            targets: targets.collect(),
            qemu: false,
            chunk: kmem::PAGE_SIZE,
            limit_bytes: 1 << 24,
            threads: 1,
        };
        let text = text(&estimate::estimate(&options, &output::Progress::new(output::Shown::Never)).unwrap(), None);
        for word in ["/t1 ", "pages_shared 2 ", "pages_sharing 3 ", "in common, pages", "KSM ", "PageONE "] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn an_error_is_printed_only_for_estimates() {
        assert_eq!(with_error(500, 69), "500±69");
        assert_eq!(with_error(500, 0), "500");
    }

    #[test]
    fn long_names_keep_their_end() {
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("/very/long/ä.img", 6), "…ä.img");
    }
}
