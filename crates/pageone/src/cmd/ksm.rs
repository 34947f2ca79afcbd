//! `pageone ksm`: governing and showing the kernel's same-page merging (KSM).

mod advise;
mod kept;
mod report;
mod scanner;
mod status;

use anyhow::{Result, ensure};
use kmem::ksm::{Ksm, merge_all_memory};

use crate::{Code, Coded};

/// The subcommands of `pageone ksm`.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Set how many pages KSM scans, so that it scans everything within a time and keeps a CPU
    /// limit
    Advise(advise::Args),
    /// Show what KSM does and what it saves, for the host and for each process
    Status(status::Args),
}

/// Runs a subcommand.
pub(crate) fn run(command: &Command) -> Result<()> {
    match command {
        Command::Advise(args) => advise::run(args),
        Command::Status(args) => status::run(args),
    }
}

fn open() -> Result<Ksm> {
    Ok(Ksm::open().map_err(|e| {
        Coded(Code::HostLacks, format!("this kernel has no KSM (no /sys/kernel/mm/ksm: {e}); it needs CONFIG_KSM=y"))
    })?)
}

/// For `pageone run --backend ksm`: makes all memory of this process mergeable by KSM, and of the
/// program that it executes.
pub(crate) fn enable(domain: Option<&str>) -> Result<()> {
    let why =
        "KSM has no domains: it merges over all users and programs of the host; leave --domain or --backend ksm out";
    ensure!(domain.is_none(), Coded(Code::Usage, why.into()));
    let ksm = open()?;
    let (major, minor, release) = kmem::procfs::kernel_release();
    ensure!(
        (major, minor) >= (6, 10),
        "Linux {release} does not keep PR_SET_MEMORY_MERGE for a program that is executed; 6.10 or later does; \
         without --backend ksm older ones do"
    );
    merge_all_memory()?;
    if ksm.run().is_ok_and(|run| run != 1) {
        output::note!("KSM is stopped; start it with `pageone ksm advise`, or write 1 to /sys/kernel/mm/ksm/run");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ksm_has_no_domains() {
        let error = enable(Some("web")).unwrap_err().to_string();
        assert!(error.starts_with("KSM has no domains: it merges over all users"), "{error}");
    }
}
