//! The system under test: the `pageone` program, as its user sees it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use control::Status;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::cpu;
use bench_common::interrupt::Interrupt;
use bench_common::own_program;

/// Sums over all clients of a status.
pub(crate) trait Sums {
    /// Pages that map a frame.
    fn merged(&self) -> u64;
    /// Pages given back as zero pages.
    fn zero(&self) -> u64;
    /// Scans.
    fn scans(&self) -> u64;
}

impl Sums for Status {
    fn merged(&self) -> u64 {
        self.clients().map(|client| client.metrics.pages_merged).sum()
    }

    fn zero(&self) -> u64 {
        self.clients().map(|client| client.metrics.pages_zero).sum()
    }

    fn scans(&self) -> u64 {
        self.clients().map(|client| client.metrics.full_scans).sum()
    }
}

/// Name of the daemon's configuration in its directory, if it has any.
const CONFIG: &str = "bench.toml";

/// What becomes of clients' huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HugePages {
    /// They are split when more than this many percent of one can be merged. With 0 clients are
    /// given none.
    Split(u32),
    /// They are kept.
    Keep,
}

impl std::str::FromStr for HugePages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "split" => Ok(HugePages::Split(0)),
            "keep" => Ok(HugePages::Keep),
            _ => match text.parse() {
                Ok(percent @ 1..=100) => Ok(HugePages::Split(percent)),
                _ => Err("it is `split`, `keep`, or a percentage from 1 to 100".into()),
            },
        }
    }
}

/// Where a build of PageONE lies, and the directory that its daemon is to use.
pub(crate) struct PageOne {
    program: PathBuf,
    dir: tempfile::TempDir,
    huge_pages: HugePages,
}

impl PageOne {
    /// The program `pageone`, beside this one or in `PAGEONE_BIN_DIR`, with its agent.
    ///
    /// # Errors
    ///
    /// When one of them is not there.
    pub(crate) fn program() -> Result<PathBuf> {
        match std::env::var_os("PAGEONE_BIN_DIR") {
            Some(dir) => Self::program_in(Path::new(&dir)),
            None => Self::program_in(own_program()?.parent().unwrap_or(Path::new(""))),
        }
    }

    fn program_in(bin: &Path) -> Result<PathBuf> {
        for name in ["pageone", "libpageone_agent.so"] {
            ensure!(
                bin.join(name).exists(),
                "{name} is not in {}; build it with `make build`, or set PAGEONE_BIN_DIR",
                bin.display()
            );
        }
        Ok(bin.join("pageone"))
    }

    /// Looks for the program, and makes a directory for its daemon.
    ///
    /// # Errors
    ///
    /// Those of [`PageOne::program`].
    pub(crate) fn find() -> Result<Self> {
        Self::of(Self::program()?)
    }

    /// The same for a build in another directory.
    pub(crate) fn find_in(bin: &Path) -> Result<Self> {
        Self::of(Self::program_in(bin)?)
    }

    fn of(program: PathBuf) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("pageone-bench-").tempdir().context("no directory for the daemon")?;
        Ok(Self { program, dir, huge_pages: HugePages::Split(0) })
    }

    /// What becomes of clients' huge pages, from now on.
    pub(crate) fn set_huge_pages(&mut self, policy: HugePages) -> Result<()> {
        self.huge_pages = policy;
        let line = match policy {
            HugePages::Keep => "huge_pages = \"keep\"\n".to_string(),
            HugePages::Split(percent) => format!("huge_page_share = {percent}\n"),
        };
        self.configure(&line)
    }

    /// The daemon's configuration, from its next start on.
    pub(crate) fn configure(&self, lines: &str) -> Result<()> {
        fs::write(self.dir.path().join(CONFIG), lines).context("cannot write the daemon's configuration")
    }

    /// What the daemon that was started last says.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.path().join("daemon.log")
    }

    fn config(&self) -> PathBuf {
        let config = self.dir.path().join(CONFIG);
        if config.exists() { config } else { "/dev/null".into() }
    }

    /// The command of the program with these arguments, for this daemon.
    pub(crate) fn pageone(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--dir").arg(self.dir.path()).args(args);
        command
    }

    /// The command that runs `program` as a client; the agent's log goes to a file.
    pub(crate) fn launch(&self, program: &Command) -> Result<Command> {
        self.launch_with(program, &[])
    }

    /// The same, with options of `pageone run`.
    pub(crate) fn launch_with(&self, program: &Command, options: &[&str]) -> Result<Command> {
        let mut command = self.pageone(&["run", "--no-start"]);
        if self.huge_pages != HugePages::Split(0) {
            command.args(["--huge-pages", "keep"]);
        }
        command.args(options).arg("--");
        command.arg(program.get_program()).args(program.get_args());
        let log = File::options().create(true).append(true).open(self.dir.path().join("clients.log"));
        command.stderr(log.context("cannot write the clients' log")?);
        Ok(command)
    }

    /// Starts a daemon with the default configuration and this merge period, in seconds, and waits
    /// until it answers.
    pub(crate) fn daemon(&self, merge_period: f64, interrupt: &Interrupt) -> Result<Daemon> {
        self.daemon_with(merge_period, 0, interrupt)
    }

    /// The same, with `threads` threads; 0: one for each CPU. It does its work at once (`--mode
    /// none`), as KSM does, which is compared with it.
    pub(crate) fn daemon_with(&self, merge_period: f64, threads: usize, interrupt: &Interrupt) -> Result<Daemon> {
        self.daemon_with_options(merge_period, threads, &[], interrupt)
    }

    /// The same, with further options of `pageone daemon`.
    pub(crate) fn daemon_with_options(
        &self,
        merge_period: f64,
        threads: usize,
        options: &[&str],
        interrupt: &Interrupt,
    ) -> Result<Daemon> {
        let (period, threads) = (merge_period.to_string(), threads.to_string());
        let mut all = vec!["--merge-period", &period, "--threads", &threads, "--mode", "none"];
        all.extend(options);
        self.daemon_as(&all, interrupt)
    }

    /// Starts a daemon with the default configuration and these options, and waits until it
    /// answers.
    pub(crate) fn daemon_as(&self, options: &[&str], interrupt: &Interrupt) -> Result<Daemon> {
        let path = self.log();
        let log = File::create(&path).context("cannot write the daemon's log")?;
        // Should this program be killed, the daemon ends too.
        let mut command = self.pageone(&["daemon", "--exit-when-idle", "60", "--config"]);
        command.arg(self.config()).args(options);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let mut daemon = Daemon { child: child.context("cannot start the daemon")? };
        interrupt.until_each(Duration::from_millis(20), "the daemon answers", Duration::from_secs(20), || {
            if let Some(end) = daemon.child.try_wait()? {
                bail!("the daemon ended, {end}:\n{}", fs::read_to_string(&path).unwrap_or_default());
            }
            Ok(self.status().ok())
        })?;
        Ok(daemon)
    }

    /// Asks the daemon, as `pageone status --json` does, but without starting a program each time:
    /// that would take its share of the CPUs.
    ///
    /// # Errors
    ///
    /// When none answers, or when it refuses a client: then there is nothing to measure.
    pub(crate) fn status(&self) -> Result<Status> {
        let status = self.any_status()?;
        refused(&status).map_or(Ok(status), |why| bail!("a client is not merged: {why}"))
    }

    /// The same, but a client may be left alone for a while, as on a busy host: that is said.
    pub(crate) fn status_of_most(&self) -> Result<Status> {
        let status = self.any_status()?;
        if let Some(why) = refused(&status) {
            eprintln!("pageone-bench: a client is not merged now: {why}");
        }
        Ok(status)
    }

    pub(crate) fn any_status(&self) -> Result<Status> {
        Ok(control::client::status(&[self.dir.path().to_path_buf()])?)
    }
}

fn refused(status: &Status) -> Option<String> {
    status.clients().find_map(|client| client.remarks.refused.clone())
}

/// A running daemon; it is killed with this value.
pub(crate) struct Daemon {
    child: Child,
}

impl Daemon {
    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Ends it as an operator would. What is merged stays merged.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = Pid::from_raw(self.pid()).context("the daemon has no number")?;
        kill_process(pid, Signal::TERM).context("cannot stop the daemon")?;
        let end = self.child.wait()?;
        ensure!(end.success(), "the daemon ended, {end}");
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After `stop` there is nothing left to kill, and the standard library knows.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The CPU times of the daemon and of each client's agent.
pub(crate) struct Times {
    daemon: cpu::Times,
    agents: Vec<cpu::Times>,
}

impl Times {
    /// Takes them; `clients`: their processes.
    pub(crate) fn take(daemon: &Daemon, clients: &[i32]) -> Result<Self> {
        let agent = |name: &str| name.starts_with("pageone-");
        let daemon = cpu::thread_times(daemon.pid(), |_| true).context("cannot read the CPU time of the daemon")?;
        let agents = clients.iter().map(|&client| cpu::thread_times(client, agent));
        Ok(Self { daemon, agents: agents.collect::<std::io::Result<_>>().context("cannot read that of a client")? })
    }

    /// Nanoseconds since: the daemon's, the agents'.
    pub(crate) fn since(&self, before: &Times) -> (u64, u64) {
        let agents = before.agents.iter().zip(&self.agents).map(|(before, now)| cpu::spent(before, now)).sum();
        (cpu::spent(&before.daemon, &self.daemon), agents)
    }
}

#[cfg(test)]
mod tests {
    use control::{ClientMetrics, ClientStatus, DomainStatus};

    use super::*;

    #[test]
    fn a_status_is_summed_up_over_clients() {
        let metrics = ClientMetrics { pages_merged: 5, pages_zero: 2, full_scans: 3, ..ClientMetrics::default() };
        let client = ClientStatus { metrics, ..ClientStatus::default() };
        let domain = |count| DomainStatus { clients: vec![client.clone(); count], ..DomainStatus::default() };
        let status = Status { domains: vec![domain(1), domain(2)], ..Status::default() };
        assert_eq!((status.merged(), status.zero(), status.scans()), (15, 6, 9));
    }
}
