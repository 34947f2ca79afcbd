//! Subjects of the `governor` bench: the kernel's KSM under each governor.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use kmem::ksm::{Ksm, Ksmd, Snapshot, process_stat};
use testguest::find::cache_dir;

use crate::questions::governor::load::Load;
use crate::questions::governor::trace::Trace;
use crate::questions::governor::{Governed, Plan};
use crate::subjects::ksm::usable;
use crate::subjects::pageone::PageOne;
use bench_common::interrupt::Interrupt;

/// KSM under way.
pub(crate) struct GovernedKsm {
    ksmd: Ksmd,
    governing: Governing,
    /// CPU time of ksmd at the start, in seconds.
    cpu: f64,
    scans: u64,
}

impl GovernedKsm {
    /// Keeps the settings for the end, or says why it can't be measured here.
    pub(crate) fn prepare(subject: &str) -> Result<Result<Settings, String>> {
        let ksm = match usable()? {
            Ok((ksm, _)) => ksm,
            Err(why) => return Ok(Err(why)),
        };
        if subject == "ksm-advisor" && ksm.advisor_mode().is_err() {
            return Ok(Err("this kernel has no advisor".into()));
        }
        Ok(Ok(Settings(Snapshot::of(&ksm)?, ksm)))
    }

    /// What a page costs when all are looked at and none is new, in seconds of CPU time: the third
    /// scan of the load that is there. Stops KSM
    /// then and makes it forget.
    pub(crate) fn cost(plan: &Plan, interrupt: &Interrupt) -> Result<f64> {
        let ksm = Ksm::open()?;
        let ksmd = Ksmd::find()?.context("ksmd is gone")?;
        if ksm.advisor_mode().is_ok() {
            ksm.set_advisor_mode("none")?;
        }
        ksm.set_pages_to_scan(plan.static_pages(Duration::from_millis(ksm.sleep_millisecs()?), 0.0))?;
        let scans = || anyhow::Ok(ksm.stats()?.full_scans.unwrap_or(0));
        let first = scans()?;
        ksm.set_run(1)?;
        let at = |scan: u64| {
            while scans()? < first + scan {
                interrupt.sleep(Duration::from_millis(2))?;
            }
            let pages = ksm.stats()?.pages_scanned.context("this kernel does not count scanned pages")?;
            anyhow::Ok((ksmd.cpu_time()?.as_secs_f64(), pages))
        };
        let (before, after) = (at(2)?, at(3)?);
        ksm.set_run(2)?;
        Ok((after.0 - before.0) / (after.1 - before.1).max(1) as f64)
    }

    /// Sets KSM as the subject has it, and starts it. `cost`: of a page, for `static`.
    pub(crate) fn start(plan: &Plan, subject: &str, cost: f64) -> Result<Result<Self, String>> {
        let ksm = Ksm::open()?;
        let ksmd = Ksmd::find()?.context("ksmd is gone")?;
        let governing = match start(plan, subject, cost, &ksm)? {
            Ok(governing) => governing,
            Err(why) => return Ok(Err(why)),
        };
        let scans = ksm.stats()?.full_scans.unwrap_or(0);
        Ok(Ok(Self { cpu: ksmd.cpu_time()?.as_secs_f64(), ksmd, governing, scans }))
    }
}

impl Governed for GovernedKsm {
    fn step(&mut self, at: f64, trace: &mut Trace) -> Result<()> {
        let now: u64 = std::fs::read_to_string("/sys/kernel/mm/ksm/full_scans")?.trim().parse()?;
        if now > self.scans {
            trace.ends.push(at);
            self.scans = now;
        }
        Ok(())
    }

    fn cpu(&mut self, _: &Load<'_>) -> Result<f64> {
        Ok(self.ksmd.cpu_time()?.as_secs_f64() - self.cpu)
    }

    fn merged(&mut self, load: &Load<'_>) -> Result<u64> {
        load.clients.iter().map(|client| Ok(process_stat(client.pid())?.merging_pages.unwrap_or(0))).sum()
    }

    fn governing(&self) -> f64 {
        self.governing.cpu()
    }
}

/// KSM's settings, put back at the end, with nothing merged any more.
pub(crate) struct Settings(Snapshot, Ksm);

impl Drop for Settings {
    fn drop(&mut self) {
        // 2 makes it forget the ended processes.
        for result in [self.1.set_run(2), self.0.restore()] {
            if let Err(e) = result {
                eprintln!("pageone-bench: KSM's settings: {e}");
            }
        }
    }
}

/// A governing program outside the kernel; ended with this value.
struct Governing(Option<Child>);

impl Governing {
    /// Of it and of the programs that it started, in seconds.
    fn cpu(&self) -> f64 {
        self.0.as_ref().map_or(0.0, |child| tree_cpu(child.id() as i32))
    }
}

impl Drop for Governing {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It leads a process group of its own: ksmtuned waits in a program that it started.
            if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
            }
            let _ = child.wait();
        }
    }
}

/// CPU time of a process and its ended children, in seconds.
fn tree_cpu(pid: i32) -> f64 {
    let stat = kmem::procfs::Stat::of(Some(pid));
    let ticks: u64 = stat.map_or(0, |stat| (14..18).filter_map(|number| stat.field(number).ok()).sum());
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Sets KSM as the subject has it, and starts it.
fn start(plan: &Plan, subject: &str, cost: f64, ksm: &Ksm) -> Result<Result<Governing, String>> {
    let sleep = Duration::from_millis(ksm.sleep_millisecs()?);
    if ksm.advisor_mode().is_ok() {
        ksm.set_advisor_mode("none")?;
    }
    let write = |name: &str, value: u64| {
        std::fs::write(format!("/sys/kernel/mm/ksm/{name}"), value.to_string()).with_context(|| name.to_owned())
    };
    let spawn = |command: &mut Command| {
        use std::os::unix::process::CommandExt;
        let command = command.stdin(Stdio::null()).process_group(0);
        anyhow::Ok(Governing(Some(command.spawn().context("cannot start it")?)))
    };
    let governing = match subject {
        "static" | "static-unloaded" => {
            ksm.set_pages_to_scan(plan.static_pages(sleep, cost))?;
            Governing(None)
        }
        "ksm-advisor" => {
            write("advisor_target_scan_time", plan.target.as_secs())?;
            write("advisor_max_cpu", plan.max_cpu as u64)?;
            ksm.set_advisor_mode("scan-time")?;
            Governing(None)
        }
        "ksmtuned" => {
            let Some(script) = find_ksmtuned() else {
                return Ok(Err("ksmtuned is not there; `scripts/deps.sh bench` fetches it".into()));
            };
            let mut command = Command::new("bash");
            command.stdout(Stdio::null());
            // Its loop, in the foreground; it waits for a minute by default, and ours are seconds.
            command.arg("-c").arg(r#"script=$(sed '/^PIDFILE=/,$d' "$1"); eval "$script"; loop"#).arg("ksmtuned");
            command.arg(script).env("KSM_THRES_COEF", "99").env("KSM_MONITOR_INTERVAL", "6");
            spawn(&mut command)?
        }
        _ => {
            let (target, max_cpu) = (plan.target.as_secs_f64().to_string(), plan.max_cpu.to_string());
            let mut command = Command::new(PageOne::program()?);
            command.stdout(Stdio::null());
            // The default minimum of 500 is for more memory than this.
            spawn(command.args(["ksm", "advise", "--target", &target, "--max-cpu", &max_cpu, "--min-pages", "100"]))?
        }
    };
    ksm.set_run(1)?;
    Ok(Ok(governing))
}

fn find_ksmtuned() -> Option<PathBuf> {
    let cached = cache_dir().ok().map(|cache| cache.join("ksmtuned/usr/sbin/ksmtuned"));
    [Some(PathBuf::from("/usr/sbin/ksmtuned")), cached].into_iter().flatten().find(|place| place.exists())
}
