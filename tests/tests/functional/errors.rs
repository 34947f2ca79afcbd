//! Errors and their codes: each that a command can be brought to here ends with the code that the
//! reference gives its sentence.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use e2e::{Daemon, program};

/// The line for each sentence: code, crate, sentence.
const CODES: &str = include_str!("../../../crates/pageone/src/exit/codes.txt");

/// The code at the end of what a command says.
fn code_in(error: &str) -> Option<&str> {
    let (_, rest) = error.trim_end().rsplit_once(" [")?;
    rest.strip_suffix(']').filter(|code| code.starts_with('P'))
}

/// A program that does nothing; it is killed at the end.
struct Sleeper(std::process::Child);

impl Sleeper {
    fn start(program: &str) -> Self {
        Self(Command::new(program).arg("1000").spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command in a directory without a daemon.
fn alone(dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new(program("pageone"));
    command.arg("--dir").arg(dir.join("none")).args(args).current_dir(dir).env("PAGEONE_CACHE", dir.join("cache"));
    command.env("PAGEONE_POOLS", dir.join("names"));
    String::from_utf8_lossy(&command.output().unwrap().stderr).into_owned()
}

#[test]
fn errors_end_with_the_code_that_the_reference_gives_their_sentence() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    for (name, text) in [
        ("short", "x"),
        ("other.img", "not a pool"),
        ("bad.toml", "merge_period = -1\n"),
        ("newer.rec", "PageONE record 2"),
        ("empty.rec", "PageONE record 1"),
    ] {
        std::fs::write(dir.join(name), text).unwrap();
    }
    std::fs::create_dir(dir.join("pool")).unwrap();
    std::fs::create_dir(dir.join("empty")).unwrap();
    std::fs::write(dir.join("empty/data"), "what is here is not a pool").unwrap();
    let daemon = Daemon::start();
    let asked = |args: &[&str]| {
        let mut command = daemon.pageone(args);
        let out = command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).output().unwrap();
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let own = std::process::id().to_string();
    let sleeper = Sleeper::start("sleep");
    let stopped = Sleeper::start("sleep");
    e2e::signal_process(stopped.pid(), libc::SIGSTOP);
    let (asleep, halted) = (sleeper.pid().to_string(), stopped.pid().to_string());
    let of_daemon = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let mut threads: Vec<String> = of_daemon.map(|task| task.file_name().into_string().unwrap()).collect();
    threads.retain(|thread| *thread != daemon.pid().to_string());
    alone(dir, &["pool", "create", "--capacity", "./made", "made"]);
    let copied = Command::new("cp").args(["-a", "made", "lost"]).current_dir(dir).status().unwrap();
    assert!(copied.success());
    std::fs::remove_file(dir.join("lost/data")).unwrap();
    let socket = daemon.dir.path().join("control.sock");
    // What is done, and words of the sentence that it must come to.
    let cases: Vec<(String, &str)> = vec![
        (alone(dir, &["status"]), "no daemon answers in"),
        (asked(&["attach", "999999999"]), "there is no process"),
        (alone(dir, &["doctor", "999999999"]), "there is no process"),
        (alone(dir, &["metrics", "--listen", "0.0.0.0:0"]), "is not of the loopback"),
        (alone(dir, &["metrics", "--socket", "/nonexistent/x"]), "cannot listen on"),
        (alone(dir, &["demo", "--guests", "0"]), "there is nothing to merge"),
        (alone(dir, &["dirty", "--interval", "0.01"]), "--interval"),
        (alone(dir, &["dirty", "--bandwidth", "0"]), "must be more than 0"),
        (alone(dir, &["checkpoint", "--to", "pool", "nobody-of-this-name"]), "no process is called"),
        (alone(dir, &["pool", "show", "./pool"]), "holds no pool"),
        (alone(dir, &["pool", "show", "nowhere"]), "no pool is called"),
        (
            alone(dir, &["pool", "create", "--capacity", "./empty", "never-made"]),
            "has no superblock, but a file `data`",
        ),
        (alone(dir, &["pool", "destroy", "./pool"]), "removes"),
        (asked(&["top"]), "this needs a terminal"),
        (asked(&["top", "--every", "0.01"]), "between 0.1 and 3600 seconds"),
        (asked(&["record", "-o", "new.rec", "--for", "0"]), "--for must be more than 0 seconds"),
        (alone(dir, &["record", "-o", "new.rec"]), "no daemon answers in"),
        (alone(dir, &["replay", "nowhere.rec"]), "cannot open"),
        (alone(dir, &["replay", "other.img"]), "this is no recording"),
        (alone(dir, &["replay", "newer.rec"]), "this build reads format 1"),
        (alone(dir, &["replay", "empty.rec"]), "has no moment that can be read"),
        (alone(dir, &["report", "empty.rec"]), "say what to write"),
        (alone(dir, &["estimate", "/nonexistent"]), "nothing could be looked at"),
        (alone(dir, &["checkpoint", "--to", "pool", "--name", "x", "1", "2"]), "--name names one checkpoint"),
        (alone(dir, &["daemon", "--config", "bad.toml"]), "P0005"),
        (alone(dir, &["daemon", "--config", "nowhere.toml"]), "P0005"),
        (asked(&["daemon", "--config", "/dev/null"]), "another daemon is running"),
        (asked(&["dirty", &own]), "is no client of this daemon"),
        (asked(&["attach", &asleep, "--timeout", "1"]), "was not seen to wait for events"),
        (asked(&["attach", &halted]), "is stopped; let it go on first"),
        (asked(&["attach", &threads[0]]), "is a thread of process"),
        (alone(dir, &["checkpoint", "--to", "made", &asleep]), "has no memory to store"),
        (alone(dir, &["checkpoint", "--to", "made", "999999999"]), "no process"),
        (alone(dir, &["restore", "made", "nope", "--to", "out"]), "no checkpoint is called"),
        (alone(dir, &["pool", "create", "--capacity", "./new", "bad name"]), "is no name for a pool"),
        (alone(dir, &["pool", "create", "--capacity", "./made", "again"]), "holds a pool, or a class of one"),
        (alone(dir, &["pool", "rebuild", "./lost"]), "this writes the superblocks"),
        (alone(dir, &["pool", "show", "./lost"]), "has no file `data`"),
        (alone(dir, &["metrics", "--socket", socket.to_str().unwrap()]), "somebody listens on"),
        (asked(&["detach", &own]), "is no client of this daemon"),
    ];
    let mut reached = BTreeSet::new();
    let mut missed = Vec::new();
    for (said, words) in &cases {
        let code = code_in(said);
        let sentence = code.and_then(|code| CODES.lines().find(|line| line.starts_with(code)));
        match sentence.filter(|line| line.contains(words)).or(code.filter(|code| code == words)) {
            Some(_) => drop(reached.insert(code.unwrap_or_default().to_owned())),
            None => missed.push(format!("{words}: {said} ({sentence:?})")),
        }
    }
    for line in CODES.lines().filter(|line| !reached.iter().any(|code| line.starts_with(code.as_str()))) {
        println!("SKIPPED: {line}: no case brings a command to it here");
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_code_has_one_sentence() {
    let mut seen = BTreeSet::new();
    for line in CODES.lines() {
        let parts: Vec<&str> = line.split('\t').collect();
        let [code, _, sentence] = parts[..] else { panic!("{line}") };
        assert!(code.len() == 5 && seen.insert(code) && !sentence.is_empty(), "{line}");
    }
}
