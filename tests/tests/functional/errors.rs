//! Errors: each that a command can be brought to here is said by its sentence.

mod forced;

use std::path::Path;
use std::process::Command;

use e2e::{Client, Daemon, program};

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

/// Attaches to a process whose status says that it has a shadow stack. Few programs have one yet,
/// so the file is covered with one that has the kernel's line.
fn with_shadow_stack(dir: &Path, process: &str) -> String {
    if !rustix::process::geteuid().is_root() {
        return "SKIPPED: covering a file of /proc takes root".into();
    }
    let script = "{ printf 'x86_Thread_features:\\tshstk\\n'; cat \"/proc/$1/status\"; } > status \
                  && mount --bind status \"/proc/$1/status\" && exec \"$0\" attach --socket / \"$1\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(program("pageone")).arg(process).current_dir(dir);
    String::from_utf8_lossy(&command.output().unwrap().stderr).into_owned()
}

#[test]
fn each_failure_is_said_by_its_sentence() {
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
    let mut unmarked = Command::new(program("pageone-test-client"));
    unmarked.args(["events", "1024", "4", "unmarked"]);
    let mut unmarked = Client::spawn(unmarked);
    unmarked.expect("ready");
    // What is done, and words of the sentence that it must come to.
    let mut cases: Vec<(String, &str)> = vec![
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
        (alone(dir, &["daemon", "--config", "bad.toml"]), "merge_period"),
        (alone(dir, &["daemon", "--config", "nowhere.toml"]), "nowhere.toml"),
        (asked(&["daemon", "--config", "/dev/null"]), "another daemon is running"),
        (asked(&["dirty", &own]), "is no client of this daemon"),
        (asked(&["attach", &asleep, "--timeout", "1"]), "was not seen to wait for events"),
        (asked(&["attach", &halted]), "is stopped; let it go on first"),
        (asked(&["attach", &threads[0]]), "is a thread of process"),
        (alone(dir, &["checkpoint", "--to", "made", &asleep]), "has no memory to store"),
        (alone(dir, &["checkpoint", "--to", "made", "999999999"]), "no process"),
        (alone(dir, &["restore", "made", "nope", "--to", "out"]), "nothing in the pool is called"),
        (alone(dir, &["pool", "create", "--capacity", "./new", "bad name"]), "is no name for a pool"),
        (alone(dir, &["pool", "create", "--capacity", "./made", "again"]), "holds a pool, or a class of one"),
        (alone(dir, &["pool", "rebuild", "./lost"]), "this writes the superblocks"),
        (alone(dir, &["pool", "show", "./lost"]), "has no file `data`"),
        (alone(dir, &["metrics", "--socket", socket.to_str().unwrap()]), "somebody listens on"),
        (asked(&["detach", &own]), "is no client of this daemon"),
        (asked(&["attach", &unmarked.pid().to_string()]), "is not attached: "),
        (with_shadow_stack(dir, &asleep), "has a shadow stack"),
    ];
    cases.extend(forced::cases(dir));
    let mut missed = Vec::new();
    for (said, words) in &cases {
        match said.strip_prefix("SKIPPED: ") {
            Some(why) => println!("SKIPPED: \"{words}\": {why}"),
            None if said.contains(words) => {}
            None => missed.push(format!("{words}: {said}")),
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
