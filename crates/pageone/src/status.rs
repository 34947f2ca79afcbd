//! `pageone status` and `pageone detach`.

use std::path::PathBuf;

use anyhow::Result;
use engine::{Pages, RecycleStatus, Status};

use crate::{control, paths};

/// Options of `pageone status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `pageone detach`.
#[derive(clap::Args)]
pub(crate) struct DetachArgs {
    /// Process that is to have its memory back
    #[arg(value_name = "PID")]
    pid: i32,
}

/// Prints the status.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let status = control::status(&paths::candidates(dir))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", text(&status));
    }
    Ok(())
}

/// Detaches a client.
pub(crate) fn detach(args: &DetachArgs, dir: Option<PathBuf>) -> Result<()> {
    control::request_detach(&paths::candidates(dir), args.pid)?;
    println!("process {} has its memory back", args.pid);
    Ok(())
}

fn mib(pages: u64) -> u64 {
    (pages * kmem::PAGE_SIZE as u64) >> 20
}

fn summary(pages: &Pages) -> String {
    format!(
        "pages_shared {} · pages_sharing {} · pages_zero {} · pages_recycled {} · pages_unshared {} · pages_volatile {} · general_profit {} MiB",
        pages.pages_shared,
        pages.pages_sharing,
        pages.pages_zero,
        pages.pages_recycled,
        pages.pages_unshared,
        pages.pages_volatile,
        pages.general_profit >> 20
    )
}

fn recycling_text(now: u64, of: &RecycleStatus) -> String {
    match (of.state.as_str(), &of.why) {
        ("starting", _) => "free pages: asking QEMU where the guest's memory lies".into(),
        (state, Some(why)) => format!("free pages {state}: {why}"),
        _ => format!(
            "free pages: {} MiB taken back of {} · {:.1} MiB/s · {} MiB in all, {:.2} µs a page · {} runs · period {} s",
            mib(now),
            of.managed_bytes >> 20,
            of.pages_recycled_per_second * kmem::PAGE_SIZE as f64 / f64::from(1 << 20),
            mib(of.pages_recycled_total),
            of.sweep_seconds * 1e6 / of.pages_recycled_total.max(1) as f64,
            of.runs_total,
            of.reclaim_period_seconds
        ),
    }
}

fn text(status: &Status) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    // Writing into a string has no way to fail.
    let _ = writeln!(
        out,
        "up {:.0} s · merge period {} s · CPU {:.2} s (daemon) + {:.2} s (agents) · merged so far {} pages",
        status.uptime_seconds,
        status.merge_period_seconds,
        status.daemon_cpu_seconds,
        status.agent_cpu_seconds,
        status.pages_merged_total
    );
    let short = if status.governor.memory_is_short { " (memory is short)" } else { "" };
    let _ = writeln!(out, "governor, mode {}: {}{short}", status.governor.mode, status.governor.reason);
    let _ = writeln!(out, "{}", summary(&status.pages));
    for domain in &status.domains {
        let _ = writeln!(
            out,
            "\ndomain {} · store {} MiB in {} segments",
            domain.name,
            domain.store_bytes >> 20,
            domain.segments
        );
        let _ = writeln!(out, "  {}", summary(&domain.pages));
        if let Some(why) = &domain.paused {
            let _ = writeln!(out, "  PAUSED: {why}");
        }
        if domain.clients.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "  {:>8} {:<20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}  state",
            "PID", "program", "MiB", "merged", "zero", "unshared", "volatile", "maps", "CPU s"
        );
        for client in &domain.clients {
            let _ = writeln!(
                out,
                "  {:>8} {:<20.20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8.2}  {}",
                client.pid,
                client.name,
                client.region_bytes >> 20,
                mib(client.pages_merged),
                mib(client.pages_zero),
                mib(client.pages_unshared),
                mib(client.pages_volatile),
                client.mappings,
                client.agent_cpu_seconds,
                client.state
            );
            if let Some(why) = &client.refused {
                let _ = writeln!(out, "           not merged: {why}");
            }
            if let Some(recycling) = &client.recycling {
                let _ = writeln!(out, "           {}", recycling_text(client.pages_recycled, recycling));
            }
            if client.pages_kept_huge > 0 {
                let _ = writeln!(
                    out,
                    "           {} MiB more could be merged and are left in huge pages (huge_page_share)",
                    mib(client.pages_kept_huge)
                );
            }
            if client.max_map_count_binds {
                let _ = writeln!(
                    out,
                    "           vm.max_map_count binds: only long runs are merged; `sysctl vm.max_map_count=1048576` would let more in"
                );
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{ClientStatus, DomainStatus};

    #[test]
    fn the_text_names_what_keeps_memory_from_merging() {
        let dropped =
            RecycleStatus { state: "dropped".into(), why: Some("overwritten".into()), ..RecycleStatus::default() };
        let client = ClientStatus {
            recycling: Some(dropped),
            pid: 42,
            name: "qemu".into(),
            refused: Some("its memory is locked".into()),
            max_map_count_binds: true,
            pages_kept_huge: 1280,
            ..ClientStatus::default()
        };
        let domain = DomainStatus { paused: Some("no room".into()), clients: vec![client], ..DomainStatus::default() };
        let out = text(&Status { domains: vec![domain], ..Status::default() });
        for part in [
            "dropped: overwritten",
            "PAUSED: no room",
            "not merged: its memory is locked",
            "vm.max_map_count",
            "5 MiB more could be merged",
            "42 qemu",
        ] {
            assert!(out.contains(part), "{part} in {out}");
        }
    }
}
