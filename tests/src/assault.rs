//! A daemon under attack, and what is left of another user's speed.
//!
//! A victim gets new content again and again; its speed is the pages that are merged a second.
//! Slices of time with the attackers and slices without alternate, so that a machine which is slow
//! for a while is slow for both. The attackers share one CPU ([`crate::user::last_cpu_only`]). In
//! each slice without them a program burns as much CPU time there as they used in the slice before:
//! what is measured is what the attackers make the daemon do, not that they compute.

use std::fmt;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{Client, Daemon, program, user};

/// The user whose memory is to be merged.
pub const VICTIM: u32 = 65_533;
/// The user that attacks.
pub const ATTACKER: u32 = 65_534;
/// Pages of the victim: 64 MiB.
const PAGES: u64 = 16_384;
/// Pages of a round that must be merged; the last ones may wait for another scan.
const ENOUGH: u64 = PAGES * 95 / 100;
/// A round that takes longer counts as this long.
const ROUND_LIMIT: Duration = Duration::from_secs(10);
/// Time between two looks at the victim.
const LOOK: Duration = Duration::from_millis(10);
/// How long the daemon may take to forget attackers that have ended.
const SETTLE: Duration = Duration::from_millis(500);

/// Why no attack can be tried here, if so.
pub fn cannot_attack() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root: attackers and victim need users of their own".into());
    }
    let tried = Command::new(program("pageone-hostile-client"))
        .args(["/nonexistent", &ATTACKER.to_string(), "1", "burn=0"])
        .stdin(Stdio::null())
        .output();
    let tried = tried.unwrap();
    (!tried.status.success())
        .then(|| format!("no process can become user {ATTACKER}: {}", String::from_utf8_lossy(&tried.stderr).trim()))
}

/// The names of all attacks.
pub fn attacks() -> Vec<String> {
    let out = Command::new(program("pageone-hostile-client")).arg("list").output().unwrap();
    String::from_utf8(out.stdout).unwrap().lines().map(str::to_string).collect()
}

/// What a daemon holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holdings {
    /// Resident memory in MiB.
    pub rss_mib: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Lines in its log.
    pub log_lines: u64,
    /// Bytes in its log.
    pub log_bytes: u64,
}

impl Holdings {
    fn of(daemon: &Daemon) -> Self {
        let process = format!("/proc/{}", daemon.pid());
        let status = std::fs::read_to_string(format!("{process}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let log = std::fs::read(daemon.dir.path().join("log")).unwrap_or_default();
        Self {
            rss_mib: field("VmRSS:") >> 10,
            threads: field("Threads:"),
            descriptors: std::fs::read_dir(format!("{process}/fd")).map_or(0, |fds| fds.count() as u64),
            log_lines: log.iter().filter(|&&byte| byte == b'\n').count() as u64,
            log_bytes: log.len() as u64,
        }
    }

    fn raise_to(&mut self, other: Self) {
        self.rss_mib = self.rss_mib.max(other.rss_mib);
        self.threads = self.threads.max(other.threads);
        self.descriptors = self.descriptors.max(other.descriptors);
        self.log_lines = self.log_lines.max(other.log_lines);
        self.log_bytes = self.log_bytes.max(other.log_bytes);
    }
}

/// What slices of one kind had: with attackers, or without.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slices {
    /// Pages of the victim that were merged.
    pub pages: u64,
    /// How long that took, with the time in which the victim wrote them.
    pub merging: Duration,
    /// The longest round.
    pub longest: Duration,
    /// The longest time that root waited for the status.
    pub status: Duration,
    /// CPU time of the daemon.
    pub daemon_cpu: Duration,
    /// CPU time of attackers, or of the program in their place.
    pub others_cpu: Duration,
    /// How long these slices took.
    pub time: Duration,
    /// Steps of the attack.
    pub steps: u64,
}

impl Slices {
    /// Pages merged a second.
    pub fn speed(&self) -> f64 {
        self.pages as f64 / self.merging.as_secs_f64().max(1e-9)
    }

    fn share(&self, used: Duration) -> f64 {
        used.as_secs_f64() / self.time.as_secs_f64().max(1e-9)
    }
}

/// An attack's outcome.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The attack.
    pub name: String,
    /// With the attackers.
    pub with: Slices,
    /// Without them.
    pub without: Slices,
    /// Before the first of them came.
    pub calm: Slices,
    /// What the daemon held before.
    pub before: Holdings,
    /// The most that it held.
    pub most: Holdings,
    /// What it held when the attackers were gone.
    pub after: Holdings,
    /// The daemon has ended.
    pub died: bool,
}

impl Figures {
    /// The victim's speed with the attackers, in percent of that without. What they did to the
    /// daemon may outlast them: then the speed before they came counts.
    pub fn percent(&self) -> f64 {
        100.0 * self.with.speed() / self.without.speed().max(self.calm.speed() / 2.0).max(1e-9)
    }

    /// The head of a table of figures.
    pub fn head() -> String {
        format!(
            "{:<22}{:>9}{:>8}{:>8}{:>8}{:>9}{:>9}{:>7}{:>9}{:>9}{:>8}{:>7}{:>9}{:>8}",
            "attack",
            "steps",
            "its cpu",
            "cpu",
            "without",
            "pages/s",
            "without",
            "%",
            "longest",
            "status",
            "MiB",
            "fds",
            "threads",
            "log"
        )
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (with, without) = (&self.with, &self.without);
        write!(
            f,
            "{:<22}{:>9}{:>8.2}{:>8.2}{:>8.2}{:>9.0}{:>9.0}{:>7.1}{:>8.2}s{:>8.2}s{:>+8}{:>7}{:>9}{:>8}{}",
            self.name,
            with.steps,
            with.share(with.others_cpu),
            with.share(with.daemon_cpu),
            without.share(without.daemon_cpu),
            with.speed(),
            without.speed(),
            self.percent(),
            with.longest.as_secs_f64(),
            with.status.as_secs_f64(),
            self.most.rss_mib as i64 - self.before.rss_mib as i64,
            self.most.descriptors,
            self.most.threads,
            self.most.log_lines - self.before.log_lines,
            if self.died { "  DIED" } else { "" },
        )
    }
}

/// A daemon and the client whose speed counts.
pub struct Assault {
    /// The daemon.
    pub daemon: Daemon,
    victim: Client,
    seed: u64,
    /// Pages of the victim merged so far, as last seen.
    merged: u64,
}

impl Assault {
    /// Starts a daemon and a victim whose first round is over. `seed`: what `mix` draws from.
    pub fn new(daemon: Daemon, seed: u64) -> Self {
        // Any user may connect, as in /run.
        std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        // If an attack takes all memory, the daemon is to lose and not the machine.
        std::fs::write(format!("/proc/{}/oom_score_adj", daemon.pid()), "1000").unwrap();
        let words = ["hold", &PAGES.to_string(), "4", "1"];
        let mut victim = daemon.scenario_with(&[], &words, &[(user::ENV_UID, &VICTIM.to_string())]);
        victim.expect("ready");
        daemon.wait_merged(victim.pid(), ENOUGH);
        Self { daemon, victim, seed, merged: ENOUGH }
    }

    /// Alternates slices with these attacks and without them. `None` in place of a name: see
    /// [`attacks`]; `mix` draws from all.
    pub fn run(&mut self, attack: &str, pairs: usize, slice: Duration) -> Figures {
        let before = Holdings::of(&self.daemon);
        let mut figures = Figures { name: attack.into(), before, most: before, ..Figures::default() };
        self.slice("burn=0.1", slice / 2, &mut figures.calm, &mut figures.most);
        for _ in 0..pairs {
            let share = figures.with.share(figures.with.others_cpu);
            self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let mut with = std::mem::take(&mut figures.with);
            let used = with.others_cpu;
            self.slice(attack, slice, &mut with, &mut figures.most);
            figures.with = with;
            figures.died = self.daemon.has_ended();
            if figures.died {
                break;
            }
            let last = (figures.with.others_cpu - used).as_secs_f64() / slice.as_secs_f64();
            let burn = if share > 0.0 { (share + last) / 2.0 } else { last };
            self.slice(&format!("burn={burn:.3}"), slice, &mut figures.without, &mut figures.most);
        }
        figures.after = Holdings::of(&self.daemon);
        figures
    }

    /// What the daemon holds now.
    pub fn holdings(&self) -> Holdings {
        Holdings::of(&self.daemon)
    }

    /// The victim checks every byte of its memory.
    pub fn check_memory(&mut self) {
        self.victim.go();
    }

    fn slice(&mut self, what: &str, time: Duration, sums: &mut Slices, most: &mut Holdings) {
        let cpu = || kmem::procfs::cpu_time(self.daemon.pid()).unwrap_or_default();
        let (begin, cpu_before) = (Instant::now(), cpu());
        let mut attackers = Attackers::start(&self.daemon, self.seed, what);
        let end = begin + time;
        while Instant::now() < end && !self.daemon.has_ended() {
            let (pages, merging) = self.round(most);
            sums.pages += pages;
            sums.merging += merging;
            sums.longest = sums.longest.max(merging);
            sums.status = sums.status.max(self.status_takes());
        }
        sums.time += begin.elapsed();
        let cpu = kmem::procfs::cpu_time(self.daemon.pid()).unwrap_or_default();
        sums.daemon_cpu += cpu.saturating_sub(cpu_before);
        let (used, steps) = attackers.end();
        sums.others_cpu += used;
        sums.steps += steps;
        std::thread::sleep(SETTLE);
    }

    /// How long root waits for the status.
    fn status_takes(&self) -> Duration {
        let asked = Instant::now();
        let answer = status_as(&self.daemon, 0, ROUND_LIMIT);
        if answer.is_some() { asked.elapsed() } else { ROUND_LIMIT }
    }

    /// Gives the victim new content; returns the pages merged and how long that took.
    fn round(&mut self, most: &mut Holdings) -> (u64, Duration) {
        let before = self.merged;
        let begin = Instant::now();
        self.victim.tell("refill");
        self.victim.expect("ok");
        let mut looked = Instant::now();
        while self.merged < before + ENOUGH && begin.elapsed() < ROUND_LIMIT && !self.daemon.has_ended() {
            std::thread::sleep(LOOK);
            let limit = ROUND_LIMIT.saturating_sub(begin.elapsed()).max(LOOK);
            self.merged = merged_ever(&self.daemon, self.victim.pid(), limit).unwrap_or(self.merged).max(self.merged);
            if looked.elapsed() > Duration::from_millis(200) {
                looked = Instant::now();
                most.raise_to(Holdings::of(&self.daemon));
            }
        }
        most.raise_to(Holdings::of(&self.daemon));
        (self.merged - before, begin.elapsed())
    }
}

/// Pages of a client that were ever merged: those that are, and those that were written since.
fn merged_ever(daemon: &Daemon, pid: i32, limit: Duration) -> Option<u64> {
    let status = status_as(daemon, VICTIM, limit)?;
    let clients = status["status"]["domains"].as_array()?.iter().flat_map(|domain| domain["clients"].as_array());
    let client = clients.flatten().find(|client| client["pid"] == pid)?;
    Some(client["pages_merged"].as_u64()? + client["pages_copied_total"].as_u64()?)
}

/// What the control socket answers to a user. A thread of its own asks: users are a matter of
/// threads.
pub fn status_as(daemon: &Daemon, uid: u32, limit: Duration) -> Option<Value> {
    let socket = daemon.dir.path().join("control.sock");
    let ask = move || {
        user::this_thread_is(uid).ok()?;
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(limit)).ok()?;
        stream.write_all(b"\"status\"\n").ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        serde_json::from_slice(&answer).ok()
    };
    std::thread::spawn(ask).join().ok().flatten()
}

/// The attackers, or the program that takes their place.
struct Attackers(Child);

impl Attackers {
    fn start(daemon: &Daemon, seed: u64, what: &str) -> Self {
        let mut command = Command::new(program("pageone-hostile-client"));
        command.arg(daemon.dir.path()).args([&ATTACKER.to_string(), &seed.to_string()]).args(what.split('+'));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Ends them; gives the CPU time that they used and the steps that they did.
    fn end(&mut self) -> (Duration, u64) {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let words: Vec<&str> = said.split_whitespace().collect();
        let ["cpu", cpu, "did", steps] = words[..] else { panic!("the attackers said {said:?}") };
        (Duration::from_secs_f64(cpu.parse().unwrap()), steps.parse().unwrap())
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
