//! The exact arithmetic of the kernel's advisor: equal integers as input give equal integers as
//! output.
//!
//! After each full scan, with `t` the scan time in whole seconds and `cpu` the percentage of a CPU
//! over it:
//!
//! ```text
//! factor = target·100 / t                                     at least 1
//! change = (70·change before + 30·(t·100 / t before)) / 100   change before is 0 at first
//! pages  = (pages·100 / factor) · change / 100
//! pages  = at most (pages before / cpu)·max_cpu,
//!          then at least (pages before / cpu)·10,
//!          then at most max_pages
//! ```
//!
//! Every division truncates. The types are the kernel's on 64-bit machines, so products overflow as
//! they do there. Source: `scan_time_advisor()` in mm/ksm.c, Linux 6.8 to 6.18; linux-mm 2023-12,
//! "Add ksm advisor".
//!
//! The consequences, which are the reason for another mode: at a constant scan time, `change` rises
//! to 97 and stays there, since 70·97 + 30·100 is 9790. `factor` must settle at 97 too, which is a
//! scan time 3 % above the target. The scan time counts in whole seconds: with a target of 5 s a
//! factor is 100 or 83, and nothing between. `min_pages` is the initial value, not a bound; the
//! bound is a tenth of a CPU. The advisor may be switched on in the middle of a scan. Then the
//! first `t` counts from the start of the system, and the first `cpu` is all CPU time that ksmd
//! ever used.

/// The advisor's settings; names and defaults are the kernel's.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Tunables {
    /// `advisor_target_scan_time`, in seconds.
    pub target_scan_time: u64,
    /// `advisor_max_cpu`, in percent.
    pub max_cpu: u32,
    /// `advisor_max_pages_to_scan`.
    pub max_pages_to_scan: u64,
}

impl Default for Tunables {
    fn default() -> Self {
        Self { target_scan_time: 200, max_cpu: 70, max_pages_to_scan: 30_000 }
    }
}

/// `KSM_ADVISOR_MIN_CPU`: percent of a CPU.
const MIN_CPU: u64 = 10;
/// `EWMA_WEIGHT`: the weight of the newest change, in percent.
const EWMA_WEIGHT: u64 = 30;

/// The advisor's state from one scan to the next. `advisor_min_pages_to_scan` is not part of it: it
/// is the value of `pages_to_scan` with which the kernel begins.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Advisor {
    scan_time: u64,
    change: u64,
}

impl Advisor {
    /// The `pages_to_scan` after a scan that took `scan_time` whole seconds and `cpu_percent` of a
    /// CPU. Both are as [`scan_seconds`] and [`cpu_percent`] compute them, and as the tracepoint
    /// `ksm:ksm_advisor` shows them.
    pub fn step(&mut self, tunables: &Tunables, pages_to_scan: u32, scan_time: u64, cpu_percent: u32) -> u32 {
        let scan_time = scan_time.max(1);
        let cpu_percent = cpu_percent.max(1);
        let last_scan_time = if self.scan_time == 0 { scan_time } else { self.scan_time };
        let factor = (tunables.target_scan_time.wrapping_mul(100) / scan_time).max(1);
        let change = (scan_time.wrapping_mul(100) / last_scan_time).max(1);
        let change = (100 - EWMA_WEIGHT).wrapping_mul(self.change).wrapping_add(EWMA_WEIGHT.wrapping_mul(change)) / 100;

        // The kernel multiplies an unsigned int and an int: 32 bits.
        let pages = u64::from(pages_to_scan.wrapping_mul(100)) / factor;
        let pages = pages.wrapping_mul(change) / 100;
        let per_page_cost = u64::from((pages_to_scan / cpu_percent).max(1));
        let pages = pages.min(per_page_cost.wrapping_mul(u64::from(tunables.max_cpu)));
        let pages = pages.max(per_page_cost * MIN_CPU);
        let pages = pages.min(tunables.max_pages_to_scan);
        *self = Self { scan_time, change };
        pages as u32
    }
}

/// A scan time as the advisor counts it: whole seconds, at least 1.
pub fn scan_seconds(milliseconds: u64) -> u64 {
    (milliseconds / 1000).max(1)
}

/// CPU use as the advisor counts it: percent of a CPU, at least 1, over a scan of `scan_seconds`
/// whole seconds.
pub fn cpu_percent(cpu_nanoseconds: u64, scan_seconds: u64) -> u32 {
    let milliseconds = cpu_nanoseconds / 1000 / 1000;
    ((milliseconds.wrapping_mul(100) / scan_seconds.max(1).wrapping_mul(1000)) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_steps_by_hand() {
        let mut advisor = Advisor::default();
        let tunables = Tunables { target_scan_time: 30, ..Tunables::default() };
        // factor 3000/41 = 73; change (0 + 3000)/100 = 30; 50000/73 = 684, ·30/100 = 205; cost
        // 500/12 = 41: at least 410.
        assert_eq!(advisor.step(&tunables, 500, 41, 12), 410);
        // factor 3000/60 = 50; change (70·30 + 30·(6000/41 = 146))/100 = 64; 820·64/100 = 524; cost
        // 410/5 = 82: at least 820.
        assert_eq!(advisor.step(&tunables, 410, 60, 5), 820);
        // factor 3000/25 = 120; change (70·64 + 30·41)/100 = 57; 683·57/100 = 389; cost 820/90 = 9:
        // at most 630.
        assert_eq!(advisor.step(&tunables, 820, 25, 90), 389);
    }

    #[test]
    fn limits_apply_in_the_kernels_order() {
        let tunables = Tunables { target_scan_time: 10, max_cpu: 20, max_pages_to_scan: 1000 };
        let step = |pages, time, cpu| Advisor { scan_time: time, change: 100 }.step(&tunables, pages, time, cpu);
        assert_eq!(step(600, 1000, 60), 200, "ten for each percent, twenty percent");
        assert_eq!(step(5000, 1, 1), 1000, "the floor of ten percent does not lift the greatest number of pages");
        assert_eq!(step(0, 10, 1), 10, "a cost is at least one page");
    }

    #[test]
    fn it_settles_three_percent_above_the_target() {
        // The scan time is inversely proportional to the pages, and fine enough with a target of
        // 10,000 s.
        let tunables = Tunables { target_scan_time: 10_000, max_cpu: 100, max_pages_to_scan: 1_000_000 };
        let (mut advisor, mut pages, mut time) = (Advisor::default(), 100_000, 0);
        for _ in 0..100 {
            time = 1_000_000_000 / u64::from(pages);
            pages = advisor.step(&tunables, pages, time, 50);
        }
        assert!((10_200..10_400).contains(&time), "{time}");
        assert_eq!(advisor.change, 97);
    }

    #[test]
    fn inputs_are_truncated_as_there() {
        assert_eq!([0, 999, 1000, 1999, 5999].map(scan_seconds), [1, 1, 1, 1, 5]);
        assert_eq!(cpu_percent(1_999_999_999, 10), 19);
        assert_eq!(cpu_percent(0, 10), 1);
    }
}
