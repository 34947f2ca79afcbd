//! Maps of large guests. The data mblocks are in the pool, without pages.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use bench_common::random::mix;
use bench_common::report::Row;
use checkpoint::{Catalog, Store};
use mpool::{OpenOptions, Pool};

use super::{PAGES, sheet};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// MiB that a checkpoint of a guest of 1 TiB may read or write beside what changed: the roots.
const BESIDE_MIB: f64 = 16.0;

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What the kernel says of this process.
#[derive(Clone, Copy)]
struct Counters {
    read: u64,
    written: u64,
    /// Memory now, and the most since the last call, bytes.
    memory: u64,
    most: u64,
}

impl Counters {
    /// Reads them; from now on the most memory is counted anew.
    #[allow(unsafe_code)] // malloc_trim(3)
    fn read() -> Result<Self> {
        let (io, status) = (std::fs::read_to_string("/proc/self/io")?, std::fs::read_to_string("/proc/self/status")?);
        let of = |text: &str, name: &str| -> Result<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
            Ok(line.trim().trim_end_matches(" kB").parse()?)
        };
        // What the cases before have freed is not to count.
        // SAFETY: no pointers are passed.
        unsafe { libc::malloc_trim(0) };
        std::fs::write("/proc/self/clear_refs", "5")?;
        let trimmed = std::fs::read_to_string("/proc/self/status")?;
        Ok(Self {
            read: of(&io, "read_bytes:")?,
            written: of(&io, "write_bytes:")?,
            memory: of(&trimmed, "VmRSS:")? << 10,
            most: of(&status, "VmHWM:")? << 10,
        })
    }
}

/// Pages that changed: `count` of them, in clusters of `length`.
fn changed(pages: u64, count: u64, length: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| (mix(i / length) % (pages / length)) * length + i % length)
}

/// Second checkpoints of a guest.
pub(super) fn second(directory: &Path, tib: f64) -> Result<Vec<Row>> {
    let path = directory.join("maps");
    let pages = ((tib * (1_u64 << 28) as f64) as u64).next_multiple_of(PAGES);
    let regions = vec![(0, pages * PAGE)];
    let mut sheet = sheet(format!("a guest of {tib} TiB"), "first");
    let store = Store::new(Catalog::open(&Pool::create(&path, "maps")?)?);
    let before = Counters::read()?;
    let mut writer = store.begin("first")?;
    writer.set_pages(pages as usize);
    let ids = writer.simulate((pages / PAGES) as usize)?;
    (0..pages).for_each(|page| writer.place(page, ids[(page / PAGES) as usize], page % PAGES));
    let first = writer.commit("bench".into(), regions.clone())?;
    drop(store);
    let after = Counters::read()?;
    sheet.add("map_mib", mib(first.map_pages * PAGE), "MiB");
    sheet.add("memory_mib", mib(after.most.saturating_sub(before.memory)), "MiB");
    let percent = pages / 100;
    let cases = [("unchanged", 0, 1), ("idle", 1000, 1), ("1% in 64s", percent, 64), ("1% at random", percent, 1)];
    for (subject, count, length) in cases {
        sheet.subject = subject;
        let pool = Pool::open(&path, OpenOptions::default())?;
        let before = Counters::read()?;
        let start = Instant::now();
        let store = Store::new(Catalog::open(&pool)?);
        let mut writer = store.begin(subject)?;
        writer.set_pages(pages as usize);
        writer.go_on(&Catalog::label(&pool, &first), &regions, vec![u64::MAX; (pages / 64) as usize])?;
        // Where another page of the pool is from now on.
        let other = |page: u64| ids[((page / PAGES + 1) % (pages / PAGES)) as usize];
        changed(pages, count, length).for_each(|page| writer.place(page, other(page), page % PAGES));
        writer.commit("bench".into(), regions.clone())?;
        sheet.add("seconds", start.elapsed().as_secs_f64(), "s");
        let after = Counters::read()?;
        sheet.add("changed_mib", mib(count * PAGE), "MiB");
        sheet.add("read_mib", mib(after.read - before.read), "MiB");
        sheet.add("written_mib", mib(after.written - before.written), "MiB");
        sheet.add("bar_mib", mib(count * PAGE) + BESIDE_MIB, "MiB");
        sheet.add("memory_mib", mib(after.most.saturating_sub(before.memory)), "MiB");
    }
    Ok(sheet.rows)
}
