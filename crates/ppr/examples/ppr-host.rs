//! A minimal host in its own process: recycles the pages of a QEMU guest whose RAM is a shared
//! file.
//!
//! ```text
//! ppr-host POOL RAM MIB [--period MS] [--slow US] [--seconds S]
//!
//! qemu-system-x86_64 -m MIB -machine memory-backend=ram
//!     -object memory-backend-file,id=ram,size=MIBM,mem-path=RAM,share=on
//!     -object memory-backend-file,id=pool,size=SIZE,mem-path=POOL,share=on
//!     -device ivshmem-plain,memdev=pool
//! ```
//!
//! It makes missing files, prints `POOL SIZE` (the bytes of the pool), and then its counters once a
//! second. `--slow` holds each claim for a number of microseconds, so that the guest loses races.
//! It runs outside of the guest's process: a guest that meets a claim of a killed `ppr-host` waits
//! until the next one is started. PageONE's own agent runs inside. The guest must have less than
//! 2816 MiB, so that its RAM is one piece, and must not be reset while this runs.
#![allow(unsafe_code, clippy::print_stdout)] // A file is mapped; a program prints.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ppr::{Host, HostState, Layout, Pool, Ram, Recycled, guest_frames};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// The command line.
struct Options {
    pool: String,
    ram: String,
    /// Bytes of RAM.
    bytes: u64,
    /// Milliseconds between two sweeps.
    period: u64,
    /// Microseconds for which each claim is held.
    slow: u64,
    /// Seconds until the end.
    seconds: u64,
}

fn options() -> Result<Options> {
    let mut args = std::env::args().skip(1);
    let mut next =
        |what: &str| args.next().with_context(|| format!("usage: ppr-host POOL RAM MIB [OPTIONS]: no {what}"));
    let (pool, ram) = (next("POOL")?, next("RAM")?);
    let bytes = next("MIB")?.parse::<u64>()? << 20;
    let mut options = Options { pool, ram, bytes, period: 1000, slow: 0, seconds: u64::MAX };
    while let Ok(option) = next("option") {
        let value = next("value")?.parse()?;
        match option.as_str() {
            "--period" => options.period = value,
            "--slow" => options.slow = value,
            "--seconds" => options.seconds = value,
            _ => bail!("there is no option {option}"),
        }
    }
    if bytes >= 0xb000_0000 {
        bail!("a guest of 2816 MiB or more has its RAM in two pieces; this program supports one");
    }
    Ok(options)
}

fn main() -> Result<()> {
    let Options { pool: pool_path, ram: ram_path, bytes, period, slow, seconds } = options()?;
    let frames = guest_frames(bytes);
    let len = Layout::for_frames(frames)?.pool_bytes();
    let (pool_file, ram_file) = (open(&pool_path, len as u64)?, open(&ram_path, bytes)?);
    flock(&pool_file, FlockOperation::NonBlockingLockExclusive).context("another host works on this pool")?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping that is not fixed replaces nothing.
    let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &pool_file, 0) }?;
    let base = std::ptr::NonNull::new(base.cast()).context("mapped at 0")?;
    // SAFETY: the file is mapped until the process ends, and this process uses it through the pool
    // only. QEMU, which maps it too, does not shrink it.
    let pool = unsafe { Pool::from_mapping(base, len) }?;
    if pool.validate().is_err() {
        pool.initialise();
    }
    // The legacy hole between 640 KiB and 1 MiB is not RAM.
    let mut host = Host::new(&pool, Ram::new([0..160, 256..frames]));
    // This process has the lock: an earlier holder is dead, and its last system call has ended.
    host.recover();
    pool.set_host_state(HostState::Active);
    println!("POOL {len}");

    let zero = |runs: &[Range<u64>]| -> Result<()> {
        for run in runs {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&ram_file, flags, run.start * 4096, (run.end - run.start) * 4096)?;
        }
        if slow > 0 {
            std::thread::sleep(Duration::from_micros(slow));
        }
        Ok(())
    };
    let start = Instant::now();
    let mut sum = Recycled::default();
    let mut said = start;
    while start.elapsed().as_secs() < seconds {
        let mut within = 0..pool.frames();
        while !within.is_empty() {
            sum.add(host.recycle(&mut within, u64::MAX, zero)?);
        }
        if said.elapsed().as_secs() >= 1 {
            said = Instant::now();
            println!("HOST pages={} runs={} lost={} marked={}", sum.pages, sum.runs, sum.lost, host.marked());
        }
        std::thread::sleep(Duration::from_millis(period));
    }
    pool.set_host_state(HostState::Absent);
    println!("HOST pages={} runs={} lost={} marked={}", sum.pages, sum.runs, sum.lost, host.marked());
    Ok(())
}

/// Opens a file of `len` bytes; makes it if it is missing.
fn open(path: &str, len: u64) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.with_context(|| format!("cannot open {path}"))?;
    match file.metadata()?.len() {
        0 => file.set_len(len).with_context(|| format!("cannot make {path} {len} bytes long"))?,
        is if is != len => {
            bail!("{path} has {is} bytes, and {len} are needed: remove it, or pass the guest's own size")
        }
        _ => {}
    }
    Ok(file)
}
