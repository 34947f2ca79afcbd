//! `dedup`: the index of a pool's pages at scale, and the maps of large guests.
//!
//! - `index`: as many unique pages as a pool of `--tib` TiB has, by simulated hashes, with the
//!   limits that checkpoints have. The index is in a real pool; the data mblocks are not there,
//!   and their hashes are computed.
//! - `clone`: pages of the pool in its order. `runs-N`: in random order, in runs of N pages on
//!   average, among as many new ones. `found_percent` is the share of the pool's pages that is
//!   found; the rest is stored once more. Each begins with no hashes in memory.
//! - `new`: pages that the pool does not have.
//! - `idle`: opening the index and looking 1,000 pages up, as the second checkpoint of an idle
//!   guest does.
//! - `second`: the second checkpoint of a guest of `--guest-tib`, of which nothing, 1,000 pages, or
//!   1 % of the pages changed (`dedup/maps.rs`).

mod maps;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use bench_common::random::mix;
use bench_common::report::{Row, Sheet};
use checkpoint::PageFlaw;
use checkpoint::index::{Index, Known, Limits, Run};
use mpool::Pool;

/// Pages of a data mblock.
const PAGES: u64 = 8192;
/// Pages that are looked up at once, as checkpoints do.
const BATCH: usize = 256;

/// What to measure, and where.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// TiB of unique pages [default: 10; 0.125 with --quick]
    #[arg(long)]
    tib: Option<f64>,
    /// TiB of memory of the guest of `second` [default: 1; 0.0625 with --quick]
    #[arg(long)]
    guest_tib: Option<f64>,
    /// Directory for the pools [default: a temporary one]
    #[arg(long)]
    data: Option<PathBuf>,
}

/// The hash of a page.
fn hash_of(page: u64) -> u128 {
    (u128::from(mix(page)) << 64) | u128::from(page)
}

/// The place of a page of the pool.
fn place(page: u64) -> u64 {
    ((page / PAGES) << 16) | (page % PAGES)
}

/// Data mblocks with the pages from 0 on.
struct Simulated {
    mblocks: u64,
}

impl Known for Simulated {
    fn pages(&self, mblock: u64) -> u32 {
        if mblock < self.mblocks { PAGES as u32 } else { 0 }
    }

    fn hashes(&self, mblock: u64) -> Result<Vec<u128>, PageFlaw> {
        Ok((mblock * PAGES..(mblock + 1) * PAGES).map(hash_of).collect())
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let place = options.data.clone().unwrap_or_else(std::env::temp_dir);
    let directory = tempfile::Builder::new().prefix("pageone-bench-dedup-").tempdir_in(place)?;
    let tib = options.tib.unwrap_or(if quick { 0.125 } else { 10.0 });
    let guest_tib = options.guest_tib.unwrap_or(if quick { 0.0625 } else { 1.0 });
    let mut rows = maps::second(directory.path(), guest_tib)?;
    rows.extend(index(directory.path(), tib)?);
    Ok(rows)
}

fn sheet(case: String, subject: &'static str) -> Sheet {
    Sheet { bench: "dedup", case, subject, threads: 1, rows: Vec::new() }
}

fn index(directory: &Path, tib: f64) -> Result<Vec<Row>> {
    let pool = Pool::create(&directory.join("index"), "index")?;
    let known = Simulated { mblocks: (tib * (1_u64 << 28) as f64) as u64 / PAGES };
    let pages = known.mblocks * PAGES;
    let case = format!("{tib} TiB of unique pages");
    let mut sheet = sheet(case, "index");
    let limits = Limits::default();
    let start = Instant::now();
    let mut index = Index::new(&pool, limits, Vec::new(), 0);
    let mut most = 0;
    for page in 0..pages {
        index.enter(hash_of(page), place(page), &known)?;
        if page % (1 << 24) == 0 {
            most = most.max(index.memory());
        }
    }
    let runs = index.write(&known)?;
    let building = start.elapsed().as_secs_f64();
    let (entries, shift) = index.entries();
    sheet.add("entries_bytes_per_page", 16.0 * entries as f64 / pages as f64, "B");
    sheet.add("one_page_in", f64::from(1_u32 << shift), "pages");
    sheet.add("medium_mib", 16.0 * entries as f64 / f64::from(1 << 20), "MiB");
    sheet.add("runs", runs.len() as f64, "");
    sheet.add("build_seconds", building, "s");
    drop(index);
    let mut cases = vec![("clone", pages.min(1 << 24), 1 << 62), ("runs-8", 1 << 22, 8), ("runs-32", 1 << 22, 32)];
    cases.extend([("runs-128", 1 << 22, 128), ("new", 1 << 22, 0)]);
    for (subject, count, length) in cases {
        sheet.subject = subject;
        most = most.max(look_up(&mut sheet, &pool, &runs, &known, count, length));
    }
    sheet.subject = "idle";
    idle(&mut sheet, &pool, &runs, &known);
    sheet.subject = "index";
    sheet.add("memory_mib", most as f64 / f64::from(1 << 20), "MiB");
    Ok(sheet.rows)
}

/// The pages of a guest: of the pool in runs of `length` on average, each followed by as many new
/// ones, if there is more than one run; none of the pool for 0.
fn guest(pages: u64, count: u64, length: u64) -> impl Iterator<Item = u64> {
    let (mut seed, mut left, mut at) = (length, 0, 0);
    let (mut new, mut is_new) = (pages, true);
    (0..count).map(move |_| {
        if left == 0 {
            is_new = length == 0 || !is_new && length < count;
            seed += 1;
            left = if length == 0 { count } else { 1 + mix(seed) % length.saturating_mul(2) };
            // An image of 16 GiB at most.
            at = if length < count { mix(!seed) % pages.min(1 << 22) } else { 0 };
        }
        left -= 1;
        (at, new) = if is_new { (at, new + 1) } else { (at + 1, new) };
        if is_new { new } else { (at - 1) % pages }
    })
}

/// Looks a guest's pages up; gives the memory that the index had at most.
fn look_up(sheet: &mut Sheet, pool: &Pool, runs: &[Run], known: &Simulated, count: u64, length: u64) -> usize {
    let pages = known.mblocks * PAGES;
    let mut index = Index::new(pool, Limits::default(), runs.to_vec(), pages);
    let (mut there, mut found, mut batch) = (0_u64, 0_u64, Vec::new());
    let start = Instant::now();
    let mut look = |batch: &mut Vec<Option<u128>>| {
        found += index.find_many(batch, known).iter().flatten().count() as u64;
        batch.clear();
    };
    for page in guest(pages, count, length) {
        there += u64::from(page < pages);
        batch.push(Some(hash_of(page)));
        if batch.len() == BATCH {
            look(&mut batch);
        }
    }
    look(&mut batch);
    sheet.add("ns_per_page", start.elapsed().as_nanos() as f64 / count as f64, "ns");
    if there > 0 {
        sheet.add("found_percent", 100.0 * found as f64 / there as f64, "%");
    }
    index.memory()
}

fn idle(sheet: &mut Sheet, pool: &Pool, runs: &[Run], known: &Simulated) {
    let pages = known.mblocks * PAGES;
    let start = Instant::now();
    let mut index = Index::new(pool, Limits::default(), runs.to_vec(), pages);
    let changed: Vec<Option<u128>> = (0..1000).map(|i| Some(hash_of(pages + mix(i) % pages))).collect();
    changed.chunks(BATCH).for_each(|batch| drop(index.find_many(batch, known)));
    sheet.add("open_and_1000_pages_ms", start.elapsed().as_secs_f64() * 1e3, "ms");
    sheet.add("memory_mib", index.memory() as f64 / f64::from(1 << 20), "MiB");
}
