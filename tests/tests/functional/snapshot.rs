//! `pageone run --snapshots` and `pageone snapshot`: real guests that are stored with their devices
//! and go on as clones.

mod attached;
mod clones;
mod compressed;
mod crashes;
mod database;
mod devices;
mod disks;
mod figures;
mod full;
mod goes_on;
mod medium;
mod merged;
mod network;
mod refused;
mod rights;
mod template;
mod trials;
mod uffd;
mod unprepared;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use e2e::qmp::Qmp;
use e2e::{Daemon, Guest, eventually, skipped};
use serde_json::{Value, json};

/// MiB of the guests that boot.
const MEMORY: u32 = 192;

/// Whether snapshots can be tried here; says why not.
fn can_run() -> bool {
    if !rustix::process::geteuid().is_root() {
        skipped("clones take root: their memory is served through FUSE");
        return false;
    }
    if !Path::new("/dev/fuse").exists() {
        skipped("no /dev/fuse");
        return false;
    }
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        skipped("no qemu-system-x86_64");
        return false;
    }
    true
}

/// A pool, and a daemon.
struct Place {
    dir: tempfile::TempDir,
    daemon: Daemon,
}

impl Place {
    fn new() -> Self {
        Self::with_pool(false)
    }

    /// Without the pool.
    fn empty() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), daemon: Daemon::with(&["--merge-period", "0.5"]) }
    }

    fn with_pool(encrypted: bool) -> Self {
        let place = Self::empty();
        let (capacity, key) = (place.path("capacity").display().to_string(), place.path("key"));
        let mut make = vec!["pool", "create", "store", "--capacity", &capacity];
        if encrypted {
            let mut file = std::fs::File::options().create_new(true).write(true).mode(0o600).open(&key).unwrap();
            file.write_all(&[7; 32]).unwrap();
            make.extend(["--key-file", key.to_str().unwrap()]);
        }
        place.ok(&make);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.daemon.pageone(args);
        command.env("PAGEONE_POOLS", self.path("names"));
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let out = self.run(args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    /// The sentence with which a command fails.
    fn fails(&self, args: &[&str]) -> String {
        let out = self.run(args);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stdout));
        text
    }

    fn save(&self, pid: i32, name: &str) -> Value {
        // A busy machine may take long to copy a raw disk.
        let pid = pid.to_string();
        let words = ["snapshot", "save", &pid, "--to", "store", "--name", name, "--json", "--max-pause", "60000"];
        let out = self.ok(&words);
        println!("{}", out.trim());
        serde_json::from_str(&out).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let all: Value = serde_json::from_str(&self.ok(&["snapshot", "ls", "store", "--json"])).unwrap();
        all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    /// A command that starts a prepared guest.
    fn prepared(&self, words: &[String]) -> Command {
        let mut command = self.daemon.run(&["--snapshots"]);
        command.args(words);
        command
    }

    /// A prepared guest that has checked its files once. `None`: none can boot here.
    fn guest(&self) -> Option<Guest> {
        let mut guest = Guest::start(self.prepared(&clones::guest_words(self)?));
        guest.pass_rounds(1);
        Some(guest)
    }

    /// A prepared machine without an operating system, with a monitor for the test: its firmware
    /// looks for a disk to boot from.
    fn machine(&self, name: &str, more: &[&str]) -> Machine {
        self.machine_of(name, &[&["-nodefaults", "-no-user-config"], more].concat())
    }

    /// The same with QEMU's defaults.
    fn machine_of(&self, name: &str, more: &[&str]) -> Machine {
        let monitor = self.path(&format!("{name}.qmp"));
        let qmp = Qmp::words(&monitor);
        let base =
            ["qemu-system-x86_64", "-accel", "tcg,tb-size=16", "-cpu", "qemu64,-cx16", "-m", "64", "-display", "none"];
        let words = [&base[..], more].concat();
        let words: Vec<String> = words.into_iter().map(String::from).chain(qmp).collect();
        let child = self.prepared(&words).stdin(Stdio::null()).process_group(0).spawn().unwrap();
        let machine = Machine { child, monitor };
        assert_eq!(status(&mut machine.qmp()), "running");
        // The agent has taken the RAM.
        let pid = machine.pid();
        eventually("the daemon knows it", Duration::from_secs(20), || self.daemon.client(pid));
        machine
    }

    /// A machine with a disk `d0`, `disk.qcow2`.
    fn machine_with_disk(&self) -> (PathBuf, Machine) {
        let disk = self.path("disk.qcow2");
        e2e::qmp::make_disk(&disk);
        let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
        (disk, self.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]))
    }

    /// Starts clones of a snapshot; gives the command's process, when all have started.
    fn clones(&self, name: &str, count: usize, extra: &[&str]) -> Clones {
        self.clones_with(name, name, count, &[], extra)
    }

    /// The same with options of the command, and the clones' files in `clones-FILES`.
    fn clones_with(&self, name: &str, files: &str, count: usize, options: &[&str], extra: &[&str]) -> Clones {
        let files = self.path(&format!("clones-{files}"));
        let (number, directory) = (count.to_string(), files.display().to_string());
        let mut command = self.command(&["snapshot", "run", "store", name, "--count", &number, "--files", &directory]);
        command
            .args(options)
            .args(["--same-random", "--"])
            .args(extra)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut server = command.spawn().unwrap();
        let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
        let mut clones = Vec::new();
        while clones.len() < count {
            let line = lines.next().expect("all clones start").unwrap();
            println!("{line}");
            let other = [
                "a page that cannot be read",
                "KSM is stopped",
                "each guest loads QEMU for itself",
                "the clock stands at",
            ];
            if other.iter().any(|said| line.contains(said)) {
                continue;
            }
            let Some(rest) = line.strip_prefix("pageone: guest ") else { panic!("{line}") };
            let pid = rest.split(' ').next().unwrap().parse().unwrap();
            let directory = PathBuf::from(rest.rsplit(": ").next().unwrap());
            clones.push(OneClone { pid, directory });
        }
        // What it says later must not stop it.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
        Clones { server, clones }
    }
}

struct OneClone {
    pid: i32,
    directory: PathBuf,
}

impl OneClone {
    fn output(&self) -> String {
        std::fs::read_to_string(self.directory.join("output.log")).unwrap_or_default()
    }

    /// Rounds of checks that it passed. Panics if it saw a wrong byte.
    fn rounds(&self) -> usize {
        let text = self.output();
        assert!(!text.contains("CORRUPT") && !text.contains("panic"), "{text}");
        text.lines().filter(|line| line.contains(" PASS checks=")).count()
    }

    /// Waits until it has passed this number of rounds in all.
    fn pass_rounds(&self, rounds: usize) {
        eventually("a clone's rounds", Duration::from_secs(240), || (self.rounds() >= rounds).then_some(()));
    }

    fn runs(&self) -> bool {
        // A zombie has no memory.
        std::fs::read_link(format!("/proc/{}/exe", self.pid)).is_ok()
    }

    /// The monitor that the source's command line names `name`.
    fn qmp(&self, name: &str) -> Qmp {
        Qmp::connect(&self.directory.join(name))
    }
}

struct Clones {
    server: Child,
    clones: Vec<OneClone>,
}

impl Drop for Clones {
    fn drop(&mut self) {
        for clone in &self.clones {
            e2e::signal_process(clone.pid, libc::SIGKILL);
        }
        e2e::signal_process(self.server.id() as i32, libc::SIGTERM);
        let _ = self.server.wait();
    }
}

struct Machine {
    child: Child,
    monitor: PathBuf,
}

impl Machine {
    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.monitor)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The guest's state.
fn status(qmp: &mut Qmp) -> String {
    qmp.execute("query-status", json!({}))["status"].as_str().unwrap().to_owned()
}

/// The address of a guest's RAM in its process.
fn ram_of(qmp: &mut Qmp) -> u64 {
    let text = qmp.monitor("gpa2hva 0");
    u64::from_str_radix(text.trim().rsplit("0x").next().unwrap(), 16).unwrap()
}

/// A program's memory from this address on.
fn memory(pid: i32, address: u64, len: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; len];
    std::fs::File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut bytes, address).unwrap();
    bytes
}
