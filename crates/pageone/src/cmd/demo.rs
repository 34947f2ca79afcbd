//! `pageone demo`: guests, and a daemon in a directory of its own that merges them.

mod course;
mod table;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control::HostMetrics;
use parking_lot::Mutex;

use self::course::Backend;
use crate::cmd::run;
use crate::{Code, Coded, paths};

/// Options of `pageone demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    demo: course::Options,
    /// Seconds between two scans
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    merge_period: f64,
}

/// The demo's daemon.
struct Daemon {
    directory: PathBuf,
    program: PathBuf,
    merge_period: f64,
    ppr: bool,
    child: Mutex<Option<Child>>,
}

impl Backend for Daemon {
    fn prepare(&self) -> Result<()> {
        std::fs::create_dir(&self.directory).with_context(|| format!("cannot create {}", self.directory.display()))
    }

    fn launcher(&self, _guest: usize) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![
            self.program.clone().into(),
            "run".into(),
            "--dir".into(),
            self.directory.clone().into(),
            "--no-start".into(),
        ];
        words.extend(self.ppr.then(|| "--ppr".into()));
        words.push("--".into());
        words
    }

    fn start_merging(&self) -> Result<()> {
        let mut daemon = Command::new(&self.program);
        daemon.arg("--dir").arg(&self.directory).args(["daemon", "--merge-period", &self.merge_period.to_string()]);
        let log = output::file::begin(&self.directory.join("daemon.log"), output::Existing::Replaced)?;
        let child =
            daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().context("cannot start the daemon")?;
        *self.child.lock() = Some(child);
        let has_ended = || matches!(self.child.lock().as_mut().map(Child::try_wait), Some(Ok(Some(_))));
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.status().is_err() {
            if has_ended() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.directory.join("daemon.log")).unwrap_or_default();
                bail!("the daemon did not start:\n{log}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn status(&self) -> Result<HostMetrics> {
        Ok(control::client::status(std::slice::from_ref(&self.directory))?.metrics)
    }

    fn stop(&self) -> Result<()> {
        if let Some(mut child) = self.child.lock().take() {
            if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            child.wait()?;
        }
        std::fs::remove_dir_all(&self.directory).with_context(|| format!("cannot remove {}", self.directory.display()))
    }
}

/// Runs the demo.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.demo.probe {
        return course::probe(&args.demo);
    }
    paths::agent_library()?;
    run::check_kernel().map_err(|e| Coded(Code::HostLacks, format!("{e:#}; `pageone doctor` says more")))?;
    let directory = std::env::temp_dir().join(format!("pageone-demo-{}", std::process::id()));
    let program = std::env::current_exe().context("cannot find this program")?;
    let daemon = Daemon {
        directory,
        program,
        merge_period: args.merge_period,
        ppr: args.demo.guest.ppr,
        child: Mutex::new(None),
    };
    course::run(&args.demo, &daemon)?.verdict()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(directory: PathBuf, program: &str) -> Daemon {
        Daemon { directory, program: program.into(), merge_period: 1.0, ppr: false, child: Mutex::new(None) }
    }

    #[test]
    fn a_daemon_that_cannot_be_started_or_removed_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let demo = |program: &str| daemon(dir.path().join("demo"), program);
        let text = |result: Result<()>| format!("{:#}", result.unwrap_err());
        let error = text(demo("false").start_merging());
        assert!(error.starts_with("cannot write ") && error.contains("daemon.log: "), "{error}");
        let error = text(demo("false").stop());
        assert!(error.starts_with("cannot remove "), "{error}");
        demo("false").prepare().unwrap();
        let error = text(demo("false").prepare());
        assert!(error.starts_with("cannot create "), "{error}");
        let error = text(demo("/nonexistent").start_merging());
        assert!(error.starts_with("cannot start the daemon: "), "{error}");
        // The program writes why into the log, and ends: nobody waits for it.
        let (ends, begin) = (demo("cat"), Instant::now());
        let error = text(ends.start_merging());
        assert!(error.starts_with("the daemon did not start:\n") && error.contains("--dir"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(30));
        ends.stop().unwrap();
        assert!(!dir.path().join("demo").exists());
    }
}
