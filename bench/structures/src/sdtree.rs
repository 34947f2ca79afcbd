//! `sdtree`: the SD tree and its rivals on pages as keys.
//!
//! All subjects hold the same keys, which lie in one mapping, and answer the same questions in
//! turn; medians of several rounds. Times are per call and thread. The subjects: `sdtree` ours;
//! `skiplist`, `scc-treeindex`, `concurrent-map`, `rwlock-btreemap` and `rwlock-rbtree` (a
//! red-black tree over page pointers, as KSM has) are ordered and compare bytes; `papaya-xxh3`
//! hashes the page and compares bytes at a hit; `compare-only` knows the answer and only compares.

mod guest;
mod measure;
mod pages;
mod scale;
mod subjects;

use std::time::Instant;

use anyhow::{Result, ensure};

use self::measure::{Plan, median};
use self::pages::{Case, Layout, PAGE, Pages};
use self::subjects::Subject;
use bench_common::report::Row;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only these cases [default: easy, zero-prefix, late and pages]
    #[arg(long, value_enum)]
    case: Vec<Case>,
    /// Number of keys [default: 1,000,000 pages; 100,000,000 of 8 bytes]
    #[arg(long)]
    keys: Option<usize>,
    /// Only these subjects
    #[arg(long)]
    subject: Vec<String>,
}

const BENCH: &str = "sdtree";
const DEFAULT: [Case; 4] = [Case::Easy, Case::ZeroPrefix, Case::Late, Case::Pages];

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut mapping = None;
    let cases = if options.case.is_empty() { &DEFAULT[..] } else { &options.case };
    for &case in cases {
        match case {
            Case::Scale => {
                rows.extend(scale::scale(options.keys.unwrap_or(if quick { 2_000_000 } else { 100_000_000 })))
            }
            _ => match compare(case, options, quick, &mut mapping) {
                Err(error) if case == Case::Pages => eprintln!("SKIPPED pages: {error:#}"),
                result => rows.extend(result?),
            },
        }
    }
    Ok(rows)
}

fn plan(keys: usize, quick: bool) -> Plan {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (rounds, most) = if quick { (3, 3_200) } else { (5, 9_600) };
    // A mix of calls must leave nothing behind.
    let calls = (keys / 10 / threads).min(most).next_multiple_of(10);
    let layout = Layout { fixed: keys - calls * threads, keys, queries: rounds * threads * calls };
    Plan { layout, rounds, calls, threads }
}

/// Key bits that a query examines, as a part of the key's bits up to the deciding one; the mean of
/// 1000 hits. `None`: the subject does not count them.
fn mean_examined(subject: &dyn Subject, pages: &Pages, layout: Layout) -> Option<f64> {
    let ratio = |i| subject.examined(pages.key(layout.hit(i % layout.queries)));
    let examined: Vec<f64> = (0..1000).filter_map(ratio).collect();
    (!examined.is_empty()).then(|| examined.iter().sum::<f64>() / examined.len() as f64)
}

/// One case, all subjects.
fn compare(case: Case, options: &Options, quick: bool, mapping: &mut Option<Pages>) -> Result<Vec<Row>> {
    let asked = options.keys.unwrap_or(if quick { 100_000 } else { 1_000_000 });
    ensure!(asked >= 1000, "--keys {asked}: at least 1000");
    let start = Instant::now();
    let guests = if case == Case::Pages { Some(guest::Contents::read()?) } else { None };
    let plan = match &guests {
        Some(guests) => guests.plan(asked, |keys| plan(keys, quick)),
        None => plan(asked, quick),
    };
    let layout = plan.layout;
    let mapping = match mapping {
        Some(there) if there.len() >= layout.pages() => there,
        other => other.insert(Pages::new(layout.pages())?),
    };
    match &guests {
        Some(guests) => guests.fill(mapping, layout),
        None => pages::make(case, mapping, layout),
    }
    drop(guests);
    let pages = &*mapping;
    let name = clap::ValueEnum::to_possible_value(&case).map_or_else(String::new, |value| value.get_name().to_owned());
    let wanted = |name: &str| options.subject.is_empty() || options.subject.iter().any(|subject| subject == name);
    let subjects: Vec<_> = subjects::all(pages, layout).into_iter().filter(|subject| wanted(subject.name())).collect();
    let row = |subject: &str, threads, metric, value, unit| {
        let s = if threads == 1 { "" } else { "s" };
        let case = format!("{name}, {} keys of {PAGE} bytes, {threads} thread{s}", layout.keys);
        Row { bench: BENCH, case, subject: subject.to_owned(), threads, metric, value, unit }
    };
    let mut rows = Vec::new();
    for subject in subjects.iter().filter(|subject| !subject.only_hits()) {
        let before = allocated();
        measure::build(&**subject, pages, plan);
        let bytes = subject.bytes().unwrap_or_else(|| allocated() - before);
        rows.push(row(subject.name(), 1, "bytes_per_key", bytes as f64 / layout.fixed as f64, "B"));
        if let Some(mean) = mean_examined(&**subject, pages, layout) {
            rows.push(row(subject.name(), 1, "key_bits_examined_ratio", mean, "x"));
        }
    }
    eprintln!("pageone-bench: {name}: built after {:.1} s", start.elapsed().as_secs_f64());
    let times = measure::rounds(&subjects, pages, plan);
    eprintln!("pageone-bench: {name}: measured after {:.1} s", start.elapsed().as_secs_f64());
    for (&(metric, threads, subject), values) in &times {
        rows.push(row(subjects[subject].name(), threads, metric.name, median(values), "ns"));
        if threads > 1
            && let Some(one) = times.get(&(metric, 1, subject))
        {
            let scaling: Vec<f64> = one.iter().zip(values).map(|(one, many)| one * threads as f64 / many).collect();
            rows.push(row(subjects[subject].name(), threads, metric.scaling, median(&scaling), "x"));
        }
    }
    rows.extend(ratios(&rows, &subjects));
    let before = rows.len();
    rows.retain(|row| !row.value.is_nan());
    if rows.len() < before {
        eprintln!("pageone-bench: {name}: some figures are left out: all threads were never running at once");
    }
    Ok(rows)
}

/// How many times as long the best ordered rival takes, and the hash map.
fn ratios(rows: &[Row], subjects: &[Box<dyn subjects::Subject + '_>]) -> Vec<Row> {
    let ordered: Vec<&str> =
        subjects.iter().filter(|subject| subject.ordered()).map(|subject| subject.name()).collect();
    let mut out = Vec::new();
    for ours in rows.iter().filter(|row| row.subject == "sdtree") {
        for metric in measure::METRICS.iter().filter(|metric| metric.name == ours.metric) {
            let theirs = |row: &&Row| row.case == ours.case && row.metric == metric.rival;
            let best = rows.iter().filter(theirs).filter(|row| ordered.contains(&row.subject.as_str()));
            let best = best.map(|row| row.value).reduce(f64::min);
            let hash = rows.iter().filter(theirs).find(|row| row.subject == subjects::HASH_MAP).map(|row| row.value);
            for (metric, value) in [(metric.to_ordered, best), (metric.to_hash_map, hash)] {
                out.extend(value.map(|value| Row { metric, value: value / ours.value, unit: "x", ..ours.clone() }));
            }
        }
    }
    out
}

/// Bytes that the allocator has given out.
#[allow(unsafe_code)] // mallinfo2(3)
fn allocated() -> u64 {
    // SAFETY: the call only reads the allocator's counts.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as u64
}
