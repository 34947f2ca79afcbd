//! The cost of the guest's two operations on this processor, in cycles of its time-stamp counter
//! (x86-64; elsewhere in nanoseconds): `ppr-cycles`.
//!
//! A guest without hardware virtualisation cannot count its own cycles. These are the same atomic
//! steps on the same layout as the kernel module's, run natively; the median of several rounds over
//! a guest of 8 GiB, for blocks of the sizes that a page allocator moves. The module adds the call
//! of a tracepoint and counters.
#![allow(clippy::print_stdout)] // A program prints.

use anyhow::Result;
use ppr::{Guest, Pool};

#[cfg(target_arch = "x86_64")]
const UNIT: &str = "cycles";
#[cfg(not(target_arch = "x86_64"))]
const UNIT: &str = "ns";

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // Reads a counter.
fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, which reads a counter and nothing else.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Nanoseconds: other processors have no counter of cycles that programs may read.
#[cfg(not(target_arch = "x86_64"))]
fn cycles() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

const FRAMES: u64 = 2 << 20;
const ROUNDS: usize = 7;

/// Median cycles of a mark and of a cancel, for blocks of `pages` pages at `step` frames from each
/// other.
fn measure(guest: Guest, pages: u64, step: u64) -> Result<(u64, u64)> {
    let blocks = 20_000;
    let frame = |i: u64| i * step % (FRAMES - pages);
    let mut seen = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = cycles();
        (0..blocks).for_each(|i| guest.mark(frame(i)..frame(i) + pages));
        let marked = cycles();
        for i in 0..blocks {
            guest.cancel(frame(i)..frame(i) + pages, || true)?;
        }
        seen.0.push((marked - start) / blocks);
        seen.1.push((cycles() - marked) / blocks);
    }
    seen.0.sort_unstable();
    seen.1.sort_unstable();
    Ok((seen.0[ROUNDS / 2], seen.1[ROUNDS / 2]))
}

fn main() -> Result<()> {
    let pool = Pool::private(FRAMES)?;
    let kinds = [
        ("single pages in order", 1, 1),
        ("single pages at random", 1, 104_729),
        ("blocks of 8", 8, 8),
        ("blocks of 512", 512, 512),
    ];
    for (what, pages, step) in kinds {
        let (mark, cancel) = measure(Guest::new(&pool), pages, step)?;
        println!("{what:24} mark {mark} {UNIT}, cancel {cancel} {UNIT}");
    }
    Ok(())
}
