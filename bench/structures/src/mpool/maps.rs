//! `map`: making and removing a map of many mblocks, against a mapping for each.

use std::fs::File;
use std::io::IoSlice;
use std::path::Path;
use std::time::Instant;

use ::mpool::{AlignedBuf, Allocation, MblockWriter, Mcache, Pool, Settings, Temperature};
use anyhow::Result;

use super::files::{Mapped, mappings, mappings_in, vma_bytes};
use super::median;
use bench_common::report::{Row, Sheet};

fn us(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / 1e3
}

fn write_mblocks(pool: &Pool, count: usize, bytes: &[u8]) -> Result<Vec<u64>> {
    let mut writers = Vec::new();
    for _ in 0..count {
        let mut writer = pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(bytes)])?;
        writers.push(writer);
    }
    Ok(MblockWriter::commit_all(writers)?)
}

/// Runs it.
pub(super) fn run(directory: &Path, quick: bool) -> Result<Vec<Row>> {
    const COUNT: usize = 1000;
    let len = if quick { 64 << 10 } else { 1 << 20 };
    let bytes = AlignedBuf::zeroed(len);
    let pool = Pool::create(&directory.join("map-pool"), "bench")?;
    let ids = write_mblocks(&pool, COUNT, &bytes)?;
    let plain = directory.join("map-files");
    std::fs::create_dir_all(&plain)?;
    for i in 0..COUNT {
        std::fs::write(plain.join(i.to_string()), &bytes[..])?;
    }
    let cache = Mcache::new(Settings::default())?;
    let case = format!("map of {COUNT} mblocks of {} KiB", len >> 10);
    let mut sheet = Sheet { bench: "mpool", case, subject: "pageone", threads: 1, rows: Vec::new() };

    let (mut map_times, mut unmap_times, mut vmas) = (Vec::new(), Vec::new(), 0);
    let (mut their_map, mut their_unmap, mut open_times, mut their_vmas) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..9 {
        let start = Instant::now();
        let map = cache.map(&pool, &ids, Temperature::Warm)?;
        map_times.push(us(start));
        let first = map.mblock(0).as_ptr().addr();
        vmas = mappings_in(first..first + map.virtual_bytes() as usize);
        let start = Instant::now();
        drop(map);
        unmap_times.push(us(start));

        let start = Instant::now();
        let files: Vec<File> = (0..COUNT).map(|i| File::open(plain.join(i.to_string()))).collect::<Result<_, _>>()?;
        open_times.push(us(start));
        let start = Instant::now();
        let maps: Vec<Mapped> = files.iter().map(|file| Mapped::new(file, len)).collect::<Result<_, _>>()?;
        their_map.push(us(start));
        their_vmas = mappings("/map-files/");
        let start = Instant::now();
        drop(maps);
        their_unmap.push(us(start));
    }
    let mut note = |subject, map: Vec<f64>, unmap: Vec<f64>, open: Option<Vec<f64>>, vmas: usize| {
        sheet.subject = subject;
        let (map, unmap) = (median(map), median(unmap));
        sheet.add("map_us", map, "us");
        sheet.add("unmap_us", unmap, "us");
        sheet.add("map_and_unmap_us", map + unmap, "us");
        if let Some(open) = open {
            sheet.add("open_files_us", median(open), "us");
        }
        sheet.add("vmas", vmas as f64, "");
        sheet.add("vma_bytes", vmas as f64 * vma_bytes(), "B");
    };
    note("pageone", map_times, unmap_times, None, vmas);
    note("mmap", their_map, their_unmap, Some(open_times), their_vmas);
    Ok(sheet.rows)
}
