//! Errors and their codes: each that a command can be brought to here ends with the code that the
//! reference gives its sentence; and each code is reached by a test, here or beside the code.
//!
//! `errors/reached.txt` names for each code the test that comes to it: `errors` for this file,
//! `FILE::TEST`, or `no:` and the reason why no test can come to it. A line that does not hold
//! fails.

mod forced;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use e2e::{Client, Daemon, program};

/// The line for each sentence: code, crate, sentence, what to do.
const CODES: &str = include_str!("../../../crates/pageone/src/exit/codes.txt");
/// Where each code is reached.
const REACHED: &str = include_str!("errors/reached.txt");

/// The code at the end of what a command says, before what to do.
fn code_in(error: &str) -> Option<&str> {
    error
        .lines()
        .rev()
        .find_map(|line| line.rsplit_once(" [")?.1.strip_suffix(']').filter(|code| code.starts_with('P')))
}

/// The parts of each line about a sentence that is still said.
fn codes() -> impl Iterator<Item = [&'static str; 4]> {
    let parts = |line: &'static str| <[&str; 4]>::try_from(line.split('\t').collect::<Vec<_>>()).expect(line);
    CODES.lines().map(parts).filter(|parts| parts[1] != "-")
}

/// Whether an error says what to do: this, or what its cause asks for, whose sentence may say it.
fn says(error: &str, to_do: &str) -> bool {
    let text = error.split_whitespace().collect::<Vec<_>>().join(" ");
    let of_cause = |[_, _, sentence, remedy]: [&str; 4]| match remedy {
        "-" => sentence.split('…').all(|part| text.contains(part)),
        remedy => text.contains(&format!("what to do: {remedy}")),
    };
    text.contains(&format!("what to do: {to_do}")) || codes().any(of_cause)
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
        (asked(&["attach", &unmarked.pid().to_string()]), "is not attached: "),
        (with_shadow_stack(dir, &asleep), "has a shadow stack"),
    ];
    cases.extend(forced::cases(dir));
    let mut reached = BTreeSet::new();
    let mut missed = Vec::new();
    let mut skipped = Vec::new();
    for (said, words) in &cases {
        if let Some(why) = said.strip_prefix("SKIPPED: ") {
            println!("SKIPPED: \"{words}\": {why}");
            skipped.push(*words);
            continue;
        }
        let code = code_in(said);
        let line = code.and_then(|code| CODES.lines().find(|line| line.starts_with(code)));
        // What to do stands below the error, where neither its sentence says it nor a cause's.
        let to_do = line.and_then(|line| line.split('\t').nth(3)).filter(|to_do| *to_do != "-");
        let is_said = to_do.is_none_or(|to_do| says(said, to_do));
        match line.filter(|line| line.contains(words) && is_said).or(code.filter(|code| code == words)) {
            Some(_) => drop(reached.insert(code.unwrap_or_default().to_owned())),
            None => missed.push(format!("{words}: {said} ({line:?})")),
        }
    }
    for [code, where_] in REACHED.lines().filter_map(|line| line.split_once('\t')).map(<[&str; 2]>::from) {
        let sentence = CODES.lines().find(|line| line.starts_with(code)).unwrap_or_default();
        let is_skipped = skipped.iter().any(|words| sentence.contains(words));
        if where_ == "errors" && !reached.contains(code) && !is_skipped {
            missed.push(format!("{code} is not reached here, though errors/reached.txt says so"));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_code_has_one_sentence_and_a_test_that_reaches_it() {
    let mut reached: BTreeMap<&str, &str> = BTreeMap::new();
    for line in REACHED.lines() {
        let (code, place) = line.split_once('\t').expect(line);
        assert!(reached.insert(code, place).is_none(), "{code} has two lines");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for [code, origin, sentence, _] in codes() {
        assert!(code.len() == 5 && seen.insert(code) && !sentence.is_empty(), "{code}");
        match reached.remove(code) {
            None => wrong.push(format!("{code} has no line in errors/reached.txt: {sentence}")),
            Some("errors") => {}
            Some(place) => match place.strip_prefix("no: ") {
                Some(reason) => println!("SKIPPED: {code}, {sentence}: {reason}"),
                None => wrong.extend(reaches(root, place, origin, sentence).err().map(|why| format!("{code}: {why}"))),
            },
        }
    }
    wrong.extend(reached.keys().map(|code| format!("{code} is no code any more")));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether a test, `FILE::NAME`, is there and asserts on a sentence: by eight characters of it, or
/// by the name of its variant in the crate.
fn reaches(root: &Path, place: &str, origin: &str, sentence: &str) -> Result<(), String> {
    let (file, name) = place.rsplit_once("::").ok_or(format!("{place}: not FILE::TEST"))?;
    let text = std::fs::read_to_string(root.join(file)).map_err(|e| format!("{file}: {e}"))?;
    let lines: Vec<&str> = text.lines().collect();
    let is_start = |line: &str| line.trim_start().starts_with(&format!("fn {name}("));
    let start = lines.iter().position(|line| is_start(line)).ok_or(format!("{file} has no {name}"))?;
    if !lines[start.saturating_sub(4)..start].iter().any(|line| line.trim_start().starts_with("#[test]")) {
        return Err(format!("{name} in {file} is no test"));
    }
    let indent = lines[start].len() - lines[start].trim_start().len();
    let end = format!("{}}}", " ".repeat(indent));
    let body = lines[start..].iter().take_while(|line| **line != end);
    let body = body.flat_map(|line| line.split_whitespace()).collect::<Vec<_>>().join(" ");
    let pieces = sentence.split('…').flat_map(|part| {
        let chars: Vec<char> = part.chars().collect();
        chars.windows(8).map(|window| window.iter().collect::<String>()).collect::<Vec<_>>()
    });
    if pieces.into_iter().any(|piece| body.contains(&piece)) {
        return Ok(());
    }
    let variants = variants(&root.join("crates").join(origin).join("src"), sentence);
    let is_named = |variant: &String| body.split(|c: char| !c.is_alphanumeric()).any(|word| word == variant);
    if variants.iter().any(is_named) {
        return Ok(());
    }
    Err(format!("{name} in {file} has no words of \"{sentence}\", nor {variants:?}"))
}

/// The names of the variants, below a directory, whose attribute has this sentence.
fn variants(dir: &Path, sentence: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(variants(&path, sentence));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for part in text.split("#[error(").skip(1) {
            let Some((attribute, behind)) = part.split_once(")]") else { continue };
            let attribute = attribute.replace("\\\n", " ").split_whitespace().collect::<Vec<_>>().join(" ");
            let mut rest = attribute.as_str();
            let has_all = sentence.split('…').all(|piece| match rest.split_once(piece) {
                Some((_, after)) => {
                    rest = after;
                    true
                }
                None => false,
            });
            if has_all {
                let name = behind.trim_start().lines().find(|line| !line.trim_start().starts_with('#'));
                found.extend(name.map(|name| name.trim().split(|c: char| !c.is_alphanumeric()).next().unwrap().into()));
            }
        }
    }
    found
}
