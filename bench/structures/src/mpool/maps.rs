//! `map` and `warm`.

use std::fs::File;
use std::hint::black_box;
use std::io::IoSlice;
use std::path::Path;
use std::time::Instant;

use ::mpool::{AlignedBuf, Allocation, MblockWriter, Mcache, Pool, Settings, Temperature};
use anyhow::Result;

use super::files::{Mapped, mappings, mappings_in, vma_bytes};
use super::median;
use super::zipf::Random;
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

/// Making and removing a map of many mblocks, against a mapping for each.
pub(super) fn map_many(directory: &Path, quick: bool) -> Result<Vec<Row>> {
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
        let maps: Vec<Mapped> = files.iter().map(|file| Mapped::new(file, len, 0)).collect::<Result<_, _>>()?;
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

/// Reads `reads` pieces at random places; gives nanoseconds for each.
fn time_reads(reads: usize, len: usize, piece: usize, mut get: impl FnMut(usize) -> Result<u64>) -> Result<f64> {
    let mut random = Random::new(1);
    let mut sum = 0u64;
    let start = Instant::now();
    for _ in 0..reads {
        sum = sum.wrapping_add(get(random.next() as usize % (len / piece) * piece)?);
    }
    black_box(sum);
    Ok(start.elapsed().as_nanos() as f64 / reads as f64)
}

fn add_up(bytes: &[u8]) -> u64 {
    bytes.as_chunks::<8>().0.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// Reading pages that are in memory already.
pub(super) fn warm(directory: &Path, quick: bool) -> Result<Vec<Row>> {
    let len = if quick { 32 << 20 } else { 256 << 20 };
    let reads = if quick { 200_000 } else { 2_000_000 };
    let bytes = AlignedBuf::zeroed(len);
    let pool = Pool::create(&directory.join("warm-pool"), "bench")?;
    let ids = write_mblocks(&pool, 1, &bytes)?;
    let path = directory.join("warm-file");
    std::fs::write(&path, &bytes[..])?;
    drop(bytes);
    let cache = Mcache::new(Settings::default())?;
    // Huge pages, and uses that show: the dearer kind of memory.
    let map = cache.map_touched(&pool, &ids, Temperature::Warm)?;
    map.advise(0, 0, len as u64, ::mpool::Advice::WillNeed)?;
    map.get(0, 0, len)?;
    eprintln!("mpool: {:?}", cache.stats());
    let file = Mapped::new(&File::open(&path)?, len, libc::MAP_POPULATE)?;
    let small = Mapped::anonymous(len)?;
    // Both with every page in the page tables.
    let all = [map.mblock(0), file.bytes(), small.bytes()]
        .map(|bytes| bytes.iter().step_by(4096).map(|&b| u64::from(b)).sum::<u64>());
    black_box(all);
    let mut rows = Vec::new();
    for piece in [64, 1024] {
        let case = format!("warm reads of {piece} B in {} MiB", len >> 20);
        let mut sheet = Sheet { bench: "mpool", case, subject: "pageone", threads: 1, rows: Vec::new() };
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..7 {
            let (ours, plain) = (map.mblock(0), file.bytes());
            times[0].push(time_reads(reads, len, piece, |at| Ok(add_up(&ours[at..at + piece])))?);
            times[1].push(time_reads(reads, len, piece, |at| Ok(add_up(map.get(0, at as u64, piece)?)))?);
            times[2].push(time_reads(reads, len, piece, |at| Ok(add_up(&plain[at..at + piece])))?);
            times[3].push(time_reads(reads, len, piece, |at| Ok(add_up(&small.bytes()[at..at + piece])))?);
        }
        let [touched, asked, plain, anonymous] = times.map(median);
        let all = [("pageone", touched), ("pageone-get", asked), ("mmap", plain), ("anonymous-4k", anonymous)];
        for (subject, ns) in all {
            sheet.subject = subject;
            sheet.add("ns_per_read", ns, "ns");
            sheet.add("times_mmap", ns / plain, "x");
        }
        rows.extend(sheet.rows);
    }
    Ok(rows)
}
