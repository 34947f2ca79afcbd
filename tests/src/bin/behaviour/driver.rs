//! Starts the daemon and the clients, and lets things happen to them.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use e2e::{Daemon, program, signal_process};

use crate::arena::{ALPHABET, content};
use crate::random::Random;
use crate::slow::SlowFile;

const ARGS: [&str; 6] = ["--merge-period", "0.1", "--reclaim-period", "0.2", "--mode", "none"];
/// The longest time for a client to end when it is told to, and for a command.
const PATIENCE: Duration = Duration::from_secs(90);
/// Pages of the slow file that each client has for itself.
const SLOW_PAGES: u64 = 1 << 20;

/// What is tried.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) time: Duration,
    pub(crate) clients: usize,
    pub(crate) without: Vec<String>,
    pub(crate) client_seed: Option<u64>,
    pub(crate) sabotage: Option<String>,
    /// The daemon's `direct_io_seconds`.
    pub(crate) direct_io: u64,
}

/// Something that happens.
pub(crate) struct Event {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) weight: u64,
    run: fn(&mut Driver),
}

/// All events.
pub(crate) static EVENTS: [Event; 9] = [
    Event { name: "daemon-kill", weight: 10, run: Driver::kill, help: "kills the daemon, and starts it again" },
    Event { name: "daemon-stop", weight: 10, run: Driver::stop, help: "stops the daemon for a while" },
    Event { name: "daemon-end", weight: 3, run: Driver::end, help: "ends the daemon, and starts it again" },
    Event { name: "detach", weight: 10, run: Driver::detach, help: "detaches a client; it runs on for a while" },
    Event { name: "checkpoint", weight: 6, run: Driver::checkpoint, help: "stores a checkpoint of a client" },
    Event { name: "dirty", weight: 4, run: Driver::dirty, help: "watches what a client writes" },
    Event { name: "client-stop", weight: 10, run: Driver::client_stop, help: "stops a client for a while" },
    Event { name: "client-kill", weight: 6, run: Driver::client_kill, help: "kills a client; others take its place" },
    Event { name: "client-end", weight: 10, run: Driver::client_end, help: "tells a client to end" },
];

struct Running {
    child: Child,
    seed: u64,
    /// When it was told to end.
    told: Option<Instant>,
    killed: bool,
}

type Line = (usize, Option<String>);

struct Driver {
    plan: Plan,
    random: Random,
    daemon: Daemon,
    slow: Option<SlowFile>,
    contents: PathBuf,
    running: HashMap<usize, Running>,
    started: usize,
    lines: (Sender<Line>, Receiver<Line>),
    /// Lines about a finding.
    findings: Vec<String>,
    most_merged: u64,
    counts: HashMap<&'static str, u64>,
}

/// Tries one seed; false if there is a finding.
pub(crate) fn run(plan: Plan) -> bool {
    let daemon = Daemon::with_settings(&ARGS, &format!("direct_io_seconds = {}\n", plan.direct_io));
    let contents = daemon.dir.path().join("contents");
    let all: Vec<u8> = (0..ALPHABET).flat_map(content).copied().collect();
    std::fs::write(&contents, all).unwrap();
    let slow = SlowFile::mount(daemon.dir.path());
    if slow.is_none() {
        println!("SKIPPED: slow-read and slow-write: a FUSE file system cannot be mounted");
    }
    println!("seed {}, {} s, {} clients", plan.seed, plan.time.as_secs(), plan.clients);
    let mut driver = Driver {
        random: Random::new(plan.seed),
        plan,
        daemon,
        slow,
        contents,
        running: HashMap::new(),
        started: 0,
        lines: channel(),
        findings: Vec::new(),
        most_merged: 0,
        counts: HashMap::new(),
    };
    driver.try_all()
}

impl Driver {
    fn try_all(&mut self) -> bool {
        let end = Instant::now() + self.plan.time;
        self.pageone(&["pool", "create", "store", "--capacity", &self.path("capacity")]);
        while Instant::now() < end && self.findings.is_empty() {
            while self.running.values().filter(|client| client.told.is_none()).count() < self.plan.clients {
                self.start_client();
            }
            // Where all is slower, so is this: something is to be merged in between.
            let pause = (200 + self.random.below(1500)) * u64::from(e2e::patience());
            self.hear(Duration::from_millis(pause));
            if self.findings.is_empty() {
                self.happen();
            }
        }
        self.running.values_mut().for_each(Running::tell);
        while !self.running.is_empty() && self.findings.is_empty() {
            self.hear(Duration::from_millis(500));
        }
        self.report()
    }

    fn path(&self, name: &str) -> String {
        self.daemon.dir.path().join(name).display().to_string()
    }

    /// Lets something happen.
    fn happen(&mut self) {
        let allowed = |event: &&Event| !self.plan.without.iter().any(|name| name == event.name);
        let events: Vec<&Event> = EVENTS.iter().filter(allowed).collect();
        let sum: u64 = events.iter().map(|event| event.weight).sum();
        if sum == 0 {
            return;
        }
        let mut at = self.random.below(sum);
        for event in events {
            if at < event.weight {
                *self.counts.entry(event.name).or_default() += 1;
                (event.run)(self);
                break;
            }
            at -= event.weight;
        }
        if let Some(status) = self.daemon.try_status() {
            self.most_merged = self.most_merged.max(status["pages_sharing"].as_u64().unwrap_or(0));
        }
    }

    fn start_client(&mut self) {
        let number = self.started;
        self.started += 1;
        let seed = self.plan.client_seed.unwrap_or(Random::new(self.plan.seed ^ (number as u64) << 32).next() >> 16);
        let mut command = self.daemon.run(&[]);
        command.arg(program("pageone-behaviour-fuzz")).arg("client").args(["--seed", &seed.to_string()]);
        command.args(["--contents", &self.contents.display().to_string(), "--files", &self.path("")]);
        command.args(["--slow-from", &(SLOW_PAGES * (1 + number as u64)).to_string()]);
        if let Some(slow) = &self.slow {
            command.arg("--slow").arg(&slow.path);
        }
        if !self.plan.without.is_empty() {
            command.args(["--without", &self.plan.without.join(",")]);
        }
        if let Some(guard) = &self.plan.sabotage {
            command.env("PAGEONE_SABOTAGE", guard);
        }
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path("clients")).unwrap();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let (lines, output) = (self.lines.0.clone(), child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                let _ = lines.send((number, Some(line)));
            }
            let _ = lines.send((number, None));
        });
        self.running.insert(number, Running { child, seed, told: None, killed: false });
    }

    /// Hears clients for this long.
    fn hear(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            match self.lines.1.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((number, Some(line))) => self.heard(number, &line),
                Ok((number, None)) => self.ended(number),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let patience = PATIENCE * e2e::patience();
        let late = |client: &&Running| client.told.is_some_and(|told| told.elapsed() > patience);
        if let Some(client) = self.running.values().find(late) {
            let (pid, seed) = (client.child.id(), client.seed);
            self.findings.push(format!("FINDING client {pid} (client seed {seed}) does not end when it is told to"));
            self.findings.extend(processes(seed));
        }
    }

    fn heard(&mut self, number: usize, line: &str) {
        if line.starts_with("FINDING") || line.starts_with("  ") {
            self.findings.push(format!("client {number}: {line}"));
        } else if line == "END" {
            self.findings.push(String::new());
        } else if line != "ready" {
            println!("client {number}: {line}");
        }
    }

    /// A client, and all that it started, has closed its output.
    fn ended(&mut self, number: usize) {
        let Some(mut client) = self.running.remove(&number) else { return };
        let status = client.child.wait().unwrap();
        if !status.success() && !client.killed && self.findings.is_empty() {
            let seed = client.seed;
            self.findings.push(format!("FINDING client {number} (client seed {seed}) ended: {status}"));
        }
    }

    fn report(&mut self) -> bool {
        let merged = self.most_merged;
        println!("{} clients, {merged} pages_sharing at most, {:?}", self.started, self.counts);
        if self.findings.is_empty() {
            assert!(merged > 100 || self.plan.time.as_secs() < 20, "little was merged: {merged} pages");
            return true;
        }
        // The rest of what is said.
        self.hear(Duration::from_secs(2));
        self.findings.iter().for_each(|line| println!("{line}"));
        let tail = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            println!("--- {name}:\n{}", lines[lines.len().saturating_sub(12)..].join("\n"));
        };
        tail("clients");
        tail("log");
        println!("again: pageone-behaviour-fuzz --seed {} --clients {}", self.plan.seed, self.plan.clients);
        for client in self.running.values_mut() {
            let _ = client.child.kill();
        }
        false
    }

    /// One of the clients that were not told to end.
    fn some_client(&mut self) -> Option<usize> {
        let mut numbers: Vec<usize> = self.running.iter().filter(|(_, c)| c.told.is_none()).map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        let choice = self.random.next() as usize;
        (!numbers.is_empty()).then(|| numbers[choice % numbers.len()])
    }

    fn pause(&mut self, most: u64) {
        let time = self.random.below(most);
        self.hear(Duration::from_millis(time));
    }

    fn kill(&mut self) {
        self.daemon.kill();
        self.pause(1500);
        self.daemon.restart();
    }

    fn stop(&mut self) {
        self.daemon.signal(libc::SIGSTOP);
        self.pause(1000);
        self.daemon.signal(libc::SIGCONT);
    }

    fn end(&mut self) {
        self.daemon.stop();
        self.pause(500);
        self.daemon.restart();
    }

    /// A `pageone` command, which may fail: clients come and go, and daemons.
    fn pageone(&mut self, args: &[&str]) {
        let mut command = self.daemon.pageone(args);
        command.env("PAGEONE_POOLS", self.path("names"));
        self.finish(command, PATIENCE);
    }

    /// Waits for a command; kills it after a while.
    fn finish(&mut self, mut command: Command, limit: Duration) {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + limit;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                let _ = child.kill();
                self.findings.push(format!("FINDING {command:?} does not end"));
            }
            self.hear(Duration::from_millis(20));
        }
    }

    fn detach(&mut self) {
        let Some(number) = self.some_client() else { return };
        let pid = self.running[&number].child.id().to_string();
        self.pageone(&["detach", &pid]);
        self.pause(1500);
        // It is merged no longer: another one takes its place.
        self.tell(number);
    }

    fn checkpoint(&mut self) {
        let Some(number) = self.some_client() else { return };
        let pid = self.running[&number].child.id().to_string();
        self.pageone(&["checkpoint", &pid, "--to", "store", "--name", "one", "--json"]);
        self.pageone(&["pool", "rm", "store", "one"]);
    }

    fn dirty(&mut self) {
        let Some(number) = self.some_client() else { return };
        let pid = self.running[&number].child.id().to_string();
        let mut command = self.daemon.pageone(&["dirty", &pid]);
        command.env("PAGEONE_POOLS", self.path("names"));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.pause(3000);
        let _ = child.kill();
        let _ = child.wait();
    }

    fn client_stop(&mut self) {
        let Some(number) = self.some_client() else { return };
        let pid = self.running[&number].child.id() as i32;
        signal_process(pid, libc::SIGSTOP);
        self.pause(700);
        signal_process(pid, libc::SIGCONT);
    }

    fn client_kill(&mut self) {
        let Some(number) = self.some_client() else { return };
        if let Some(client) = self.running.get_mut(&number) {
            client.killed = true;
            let _ = client.child.kill();
            client.tell();
        }
    }

    fn client_end(&mut self) {
        let Some(number) = self.some_client() else { return };
        self.tell(number);
    }

    fn tell(&mut self, number: usize) {
        if let Some(client) = self.running.get_mut(&number) {
            client.tell();
        }
    }
}

/// The processes of a client, and where their threads wait.
fn processes(seed: u64) -> Vec<String> {
    let own = format!("client\0--seed\0{seed}\0");
    let mut lines = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let command = std::fs::read_to_string(process.path().join("cmdline")).unwrap_or_default();
        if !command.contains(&own) {
            continue;
        }
        for task in std::fs::read_dir(process.path().join("task")).into_iter().flatten().flatten() {
            let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let stat = read("stat");
            let state: Vec<&str> = stat.split(' ').skip(1).take(3).collect();
            let stack = read("stack").replace('\n', " ");
            lines.push(format!("  {} {state:?} {} {stack}", task.path().display(), read("syscall").trim()));
        }
    }
    lines
}

impl Running {
    /// Tells the client to end.
    fn tell(&mut self) {
        drop(self.child.stdin.take());
        self.told.get_or_insert_with(Instant::now);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for client in self.running.values_mut() {
            let _ = client.child.kill();
            let _ = client.child.wait();
        }
        self.slow = None;
    }
}
