//! A report as text: figures, a heat map of each region, the hottest parts.

use std::fmt::Write;

use control::Heat;
use kmem::PAGE_SIZE;
use output::text::printable;

use super::{Client, Report};

/// Columns of a line on the terminal.
const WIDTH: usize = 100;
/// Hottest parts that are listed.
const HOTTEST: usize = 3;
/// Characters for the share of a column's pages that were written: none, and eighths.
const SHADES: [char; 9] = ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

fn mib(pages: u64) -> f64 {
    pages as f64 * PAGE_SIZE as f64 / f64::from(1 << 20)
}

/// The whole report.
pub(crate) fn report(report: &Report) -> String {
    let mut out = String::new();
    if report.clients.is_empty() {
        out.push_str("no clients; start one with `pageone run`\n");
    }
    for client in &report.clients {
        one(client, &mut out);
    }
    out
}

fn one(client: &Client, out: &mut String) {
    let status = &client.status;
    // Writing into a string cannot fail.
    let _ = writeln!(
        out,
        "{} {} · {:.0} MiB · {:.0} pages/s · {:.1} MB/s",
        status.pid,
        printable(status.guest_name.as_ref().unwrap_or(&status.name)),
        mib(status.pages),
        status.pages_per_second,
        client.mb_per_second
    );
    let _ = write!(out, "  distinct pages written");
    for window in status.windows.iter().filter(|w| [1.0, 10.0, 60.0].contains(&w.seconds)) {
        let share = 100.0 * window.pages as f64 / status.pages.max(1) as f64;
        let _ = write!(out, " · in {} s: {} ({share:.1} %)", window.seconds, window.pages);
        if !window.complete {
            let _ = write!(out, " so far");
        }
    }
    out.push('\n');
    if let Some(why) = &status.held_up {
        let _ = writeln!(out, "  no newer figures: {why}");
    }
    if let Some(migration) = &client.migration {
        let _ = if migration.converges {
            writeln!(
                out,
                "  migration: converges after {:.1} s in {} rounds, {:.0} MiB sent, standstill {:.0} ms",
                migration.seconds,
                migration.rounds,
                mib(migration.pages_sent as u64),
                migration.downtime_seconds * 1000.0
            )
        } else {
            writeln!(
                out,
                "  migration: does not converge; after {} rounds the standstill would still be {:.0} ms",
                migration.rounds,
                migration.downtime_seconds * 1000.0
            )
        };
    }
    for region in &status.regions {
        let label = format!("  {:#014x} {:>8.0} MiB ", region.start, mib(region.pages.into()));
        let columns = WIDTH.saturating_sub(label.chars().count() + 2).max(8);
        let _ = writeln!(out, "{label}▕{}▏", map(region, columns));
    }
    let hottest = hottest(&status.regions);
    if !hottest.is_empty() {
        let _ = writeln!(out, "  hottest in 10 s: {}", hottest.join(" · "));
    }
    out.push('\n');
}

/// The heat map of a region: one of [`SHADES`] for each column.
fn map(region: &Heat, columns: usize) -> String {
    let parts = region.parts.len();
    let columns = columns.min(parts).max(1);
    let shade = |column: usize| {
        let range = column * parts / columns..(column + 1) * parts / columns;
        let written: u64 = region.parts[range.clone()].iter().map(|&n| u64::from(n)).sum();
        let first = range.start as u64 * u64::from(region.part_pages);
        let end = (range.end as u64 * u64::from(region.part_pages)).min(region.pages.into());
        let pages = end.saturating_sub(first).max(1);
        SHADES[(written * 8).div_ceil(pages).min(8) as usize]
    };
    (0..columns).map(shade).collect()
}

/// The parts with most written pages, the hottest first.
fn hottest(regions: &[Heat]) -> Vec<String> {
    let parts = regions.iter().flat_map(|region| {
        let start = |at: usize| region.start + at as u64 * u64::from(region.part_pages) * PAGE_SIZE as u64;
        region.parts.iter().enumerate().filter(|(_, n)| **n > 0).map(move |(at, &n)| (n, start(at), region.part_pages))
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort_by_key(|&(n, start, _)| (std::cmp::Reverse(n), start));
    let say = |(n, start, pages): (u32, u64, u32)| format!("{start:#x} {n} of {pages} pages");
    parts.into_iter().take(HOTTEST).map(say).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::dirty::migration::Migration;
    use control::{DirtyStatus, Window};

    fn heat(parts: Vec<u32>) -> Heat {
        Heat { start: 0x7f00_0000_0000, pages: 512 * parts.len() as u32 - 256, part_pages: 512, parts }
    }

    #[test]
    fn the_map_shades_by_the_share_of_pages() {
        assert_eq!(map(&heat(vec![0, 1, 64, 65, 512, 256]), 40), "·▁▁▂██");
        assert_eq!(map(&heat(vec![0, 0, 512, 512, 512, 0]), 3), "·█▆");
        assert_eq!(map(&heat(vec![7]), 40), "▁");
    }

    #[test]
    fn the_text_has_figures_hot_parts_and_the_verdict() {
        let windows = [(1.0, true), (5.0, true), (60.0, false)]
            .map(|(seconds, complete)| Window { seconds, pages: 100, complete })
            .to_vec();
        let status = DirtyStatus {
            pid: 42,
            name: "qemu".into(),
            guest_name: Some("web".into()),
            pages: 1000,
            pages_per_second: 250.0,
            windows,
            regions: vec![heat(vec![0, 300, 512])],
            held_up: Some("7 pages are being merged".into()),
            ..DirtyStatus::default()
        };
        let migration = Migration { converges: false, seconds: 1.0, rounds: 4, pages_sent: 5.0, downtime_seconds: 1.5 };
        let client = Client { status, mb_per_second: 1.024, migration: Some(migration) };
        let out = report(&Report { time: 0.0, clients: vec![client] });
        for part in [
            "42 web",
            "250 pages/s · 1.0 MB/s",
            "in 1 s: 100 (10.0 %)",
            "in 60 s: 100 (10.0 %) so far",
            "does not converge",
            "1500 ms",
            "0x7f0000400000 512 of 512 pages · 0x7f0000200000 300",
            "7 pages are being merged",
        ] {
            assert!(out.contains(part), "{part} in {out}");
        }
        assert!(!out.contains("in 5 s"));
        assert!(out.lines().all(|line| line.chars().count() <= 110), "{out}");
        assert!(report(&Report { time: 0.0, clients: vec![] }).contains("pageone run"));
    }
}
