//! `commits`: objects that threads commit, each with its own syncs or together with others.
//!
//! A commit is durable when it returns: data and metadata are synced, so each thread waits for the
//! medium twice. Threads that wait at the same time are served by the same syncs. The medium is
//! the one of the directory, and then memory on which a sync takes [`SYNC`], as on a solid-state
//! disk without a capacitor; one sync at a time.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ::mpool::{Access, Allocation, Disk, Medium, MediumFile, ObjectError, Open, Pool, Room, Storage};
use anyhow::{Context, Result};
use parking_lot::Mutex;

use bench_common::report::{Row, Sheet};

/// How long a sync takes on the second medium.
const SYNC: Duration = Duration::from_micros(500);
const THREADS: [usize; 2] = [1, 64];

/// A medium whose syncs take [`SYNC`] more, one after the other.
#[derive(Default)]
struct Slow {
    busy: Arc<Mutex<()>>,
}

struct Directory {
    inner: Arc<dyn Medium>,
    busy: Arc<Mutex<()>>,
}

struct File {
    inner: Arc<dyn MediumFile>,
    busy: Arc<Mutex<()>>,
}

fn wait(busy: &Mutex<()>) {
    let _alone = busy.lock();
    let end = Instant::now() + SYNC;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        std::thread::sleep(left);
    }
}

impl Storage for Slow {
    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(Directory { inner: Disk.directory(path)?, busy: Arc::clone(&self.busy) }))
    }

    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(Directory { inner: Disk.make_directory(path)?, busy: Arc::clone(&self.busy) }))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        Disk.remove_directory(path)
    }
}

impl Medium for Directory {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        Ok(Arc::new(File { inner: self.inner.open(name, how)?, busy: Arc::clone(&self.busy) }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.inner.list()
    }

    fn sync_names(&self) -> io::Result<()> {
        wait(&self.busy);
        self.inner.sync_names()
    }

    fn lock(&self, access: Access) -> io::Result<bool> {
        self.inner.lock(access)
    }

    fn identity(&self) -> io::Result<u64> {
        self.inner.identity()
    }

    fn room(&self) -> io::Result<Room> {
        self.inner.room()
    }
}

impl MediumFile for File {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn used(&self) -> io::Result<u64> {
        self.inner.used()
    }

    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.inner.read_at(into, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_at(from, offset)
    }

    fn sync(&self) -> io::Result<()> {
        wait(&self.busy);
        self.inner.sync()
    }

    /// One flush of the medium is for all files.
    fn sync_both(&self, other: &dyn MediumFile) -> io::Result<()> {
        wait(&self.busy);
        self.inner.sync_both(other)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.allocate(offset, len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.punch(offset, len)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }
}

/// Commits in a second, of mblocks of one page.
fn commits_a_second(pool: &Pool, threads: usize, time: Duration) -> Result<f64> {
    let (count, start) = (AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        let work = || {
            while start.elapsed() < time {
                let mut writer = pool.mblock_alloc(Allocation { capacity: 4096, ..Allocation::default() })?;
                writer.write(&[IoSlice::new(&[7; 4096])])?;
                writer.commit()?;
                count.fetch_add(1, Relaxed);
            }
            Ok::<(), ObjectError>(())
        };
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|thread| thread.join().map_or(Ok(()), |result| result))
    })?;
    Ok(count.into_inner() as f64 / start.elapsed().as_secs_f64())
}

/// Runs it.
pub(super) fn run(directory: &Path, quick: bool, rounds: usize) -> Result<Vec<Row>> {
    let time = Duration::from_secs(if quick { 1 } else { 5 });
    let memory = tempfile::Builder::new().prefix("pageone-bench-mpool-").tempdir_in("/dev/shm");
    let memory = memory.context("cannot make a directory in /dev/shm")?;
    let media: [(&str, &Path, Arc<dyn Storage>); 2] = [
        ("the directory's medium", directory, Arc::new(Disk)),
        ("memory with a sync of 0.5 ms", memory.path(), Arc::new(Slow::default())),
    ];
    let mut rows = Vec::new();
    for (name, path, storage) in media {
        let pool = Pool::create_on(storage, &path.join("commits"), "bench")?;
        let case = format!("commits of 4 KiB mblocks, {name}");
        let mut sheet = Sheet { bench: "mpool", case, subject: "pageone", threads: 1, rows: Vec::new() };
        let mut rates = Vec::new();
        for threads in THREADS {
            let times = (0..rounds).map(|_| commits_a_second(&pool, threads, time)).collect::<Result<Vec<_>>>()?;
            rates.push(super::median(times));
            sheet.threads = threads;
            sheet.add("commits_a_second", rates[rates.len() - 1], "");
        }
        sheet.add("64_threads_times_1", rates[1] / rates[0], "x");
        rows.extend(sheet.rows);
    }
    Ok(rows)
}
