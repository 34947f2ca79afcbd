//! The daemon: accepts the client's agent, sends it frames and batches, and keeps what it answers.

use super::client::ROLE;
use super::{PAGE, PATTERNS, pattern, pattern_of};
use kmem::memfd::{self, SharedMap};
use kmem::seqpacket::{Conn, Listener};
use kmem::uffd::{Features, Uffd};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use wire::{Merge, MergeRun, Outcome, PageNo, RegionId, Report, Run, SEGMENT_PAGES, Slot, Target, ToAgent, ToDaemon};

/// A running client.
pub struct Program {
    child: Child,
    /// The lines that it and its agent wrote.
    log: tempfile::NamedTempFile,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    /// Starts this executable again as the client, with the library preloaded.
    pub fn start(socket: &std::path::Path, sabotage: Option<&str>) -> Program {
        Program::start_with(socket, sabotage.map(|sabotage| ("PAGEONE_SABOTAGE", sabotage)))
    }

    /// The same with something in its environment.
    pub fn start_with<'a>(
        socket: &std::path::Path,
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Program {
        let executable = std::env::current_exe().unwrap();
        let library = executable.with_file_name("libpageone_agent.so");
        assert!(library.exists(), "{} was not built", library.display());
        let mut command = Command::new(executable);
        command.args(["--exact", "client", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, "1").env(wire::ENV_SOCKET, socket).env("LD_PRELOAD", library);
        command.envs(variables);
        let log = tempfile::NamedTempFile::new().unwrap();
        command.stderr(log.reopen().unwrap());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Program { child, log, commands, answers }
    }

    /// Gives a command without waiting.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// The answer to a command given before; `None` if the program died.
    pub fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.answers.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some((_, answer)) = line.trim_end().split_once("> ") {
                return Some(answer.to_owned());
            }
        }
    }

    /// Gives a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer().unwrap_or_else(|| panic!("the program died of {command:?}"))
    }

    /// What it and its agent have written to standard error.
    pub fn lines(&self) -> Vec<String> {
        std::fs::read_to_string(self.log.path()).unwrap().lines().map(str::to_owned).collect()
    }

    /// A line of `/proc/PID/status`.
    pub fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
    }

    /// Its descriptors.
    pub fn descriptors(&self) -> String {
        let directory = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let mut targets: Vec<_> = directory.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap()).collect();
        targets.sort();
        format!("{targets:?}")
    }

    /// Number of the process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lines().iter().for_each(|line| println!("{line}"));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A store of one segment that holds every pattern, each slot once, after each other.
pub struct Store {
    pub fd: OwnedFd,
    pub map: SharedMap,
    pub id: u64,
}

impl Store {
    pub fn new() -> Store {
        let (fd, map) = memfd::create_sealed("pageone-test", SEGMENT_PAGES as usize * PAGE).unwrap();
        for number in 0..PATTERNS {
            map.write_page(number as usize, &bytes(number));
        }
        let id = memfd::identity(&fd).unwrap().ino;
        Store { fd, map, id }
    }

    /// Whether a frame was changed.
    pub fn is_damaged(&self) -> bool {
        (0..PATTERNS).any(|number| {
            let mut page = [0; PAGE];
            self.map.read_page(number as usize, &mut page);
            page != bytes(number)
        })
    }

    /// Runs that merge these pages of the client with their patterns, zeros with zeros.
    pub fn runs(&self, pages: std::ops::Range<usize>) -> Vec<MergeRun> {
        let mut runs: Vec<MergeRun> = Vec::new();
        for page in pages {
            let number = pattern_of(page);
            let target =
                if number == 0 { Target::Zero } else { Target::Frames { segment: self.id, slot: Slot(number) } };
            match runs.last_mut() {
                Some(last)
                    if last.run.end() == PageNo(page as u32)
                        && matches!(last.target, Target::Frames { slot, .. } if slot + last.run.len == Slot(number)) =>
                {
                    last.run.len += 1;
                }
                _ => runs.push(MergeRun { run: Run::one(PageNo(page as u32)), target }),
            }
        }
        runs
    }
}

/// The bytes of a pattern.
pub fn bytes(number: u32) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    for (bytes, word) in page.chunks_exact_mut(8).zip(pattern(number)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    page
}

/// The socket, and at most one client's connection.
pub struct Daemon {
    _dir: tempfile::TempDir,
    pub socket: PathBuf,
    listener: Listener,
    conn: Option<Conn>,
    pub control: Option<SharedMap>,
    /// What came while something else was waited for.
    pub seen: Vec<ToDaemon>,
    /// Whether batches leave pages alone that were written since the last scan.
    pub calm: bool,
    /// What the welcome says of direct I/O.
    pub direct_io_ms: u32,
    /// The version of the protocol that it welcomes agents with.
    pub version: u16,
    batch: u64,
}

/// A control page: a memfd that cannot shrink.
pub fn control_page() -> (OwnedFd, SharedMap) {
    use rustix::fs::{MemfdFlags, SealFlags};
    let fd = rustix::fs::memfd_create("control", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, wire::control::LEN as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    let map = memfd::map_shared(&fd, wire::control::LEN).unwrap();
    (fd, map)
}

/// What the agent needs of the kernel to merge pages.
pub const MERGES: Features = Features::WP.union(Features::WP_ASYNC);
/// What it needs to merge pages that a device may write to.
pub const MOVES: Features = Features::WP_ASYNC.union(Features::MOVE);

/// Whether the kernel can do this; prints that the test is skipped if not.
pub fn kernel_can(features: Features) -> bool {
    Uffd::new(features).inspect_err(|why| println!("SKIPPED: {why}")).is_ok()
}

/// Pages of a client that [`managed`] starts.
pub const PAGES: usize = 2048;

/// A client of [`PAGES`] pages that obeyed the commands `before` it marked them, and its daemon.
pub fn managed(before: &[&str]) -> Option<(Daemon, Program, Store)> {
    if !kernel_can(MERGES) {
        return None;
    }
    let mut daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, None);
    before.iter().for_each(|command| assert_eq!(program.ask(command), "0", "{command}"));
    let store = daemon.manage(&mut program, PAGES);
    Some((daemon, program, store))
}

/// A client of [`PAGES`] pages that are merged, and its daemon.
pub fn merged() -> Option<(Daemon, Program, Store)> {
    let (mut daemon, program, store) = managed(&[])?;
    daemon.merge_all(&store);
    Some((daemon, program, store))
}

impl Daemon {
    pub fn new() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let listener = Listener::bind(&socket, 0o666).unwrap();
        Daemon {
            _dir: dir,
            socket,
            listener,
            conn: None,
            control: None,
            seen: Vec::new(),
            calm: false,
            direct_io_ms: 0,
            version: wire::VERSION,
            batch: 0,
        }
    }

    /// Has a client that runs map `pages` pages and mark them; accepts it, and gives it a store.
    pub fn manage(&mut self, program: &mut Program, pages: usize) -> Store {
        let start: u64 = program.ask(&format!("map {pages}")).parse().unwrap();
        assert_eq!(program.ask("mark"), "0");
        self.adopt(start, pages)
    }

    /// Accepts a client that has marked memory, and gives it a store.
    pub fn adopt(&mut self, start: u64, pages: usize) -> Store {
        self.seen = self.accept();
        let added = (start, (pages * PAGE) as u64);
        self.wait_for(|message| matches!(*message, ToDaemon::RegionAdded { start, len, .. } if (start, len) == added));
        self.welcome();
        let store = Store::new();
        self.give(&store);
        store
    }

    /// Whether somebody connects.
    pub fn is_wanted(&mut self) -> bool {
        self.listener.accept().unwrap().is_some()
    }

    /// Waits for the agent to connect; returns its first message, and that one's version.
    pub fn accept_hello(&mut self) -> (ToDaemon, u16) {
        self.conn = None;
        self.seen.clear();
        let end = Instant::now() + Duration::from_secs(60);
        while self.conn.is_none() {
            assert!(Instant::now() < end, "the agent does not come");
            self.conn = self.listener.accept().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        let hello = self.next();
        let ToDaemon::Hello { version, .. } = hello else { panic!("{hello:?}") };
        (hello, version)
    }

    /// Waits for the agent to connect and tell its regions; returns these messages.
    pub fn accept(&mut self) -> Vec<ToDaemon> {
        let (hello, version) = self.accept_hello();
        assert_eq!(version, self.version);
        let mut account = vec![hello];
        while account.last() != Some(&ToDaemon::Ready) {
            account.push(self.next());
        }
        account
    }

    pub fn welcome(&mut self) {
        let (fd, map) = control_page();
        self.send(&ToAgent::Welcome { version: self.version, direct_io_ms: self.direct_io_ms }, &[&fd]);
        self.control = Some(map);
        self.wait_for(|message| matches!(message, ToDaemon::Mapped { .. }));
    }

    pub fn give(&mut self, store: &Store) {
        self.send(&ToAgent::Segment { segment: store.id }, &[&store.fd]);
    }

    pub fn send(&mut self, message: &ToAgent, fds: &[&OwnedFd]) {
        self.send_bytes(&wire::encode(message), fds);
    }

    pub fn send_bytes(&mut self, packet: &[u8], fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.conn.as_ref().unwrap().send(packet, &fds).unwrap();
    }

    /// Sends a message to an agent that may be gone.
    pub fn try_send(&mut self, message: &ToAgent) {
        let _ = self.conn.as_ref().unwrap().send(&wire::encode(message), &[]);
    }

    /// Hangs up.
    pub fn close(&mut self) {
        self.conn = None;
    }

    fn receive(&mut self) -> Option<Option<ToDaemon>> {
        let mut packet = vec![0; wire::MAX_MESSAGE];
        let mut fds = Vec::new();
        match self.conn.as_ref().unwrap().recv(&mut packet, &mut fds) {
            Ok(None) => None,
            Ok(Some(0)) | Err(_) => Some(None),
            Ok(Some(len)) => Some(Some(wire::decode_to_daemon(&packet[..len], self.version).unwrap())),
        }
    }

    /// The next message.
    pub fn next(&mut self) -> ToDaemon {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match self.receive() {
                Some(Some(message)) => return message,
                Some(None) => panic!("the agent closed the connection"),
                None => assert!(Instant::now() < end, "the agent says nothing"),
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Waits for a message that fits; others are kept.
    pub fn wait_for(&mut self, fits: impl Fn(&ToDaemon) -> bool) {
        if let Some(found) = self.seen.iter().position(&fits) {
            self.seen.remove(found);
            return;
        }
        loop {
            let message = self.next();
            if fits(&message) {
                return;
            }
            self.seen.push(message);
        }
    }

    /// Waits until the agent hangs up.
    pub fn wait_for_close(&mut self) {
        let end = Instant::now() + Duration::from_secs(60);
        while !matches!(self.receive(), Some(None)) {
            assert!(Instant::now() < end, "the agent stays");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Merges the runs, a batch at a time, and returns how each page fared.
    pub fn merge(&mut self, region: u32, runs: &[MergeRun]) -> Vec<(u32, Outcome)> {
        self.merge_reports(region, runs).iter().flat_map(|report| &report.outcomes).flat_map(pages_of).collect()
    }

    /// Merges all of the first region of a client of [`PAGES`] pages.
    pub fn merge_all(&mut self, store: &Store) {
        let outcomes = self.merge(1, &store.runs(0..PAGES));
        let left: Vec<_> = outcomes.iter().filter(|(_, outcome)| *outcome != Outcome::Merged).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    pub fn merge_reports(&mut self, region: u32, runs: &[MergeRun]) -> Vec<Report> {
        let mut reports = Vec::new();
        for runs in runs.chunks(256) {
            self.batch += 1;
            self.send(
                &ToAgent::Merge(Merge {
                    batch: self.batch,
                    region: RegionId(region),
                    runs: runs.to_vec(),
                    calm: self.calm,
                }),
                &[],
            );
            let mut told = Vec::new();
            loop {
                match self.next() {
                    ToDaemon::Report(report) => {
                        assert_eq!(report.batch, self.batch);
                        told.extend(report.outcomes.iter().flat_map(pages_of).map(|(page, _)| page));
                        let last = report.last;
                        reports.push(report);
                        if last {
                            break;
                        }
                    }
                    other => self.seen.push(other),
                }
            }
            let asked: Vec<u32> = runs.iter().flat_map(|run| run.run.pages().map(|page| page.0)).collect();
            assert_eq!(told, asked, "every page is told of once, in order");
        }
        reports
    }
}

fn pages_of(outcome: &wire::RunOutcome) -> impl Iterator<Item = (u32, Outcome)> + use<> {
    let result = outcome.outcome;
    outcome.run.pages().map(move |page| (page.0, result))
}
