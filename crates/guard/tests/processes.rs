//! Guards that are processes, of commands that are ended, stopped, or hang while something stands.
//!
//! This program is all three: the tests start it again as a command, and that one as its guard.

#![allow(clippy::unwrap_used, unsafe_code, reason = "a test fails by panicking, and sends signals")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use guard::{Guard, GuardError, PROMISE, Stopped};
use kmem::pidfd::PidFd;
use serde_json::{Value, json};

const PID: &str = "GUARD_TEST_PID";
const HOW: &str = "GUARD_TEST_HOW";

fn words(name: &str) -> Vec<std::ffi::OsString> {
    let own = std::env::current_exe().unwrap();
    [own.into(), "--ignored".into(), "--exact".into(), "--nocapture".into(), name.into()].into()
}

/// What puts back what is stopped by QEMU's monitor: waits for one file, and makes another one.
fn undo(task: &Value, is_gone: &dyn Fn() -> bool) -> bool {
    let path = |name: &str| Path::new(task[name].as_str().unwrap()).to_owned();
    while !path("wait").exists() {
        if is_gone() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::write(path("make"), "").is_ok()
}

#[test]
#[ignore = "it is the process of the others' guards"]
fn the_guard() {
    if std::env::var_os(PID).is_some() {
        guard::run(undo).unwrap();
    }
}

fn ptrace(request: libc::c_uint, pid: i32) {
    // SAFETY: these requests take no pointers.
    assert_eq!(unsafe { libc::ptrace(request, pid, 0_usize, 0_usize) }, 0);
}

/// Stops the process as [`HOW`] says, says so, and does what it is told by lines.
#[test]
#[ignore = "it is the command of the others"]
fn the_command() {
    let Ok(pid) = std::env::var(PID) else { return };
    let (pid, how): (i32, Value) = (pid.parse().unwrap(), serde_json::from_str(&std::env::var(HOW).unwrap()).unwrap());
    let process = PidFd::open(pid).unwrap();
    // Descriptors that programs leave to whoever they start.
    let (read, write) = rustix::pipe::pipe().unwrap();
    for fd in [&read, &write] {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
    }
    let mut guard = Guard::start(&words("the_guard")).unwrap();
    if let Some(notes) = how["notes"].as_str() {
        guard.note_in(Path::new(notes)).unwrap();
    }
    let stopped = match how["kind"].as_str().unwrap() {
        "trace" => Stopped::Trace,
        "qmp" => Stopped::Qmp(how.clone()),
        _ => Stopped::Signal,
    };
    // The second is in place of the first.
    for _ in 0..2 {
        guard.watch(stopped.clone(), pid, &process, &[]).unwrap();
    }
    guard.stands(how["promise"].as_u64().map_or(PROMISE, Duration::from_millis)).unwrap();
    match stopped {
        Stopped::Signal => process.send_signal(libc::SIGSTOP).unwrap(),
        Stopped::Trace => {
            ptrace(libc::PTRACE_SEIZE, pid);
            ptrace(libc::PTRACE_INTERRUPT, pid);
        }
        Stopped::Qmp(_) => {}
    }
    println!("\nstands");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            // Until it is told to by the guard, which has continued this process.
            "let go" => {
                while guard.is_there().is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // SAFETY: the status is not asked for.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) };
                ptrace(libc::PTRACE_DETACH, pid);
                println!("detached");
            }
            "go on" => {
                process.send_signal(libc::SIGCONT).unwrap();
                match guard.runs() {
                    Ok(()) => println!("held"),
                    Err(GuardError::LetGo) => println!("too late"),
                    Err(error) => panic!("{error}"),
                }
            }
            "done" => guard.done(),
            line => panic!("{line}"),
        }
    }
}

/// A process that sleeps, and a command that has stopped it.
struct Place {
    sleeper: Child,
    command: Child,
    tell: ChildStdin,
    said: BufReader<ChildStdout>,
}

fn start(how: Value) -> Place {
    let sleeper = Command::new("sleep").arg("600").spawn().unwrap();
    let words = words("the_command");
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env(PID, sleeper.id().to_string()).env(HOW, how.to_string());
    // A group of its own, which the terminal's Ctrl-Z would stop.
    let mut command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
    let (tell, said) = (command.stdin.take().unwrap(), BufReader::new(command.stdout.take().unwrap()));
    Place { sleeper, command, tell, said }
}

fn state(pid: u32) -> Option<char> {
    kmem::procfs::Stat::of(Some(pid as i32)).ok()?.state()
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: children of this process that were not waited for, and their children.
    unsafe { libc::kill(pid as i32, signal) };
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Place {
    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "it ended without: {word}");
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.tell, "{line}").unwrap();
    }

    /// The processes that the command has started: its guard.
    fn guards(&self) -> Vec<u32> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.command.id())).unwrap().flatten();
        let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        children.flat_map(|all| all.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
    }

    fn expect_its_end(guard: u32) {
        eventually("the guard ends", || state(guard).is_none_or(|state| state == 'Z'));
    }

    fn expect_running(&self, what: &str) {
        eventually(what, || !matches!(state(self.sleeper.id()), Some('T' | 't')));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for child in [&mut self.command, &mut self.sleeper] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn the_process_goes_on_when_both_are_told_to_end_at_any_moment() {
    for moment in 0..40 {
        let place = start(json!({ "kind": "signal" }));
        std::thread::sleep(Duration::from_micros(700 * moment));
        let guards = place.guards();
        for pid in [place.command.id()].into_iter().chain(guards) {
            [libc::SIGTERM, libc::SIGHUP, libc::SIGINT].iter().for_each(|which| signal(pid, *which));
        }
        // The command ends, so nothing that is seen later is its doing.
        eventually("the command ends", || state(place.command.id()).is_none_or(|state| state == 'Z'));
        place.expect_running("the process goes on");
    }
}

#[test]
fn a_guard_outlives_what_ends_programs_until_its_work_is_done() {
    for ends in [libc::SIGKILL, libc::SIGTERM] {
        let dir = tempfile::tempdir().unwrap();
        let (wait, make) = (dir.path().join("wait"), dir.path().join("make"));
        let mut place = start(json!({ "kind": "qmp", "wait": wait, "make": make }));
        place.hear("stands");
        let guards = place.guards();
        let own = std::process::id() as i32;
        // SAFETY: the calls take numbers.
        let (session, ours) = unsafe { (libc::getsid(guards[0] as i32), libc::getsid(own)) };
        assert!(guards.len() == 1 && session == guards[0] as i32 && session != ours);
        // The standard ones, a duplicate of the link, and a reference to the process. It looks at a
        // file now and then.
        let open = || fs::read_dir(format!("/proc/{}/fd", guards[0])).unwrap().count();
        eventually("no other descriptor is open", || open() <= 5);
        signal(place.command.id(), ends);
        place.command.wait().unwrap();
        // QEMU's `stop` comes to its end late.
        for which in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGPIPE, libc::SIGTSTP] {
            signal(guards[0], which);
        }
        std::thread::sleep(Duration::from_millis(300));
        assert!(!make.exists() && matches!(state(guards[0]), Some('S' | 'R')));
        fs::write(&wait, "").unwrap();
        Place::expect_its_end(guards[0]);
        assert!(make.exists());
    }
}

#[test]
fn a_guard_ends_when_what_it_watches_is_gone() {
    let mut place = start(json!({ "kind": "qmp", "wait": "/nonexistent/wait", "make": "/nonexistent/make" }));
    place.hear("stands");
    let guards = place.guards();
    place.command.kill().unwrap();
    place.sleeper.kill().unwrap();
    Place::expect_its_end(guards[0]);
}

#[test]
fn a_command_that_is_stopped_loses_its_hold_and_hears_of_it() {
    let mut place = start(json!({ "kind": "signal" }));
    place.hear("stands");
    let guards = place.guards();
    signal(place.command.id(), libc::SIGSTOP);
    Place::expect_its_end(guards[0]);
    place.expect_running("the process goes on while the command is stopped");
    assert_eq!(state(place.command.id()), Some('T'));
    signal(place.command.id(), libc::SIGCONT);
    place.tell("go on");
    place.hear("too late");
}

#[test]
fn a_command_that_hangs_loses_its_hold() {
    let mut place = start(json!({ "kind": "signal", "promise": 200 }));
    place.hear("stands");
    Place::expect_its_end(place.guards()[0]);
    place.expect_running("the process goes on when the promise is broken");
    place.tell("go on");
    place.hear("too late");
}

#[test]
fn a_command_that_keeps_its_promise_holds_and_ends_with_its_guard() {
    let mut place = start(json!({ "kind": "signal" }));
    place.hear("stands");
    let guards = place.guards();
    eventually("it stands", || state(place.sleeper.id()) == Some('T'));
    place.tell("go on");
    place.hear("held");
    place.expect_running("it goes on");
    // Nothing is put back any more.
    place.tell("done");
    signal(place.sleeper.id(), libc::SIGSTOP);
    Place::expect_its_end(guards[0]);
    eventually("it stays stopped", || state(place.sleeper.id()) == Some('T'));
}

#[test]
fn ctrl_z_waits_until_nothing_stands() {
    let mut place = start(json!({ "kind": "signal" }));
    place.hear("stands");
    signal(place.command.id(), libc::SIGTSTP);
    place.tell("go on");
    // The answer comes before it stops.
    eventually("it stops after that", || state(place.command.id()) == Some('T'));
    place.expect_running("the process goes on");
    signal(place.command.id(), libc::SIGCONT);
    place.hear("held");
}

#[test]
fn a_command_that_traces_and_is_stopped_is_continued_until_it_lets_go() {
    let mut place = start(json!({ "kind": "trace" }));
    place.hear("stands");
    place.tell("let go");
    eventually("it stands", || state(place.sleeper.id()) == Some('t'));
    signal(place.command.id(), libc::SIGSTOP);
    place.hear("detached");
    place.expect_running("the thread is let go");
}

#[test]
fn a_thread_whose_tracer_is_killed_runs() {
    let mut place = start(json!({ "kind": "trace" }));
    place.hear("stands");
    eventually("it stands", || state(place.sleeper.id()) == Some('t'));
    place.command.kill().unwrap();
    place.expect_running("the kernel lets it go");
}

/// Looks for what was left, as the next command does.
fn mend(notes: &Path) -> Vec<bool> {
    // SAFETY: no other test of this process reads the variable, which only the guard needs.
    unsafe { std::env::set_var(PID, "0") };
    let held = std::cell::Cell::new(false);
    let hold = |_: &Value| if held.replace(true) { Err(std::io::ErrorKind::WouldBlock.into()) } else { Ok(Vec::new()) };
    let mended = guard::mend(&words("the_guard"), notes, &hold, &|_| {});
    mended.into_iter().map(|(_, done)| done.unwrap()).collect()
}

#[test]
fn what_a_command_left_that_was_killed_with_its_guard_is_put_back_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let (notes, wait, make) = (dir.path().join("notes"), dir.path().join("wait"), dir.path().join("made/it"));
    let kill = |place: &mut Place| {
        // The guard stands before its command ends: else it would see the end and do its work.
        let guard = place.guards()[0];
        signal(guard, libc::SIGSTOP);
        eventually("the guard is stopped", || state(guard) == Some('T'));
        place.command.kill().unwrap();
        place.command.wait().unwrap();
        signal(guard, libc::SIGKILL);
    };
    let left = || fs::read_dir(&notes).unwrap().count();
    let mut place = start(json!({ "kind": "signal", "notes": notes }));
    place.hear("stands");
    assert!(mend(&notes).is_empty() && left() == 1, "command and guard live");
    kill(&mut place);
    eventually("the process stands", || state(place.sleeper.id()) == Some('T'));
    eventually("the note is nobody's", || mend(&notes) == [true]);
    place.expect_running("the process goes on");
    assert_eq!(left(), 0);
    // What cannot be put back yet is tried again.
    let mut place = start(json!({ "kind": "qmp", "notes": notes, "wait": wait, "make": make }));
    place.hear("stands");
    kill(&mut place);
    fs::write(&wait, "").unwrap();
    eventually("the note is nobody's", || mend(&notes) == [true]);
    assert_eq!(left(), 1);
    let mut tried = Vec::new();
    eventually("who tried it has let go of the note", || {
        tried = guard::mend(&words("the_guard"), &notes, &|_| Err(std::io::ErrorKind::WouldBlock.into()), &|_| {});
        !tried.is_empty()
    });
    assert_eq!(
        tried.remove(0).1.unwrap_err().to_string(),
        "what was left cannot be put back now; the next command tries it again"
    );
    fs::create_dir(dir.path().join("made")).unwrap();
    eventually("who tried it has let go of the note", || mend(&notes) == [true]);
    assert_eq!(left(), 0);
    assert!(make.exists());
    // A process that is gone leaves nothing, and a command that is done neither.
    let mut place = start(json!({ "kind": "qmp", "notes": notes, "wait": "/nonexistent/wait", "make": make }));
    place.hear("stands");
    kill(&mut place);
    drop(place);
    eventually("the note is nobody's", || mend(&notes).is_empty() && left() == 0);
    let mut place = start(json!({ "kind": "signal", "notes": notes }));
    place.hear("stands");
    ["go on", "done"].iter().for_each(|line| place.tell(line));
    eventually("the note is removed", || left() == 0);
}

#[test]
fn a_guard_that_is_stopped_is_continued_by_its_command_or_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut place = start(json!({ "kind": "signal", "notes": dir.path() }));
    place.hear("stands");
    signal(place.guards()[0], libc::SIGSTOP);
    place.tell("go on");
    place.hear("held");
    let mut place = start(json!({ "kind": "signal", "notes": dir.path() }));
    place.hear("stands");
    let guard = place.guards()[0];
    signal(guard, libc::SIGSTOP);
    eventually("it is stopped", || state(guard) == Some('T'));
    place.command.kill().unwrap();
    place.command.wait().unwrap();
    eventually("the process stands", || state(place.sleeper.id()) == Some('T'));
    mend(dir.path());
    place.expect_running("the process goes on");
}

#[test]
fn what_is_no_guard_is_noticed_before_anything_stands() {
    let error = Guard::start(&["/nonexistent/pageone".into()]).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "cannot start the guard");
    let mut guard = Guard::start(&["true".into()]).unwrap();
    let error = guard.note_in(Path::new("/proc/self/cmdline/notes")).unwrap_err();
    assert_eq!(error.to_string(), "cannot note what this command is about to stop");
    let own = PidFd::open(std::process::id() as i32).unwrap();
    let error = guard.watch(Stopped::Signal, 1, &own, &[]).unwrap_err();
    assert!(matches!(error, GuardError::NotReady(_)), "{error}");
    assert_eq!(error.to_string(), "the guard did not start");
    let error = guard.stands(PROMISE).map(drop).and_then(|()| guard.runs()).unwrap_err();
    assert!(matches!(error, GuardError::NotReady(_) | GuardError::LetGo), "{error}");
}
