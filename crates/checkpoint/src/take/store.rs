//! Storing sets of pages: one thread reads the process's memory while this one compares and stores.

use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use guard::Guard;
use mpool::{AlignedBuf, BLOCK};

use super::TakeError;
use crate::catalog::{PutOff, StoreError, Warning, Writer, hash};
use crate::source::{Source, SourceError};

/// Pages read at a time: 1 MiB, so that they are still in the CPU's cache when they are stored.
const BATCH: usize = 256;
/// Batches read ahead.
const QUEUE: usize = 4;

/// What storing pages took.
pub(super) struct Stored {
    /// Number of pages read.
    pub(super) pages: u64,
    /// The time of reading them.
    pub(super) reading: Duration,
}

fn hashes(bytes: &[u8], seed: u64) -> Vec<Option<u128>> {
    bytes.chunks_exact(BLOCK).map(|page| hash(page, seed)).collect()
}

/// Reads the pages of each batch in a thread of its own, while `put` processes earlier batches.
/// Buffers are reused: new ones would cost more than the work on them. Returns the time of reading.
pub(super) fn pump<T: Send>(
    source: &Source,
    batches: impl Iterator<Item = T> + Send,
    pages: impl Fn(&T) -> Vec<u64> + Send,
    mut put: impl FnMut(T, &[u8]) -> Result<(), StoreError>,
) -> Result<Duration, TakeError> {
    std::thread::scope(|scope| {
        let (to, from) = sync_channel(QUEUE);
        let (back, free) = channel::<AlignedBuf>();
        let reader = scope.spawn(move || -> Result<Duration, SourceError> {
            let mut reading = Duration::ZERO;
            for batch in batches {
                let start = Instant::now();
                let mut buffer = free.try_recv().unwrap_or_else(|_| AlignedBuf::zeroed(BATCH * BLOCK));
                let pages = pages(&batch);
                source.read(&pages, &mut buffer[..pages.len() * BLOCK])?;
                reading += start.elapsed();
                if to.send((batch, buffer, pages.len())).is_err() {
                    break; // Storing failed, and returns the error.
                }
            }
            Ok(reading)
        });
        for (batch, buffer, pages) in from {
            put(batch, &buffer[..pages * BLOCK])?;
            // Fails if the reader has ended.
            let _ = back.send(buffer);
        }
        Ok(reader.join().map_err(|_| TakeError::Panicked)??)
    })
}

/// Stores the pages of a set. First come the pages that the pool does not have. Then the pages with
/// the hash of a page in the pool are read again, in the pool's order, and compared.
pub(super) fn store(
    (source, guard): (&Source, &Guard),
    set: &DirtyTree,
    writer: &mut Writer<'_>,
    warn: &mut dyn FnMut(&Warning),
) -> Result<Stored, TakeError> {
    let all: Vec<u64> = set.iter().collect();
    let seed = writer.seed();
    let put = |pages: &[u64], bytes: &[u8]| {
        guard.beat();
        writer.put(pages, bytes, &hashes(bytes, seed))
    };
    let mut reading = pump(source, all.chunks(BATCH), |pages| pages.to_vec(), put)?;
    let off = writer.put_off();
    let pages = |off: &&[PutOff]| off.iter().map(|off| off.page).collect();
    reading += pump(source, off.chunks(BATCH), pages, |off, bytes| {
        guard.beat();
        writer.put_again(off, bytes)
    })?;
    writer.warnings().iter().for_each(warn);
    Ok(Stored { pages: (all.len() + off.len()) as u64, reading })
}

/// Stores pages that have been read already; `pages` are their numbers in the checkpoint, which
/// ascend.
///
/// # Errors
/// If the pool is full, or cannot be written or read.
pub fn store_read(
    pages: &[u64],
    bytes: &[u8],
    writer: &mut Writer<'_>,
    warn: &mut dyn FnMut(&Warning),
) -> Result<(), TakeError> {
    writer.put(pages, bytes, &hashes(bytes, writer.seed()))?;
    let off = writer.put_off();
    let mut batch = AlignedBuf::zeroed(off.len().min(BATCH) * BLOCK);
    for off in off.chunks(BATCH) {
        for (PutOff { page, .. }, to) in off.iter().zip(batch.chunks_exact_mut(BLOCK)) {
            let at = pages.binary_search(page).map_err(|_| TakeError::NotRead(*page))?;
            to.copy_from_slice(&bytes[at * BLOCK..(at + 1) * BLOCK]);
        }
        writer.put_again(off, &batch)?;
    }
    writer.warnings().iter().for_each(warn);
    Ok(())
}
