//! Helpers for the end-to-end tests: real daemons, real clients, real guests.
//!
//! The programs under test are taken from the directory of the test itself (or `PAGEONE_BIN_DIR`),
//! so the same test binary runs in a build tree and inside a guest of another kernel.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

pub mod assault;
pub mod qmp;
pub mod user;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

pub use qmp::Qmp;
use serde_json::Value;

/// Finds a program (or library) of this build.
pub fn program(name: &str) -> PathBuf {
    let mut places = Vec::new();
    if let Some(dir) = std::env::var_os("PAGEONE_BIN_DIR") {
        places.push(PathBuf::from(dir));
    }
    let own = std::env::current_exe().unwrap();
    places.extend(own.ancestors().skip(1).take(2).map(Path::to_path_buf));
    let found = places.iter().map(|dir| dir.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {places:?}; `make test` builds it first"))
}

/// How many times longer things may take here than on a quick machine: `PAGEONE_TEST_PATIENCE`, 1
/// if unset.
pub fn patience() -> u32 {
    std::env::var("PAGEONE_TEST_PATIENCE").ok().and_then(|p| p.parse().ok()).unwrap_or(1)
}

/// Runs `check` until it gives something, for at most `limit`, or three minutes: a slow machine is
/// no error.
pub fn eventually<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let limit = limit.max(Duration::from_secs(180)) * patience();
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Content of a word of a page; seed 0 is a page of zeros.
pub fn pattern(seed: u64, word: usize) -> u64 {
    if seed == 0 { 0 } else { (seed ^ (word as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
}

/// Sum of a field of `/proc/PID/smaps` (`Size`), in KiB, over the mappings that have this one of
/// `VmFlags` (proc_pid_smaps(5)).
pub fn smaps_kib(pid: i32, field: &str, flag: &str) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut here, mut sum) = (0, 0);
    for line in smaps.lines() {
        if let Some(kib) = line.strip_prefix(field).and_then(|rest| rest.strip_prefix(':')) {
            here = kib.trim().trim_end_matches(" kB").parse().unwrap();
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|has| has == flag)) {
            sum += here;
        }
    }
    sum
}

/// Prints why a test cannot run here.
pub fn skipped(why: &str) {
    println!("SKIPPED: {why}");
}

/// A daemon in a directory of its own.
pub struct Daemon {
    /// Its directory.
    pub dir: tempfile::TempDir,
    /// What it is started from.
    program: PathBuf,
    child: Child,
    args: Vec<String>,
}

impl Daemon {
    /// Starts one with a merge period of 0.1 s.
    pub fn start() -> Self {
        Self::with(&["--merge-period", "0.1"])
    }

    /// Starts one with these options of `pageone daemon`. Nothing here does direct I/O, so copied
    /// pages need no cooldown.
    pub fn with(args: &[&str]) -> Self {
        Self::with_config(args, "")
    }

    /// The same, with more lines of configuration.
    pub fn with_config(args: &[&str], lines: &str) -> Self {
        Self::with_settings(args, &format!("direct_io_seconds = 0\n{lines}"))
    }

    /// The same, with all lines of the configuration.
    pub fn with_settings(args: &[&str], lines: &str) -> Self {
        Self::within(tempfile::tempdir().unwrap(), args, lines)
    }

    /// The same, in this directory.
    pub fn within(dir: tempfile::TempDir, args: &[&str], lines: &str) -> Self {
        let config = dir.path().join("config.toml");
        std::fs::write(&config, lines).unwrap();
        let mut args: Vec<String> = args.iter().map(|a| a.to_string()).collect();
        args.extend(["--config".into(), config.display().to_string()]);
        let program = program("pageone");
        let child = spawn_daemon(&program, dir.path(), &args);
        let mut daemon = Self { dir, program, child, args };
        daemon.wait_ready();
        daemon
    }

    fn wait_ready(&mut self) {
        eventually("the daemon answers", Duration::from_secs(20), || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the daemon ended at once: {status}");
            }
            self.try_status()
        });
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        signal_process(self.pid(), signal);
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Kills it without warning.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, in the same directory.
    pub fn restart(&mut self) {
        self.child = spawn_daemon(&self.program, self.dir.path(), &self.args);
        self.wait_ready();
    }

    /// The same from another build's `pageone`.
    pub fn restart_from(&mut self, program: PathBuf) {
        self.program = program;
        self.restart();
    }

    /// Starts it anew, in a mount namespace of its own, after this command of a shell. Any user may
    /// connect. For root only.
    pub fn restart_after(&mut self, command: &str) {
        use std::os::unix::fs::PermissionsExt;
        let starter = self.dir.path().join("starter");
        let begin = format!("{command} && exec {} \"$@\"", program("pageone").display());
        std::fs::write(&starter, format!("#!/bin/sh\nexec unshare --mount sh -c '{begin}' sh \"$@\"\n")).unwrap();
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&starter, open.clone()).unwrap();
        std::fs::set_permissions(self.dir.path(), open).unwrap();
        self.kill();
        self.restart_from(starter);
    }

    /// The same, where a user has 65,536 uids from [`user::FIRST_SUBORDINATE`] on. `false`: not
    /// here, for want of an `/etc/subuid` that another could be mounted over.
    pub fn restart_with_subuid(&mut self, uid: u32) -> bool {
        if !Path::new("/etc/subuid").exists() {
            return false;
        }
        let subuid = self.dir.path().join("subuid");
        std::fs::write(&subuid, format!("{uid}:{}:65536\n", user::FIRST_SUBORDINATE)).unwrap();
        self.restart_after(&format!("mount --bind {} /etc/subuid", subuid.display()));
        true
    }

    /// Ends it by SIGTERM; gives its exit code.
    pub fn stop(&mut self) -> Option<i32> {
        self.signal(libc::SIGTERM);
        self.child.wait().unwrap().code()
    }

    /// The same, if the daemon answers.
    pub fn try_status(&self) -> Option<Value> {
        let out = self.pageone(&["status", "--json"]).stderr(Stdio::null()).output().unwrap();
        out.status.success().then(|| serde_json::from_slice(&out.stdout).unwrap())
    }

    /// What `pageone status --json` says.
    pub fn status(&self) -> Value {
        self.try_status().expect("the daemon answers")
    }

    /// What it says of one client.
    pub fn client(&self, pid: i32) -> Option<Value> {
        let status = self.try_status()?;
        let domains = status["domains"].as_array()?;
        let clients = domains.iter().flat_map(|d| d["clients"].as_array().into_iter().flatten());
        clients.into_iter().find(|c| c["pid"] == pid).cloned()
    }

    /// A `pageone` command on this daemon.
    pub fn pageone(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program("pageone"));
        command.arg("--dir").arg(self.dir.path()).args(args);
        command
    }

    /// A command that runs a program as a client.
    pub fn run(&self, options: &[&str]) -> Command {
        let mut command = self.pageone(&["run", "--no-start"]);
        command.args(options).arg("--");
        command
    }

    /// Starts the test client with a scenario.
    pub fn scenario(&self, words: &[&str]) -> Client {
        self.scenario_with(&[], words, &[])
    }

    /// The same, with options of `pageone run` and environment variables.
    pub fn scenario_with(&self, options: &[&str], words: &[&str], env: &[(&str, &str)]) -> Client {
        let mut command = self.run(options);
        command.arg(program("pageone-test-client")).args(words).envs(env.iter().copied());
        Client::spawn(command)
    }

    /// Waits until at least this many pages of a client map frames, as long as they become more.
    pub fn wait_merged(&self, pid: i32, pages: u64) {
        let (mut seen, mut most, limit) = (0, 0, Duration::from_secs(180) * patience());
        let mut deadline = Instant::now() + limit;
        while seen < pages {
            assert!(Instant::now() < deadline, "{seen} of {pages} pages merged in time: {}", self.status());
            std::thread::sleep(Duration::from_millis(50));
            seen = self.client(pid).and_then(|c| c["pages_merged"].as_u64()).unwrap_or(0);
            if seen > most {
                (most, deadline) = (seen, Instant::now() + limit);
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        if std::thread::panicking() {
            eprintln!("--- the daemon's log:\n{log}");
        } else {
            // A worker's panic, or a frame that was counted wrong, may harm no program for hours.
            assert!(!log.contains("panicked at") && !log.contains("did not have"), "{log}");
        }
    }
}

fn spawn_daemon(program: &Path, dir: &Path, args: &[String]) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).unwrap();
    let mut command = Command::new(program);
    command.arg("--dir").arg(dir).arg("daemon").args(args).stdin(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}

/// Sends a signal to a process.
pub fn signal_process(pid: i32, signal: i32) {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else {
        return;
    };
    let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

/// Stops a process, and waits until it stands: its threads may go on for a while.
pub fn stop_process(pid: i32) {
    signal_process(pid, libc::SIGSTOP);
    eventually("the process stands", Duration::from_secs(60), || kmem::procfs::is_stopped(pid).unwrap().then_some(()));
}

/// A test client: a process that speaks lines.
pub struct Client {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// Starts a command as a client.
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { input: child.stdin.take(), child, lines }
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// A duplicate of a descriptor of its.
    pub fn descriptor(&self, number: i32) -> std::os::fd::OwnedFd {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        rustix::process::pidfd_getfd(&pidfd, number, rustix::process::PidfdGetfdFlags::empty()).unwrap()
    }

    /// The next line that it says.
    pub fn hear(&mut self) -> String {
        match self.lines.next() {
            Some(line) => line.unwrap(),
            None => format!("(it ended: {})", self.child.wait().unwrap()),
        }
    }

    /// Waits for this very line.
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.hear(), line, "from client {}", self.pid());
    }

    /// Says a line to it.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Tells it to go on, and expects that all is well.
    pub fn go(&mut self) {
        self.tell("go");
        self.expect("ok");
    }

    /// Kills it without warning.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end; gives its exit code.
    pub fn finish(&mut self) -> Option<i32> {
        drop(self.input.take());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kernels, and archives to boot them with, for guests whose free pages are recycled.
pub use testguest::load::boots as recycler_guests;

/// Words of the command that starts a guest of [`recycler_guests`]; `work`: parameters for
/// `guest/load/init`.
pub fn recycler_words(guest: &testguest::load::Boot, memory_mib: u32, work: &str) -> Vec<String> {
    testguest::load::words(guest, accelerator(), memory_mib.into(), work)
}

/// What tests' guests run on: KVM where `PAGEONE_TEST_ACCEL` says so (`scripts/lanes/kvm.sh`).
pub fn accelerator() -> testguest::Accelerator {
    match std::env::var("PAGEONE_TEST_ACCEL").as_deref() {
        Ok("kvm") => testguest::Accelerator::Kvm,
        _ => testguest::Accelerator::Tcg,
    }
}

/// A demo guest: checksums its files for ever and says so on its console.
pub struct Guest(testguest::Guest);

impl Guest {
    /// Words of the command that starts a demo guest, or why there can be none here.
    pub fn words(memory_mib: u32) -> Result<Vec<String>, String> {
        let append = Some("PAGEONE_PAUSE=1".to_string());
        let accelerator = accelerator();
        let options = testguest::Options { memory_mib, accelerator, append, ..Default::default() };
        let spec = testguest::Spec::prepare(&options).map_err(|e| e.to_string())?;
        Ok(spec.words().into_iter().map(|word| word.into_string().unwrap()).collect())
    }

    /// Starts a guest.
    pub fn start(command: Command) -> Self {
        Self(testguest::Guest::start(command).unwrap())
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.0.pid()
    }

    /// What it has said.
    pub fn console(&self) -> Vec<String> {
        self.0.console()
    }

    /// Rounds of checks that it passed. Panics if it saw a wrong byte or died.
    pub fn rounds(&mut self) -> usize {
        self.0.check().unwrap_or_else(|e| panic!("{e}:\n{}", self.0.console_tail()));
        self.0.rounds() as usize
    }

    /// Waits until the guest passed `more` further rounds.
    pub fn pass_rounds(&mut self, more: usize) {
        let target = self.rounds() + more;
        eventually("the guest's rounds", Duration::from_secs(240), || (self.rounds() >= target).then_some(()));
    }

    /// Ends it.
    pub fn kill(&mut self) {
        self.0.kill();
    }
}
