//! Errors that a command comes to only where the host refuses something: a system call fails
//! (strace injects its error), there are no more descriptors, a file of the kernel says something
//! else. The processes that some need are here, too.

use std::fmt::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use e2e::{Client, Daemon, program, skipped};

use super::Sleeper;

/// What a command said, and words of the sentence that it must come to. `SKIPPED: ` and why: it was
/// not run, because this host has not got what it takes.
type Cases = Vec<(String, &'static str)>;

/// The release that an old kernel has, as bytes of /proc/sys/kernel/osrelease.
const OLD_KERNEL: &[u8] = b"6.1.0\n";

/// A command in a directory without a daemon.
fn pageone(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program("pageone"));
    command.args(args);
    within(dir, command)
}

/// The same for whatever runs it.
fn within(dir: &Path, mut command: Command) -> Command {
    command.current_dir(dir).env("PAGEONE_DIR", dir.join("none")).env("PAGEONE_CACHE", dir.join("cache"));
    command.env("PAGEONE_POOLS", dir.join("names")).stdin(Stdio::null());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn said(mut command: Command) -> String {
    text(&command.output().unwrap())
}

/// A shell that runs the command after `script`.
fn after(dir: &Path, script: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{script}; exec \"$0\" \"$@\"")]).arg(program("pageone")).args(args);
    within(dir, command)
}

/// A command some of whose system calls are not done, but end as `inject` says: that of strace's
/// option. With `path` only those on this path.
fn injected(dir: &Path, path: Option<&str>, inject: &str, args: &[&str]) -> Command {
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("inject={inject}")]);
    command.args(path.into_iter().flat_map(|path| ["-P", path])).arg(program("pageone")).args(args);
    within(dir, command)
}

/// What a read gives in the place of a file's own beginning.
fn read_as(bytes: &[u8]) -> String {
    let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    format!("read:retval={}:poke_exit=@arg2={hex}:when=1", bytes.len())
}

/// Why strace cannot inject errors and data here, if it cannot.
fn no_injection() -> Option<String> {
    let mut strace = Command::new("strace");
    let tried = strace.args(["-qq", "-o", "/dev/null", "-e", "inject=getppid:retval=1:poke_exit=@arg1=00", "true"]);
    match tried.output() {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(format!("strace cannot make system calls fail here: {}", text(&out))),
        Err(e) => Some(format!("no system call can be made to fail: strace is not here ({e}); scripts/deps.sh test")),
    }
}

/// Runs commands, or says why not.
fn run_all(why_not: Option<&str>, commands: Vec<(Command, &'static str)>) -> Cases {
    let one = |command| why_not.map_or_else(|| said(command), |why| format!("SKIPPED: {why}"));
    commands.into_iter().map(|(command, words)| (one(command), words)).collect()
}

/// A program with 32 MiB of memory to store, which nothing tracks.
fn untracked() -> Client {
    let mut command = Command::new(program("pageone-test-client"));
    command.args(["hold", "8192", "4"]);
    let mut client = Client::spawn(command);
    client.expect("ready");
    client
}

/// A QEMU by its name.
fn qemu(dir: &Path) -> String {
    let qemu = dir.join("qemu-system-x86_64");
    if !qemu.exists() {
        symlink("/bin/true", &qemu).unwrap();
    }
    qemu.display().to_string()
}

/// The words that start it with a pool for its guest's free pages.
fn with_pool(qemu: &str) -> [&str; 5] {
    ["run", "--no-start", "--ppr", "--", qemu]
}

/// All cases. In `dir` there are `made`, a pool, and `other.img`, a file.
pub(super) fn cases(dir: &Path) -> Cases {
    let no_injection = no_injection();
    let why_not = no_injection.as_deref();
    [of_processes(dir, why_not), of_limits(dir), of_files(dir), of_system_calls(dir, why_not)].concat()
}

/// What can be wrong with the processes that a command is about.
fn of_processes(dir: &Path, why_not: Option<&str>) -> Cases {
    let run = |args: &[&str]| said(pageone(dir, args));
    let client = untracked();
    let pid = client.pid().to_string();
    let sleep = dir.join("pageone-twice");
    std::fs::copy("/bin/sleep", &sleep).unwrap();
    let _twice = [(); 2].map(|()| Sleeper::start(sleep.to_str().unwrap()));
    let mut cases = vec![
        (run(&["checkpoint", "--to", "made", "pageone-twice"]), "several processes are called"),
        (run(&["checkpoint", "--to", "made", "nobody-1", "nobody-2"]), "checkpoints were not stored"),
        (run(&["checkpoint", "--to", "made", &pid]), "nothing tracks what process"),
    ];
    run(&["checkpoint", "--to", "made", "--stop", "--name", "memory", &pid]);
    cases.push((run(&["snapshot", "rm", "made", "memory"]), "is a checkpoint, and no snapshot"));
    let store = ["checkpoint", "--to", "made", "--stop", "--name", "never", &pid];
    let failing = vec![
        (injected(dir, None, "process_vm_readv:error=EIO", &store), "was not stored"),
        (injected(dir, Some("/proc/self/exe"), "readlink:error=ENOENT", &store), "cannot find this program"),
    ];
    cases.extend(run_all(why_not, failing));
    // A guard that is told something else than its task.
    let mut guard = pageone(dir, &["guard"]);
    guard.stdin(std::fs::File::open(dir.join("other.img")).unwrap());
    cases.push((said(guard), "a guest may still be stopped"));
    // A daemon that takes no clients.
    let closed = Daemon::with_config(&[], "user_clients = 0\n");
    let mut events = Command::new(program("pageone-test-client"));
    events.args(["events", "1024", "4"]);
    let mut events = Client::spawn(events);
    events.expect("ready");
    let out = closed.pageone(&["attach", &events.pid().to_string()]).output().unwrap();
    cases.push((text(&out), "has the agent, and the daemon refuses it"));
    cases
}

/// What is not to be had: descriptors, a terminal, room in a path.
fn of_limits(dir: &Path) -> Cases {
    // The libraries of the program need one descriptor at a time.
    let few = "ulimit -n 4";
    let advise = ["ksm", "advise", "--dry-run"];
    let qemu = qemu(dir);
    let mut cases = vec![
        (said(after(dir, few, &advise)), "cannot catch signals"),
        (said(after(dir, few, &with_pool(&qemu))), "cannot make a socket for QMP"),
    ];
    // No socket has so long a path.
    let long = dir.join("x".repeat(120));
    cases
        .push((said(pageone(dir, &["--dir", long.to_str().unwrap(), "run", "true"])), "the daemon did not start; see"));
    let on_terminal = |script: &str, term: &str| {
        let mut command = Command::new("script");
        let line = format!("{script}exec '{}' top", program("pageone").display());
        command.args(["-qec", &line, "/dev/null"]).env("TERM", term);
        String::from_utf8_lossy(&within(dir, command).output().unwrap().stdout).into_owned()
    };
    cases.push((on_terminal("", "dumb"), "cannot show it; set TERM"));
    cases.push((on_terminal(&format!("{few}; "), "xterm"), "cannot use the terminal"));
    cases
}

/// Files that are not there, or are something else.
fn of_files(dir: &Path) -> Cases {
    let mut cases = vec![(
        said(pageone(dir, &["estimate", "other.img", "/nonexistent"])),
        "the figures are without what was left out",
    )];
    // The program alone, without the agent's library beside it.
    let places =
        ["/usr/lib/pageone", "/usr/local/lib/pageone"].map(|place| Path::new(place).join("libpageone_agent.so"));
    let words = "the agent's library is in none of";
    match places.iter().find(|place| place.exists()) {
        Some(place) => cases.push((format!("SKIPPED: the agent's library is found at {}", place.display()), words)),
        None => {
            let alone = dir.join("alone");
            std::fs::create_dir(&alone).unwrap();
            let alone = alone.join("pageone");
            std::fs::hard_link(program("pageone"), &alone)
                .or_else(|_| std::fs::copy(program("pageone"), &alone).map(drop))
                .unwrap();
            let mut command = Command::new(&alone);
            command.arg("demo").env_remove("PAGEONE_AGENT");
            cases.push((said(within(dir, command)), words));
        }
    }
    cases
}

/// System calls that fail.
fn of_system_calls(dir: &Path, why_not: Option<&str>) -> Cases {
    let run = |path: Option<&str>, inject: &str, args: &[&str]| injected(dir, path, inject, args);
    let old = |args: &[&str]| run(Some("/proc/sys/kernel/osrelease"), &read_as(OLD_KERNEL), args);
    let qemu = qemu(dir);
    let with_pool = with_pool(&qemu);
    // Nobody listens there any more.
    drop(std::os::unix::net::UnixListener::bind(dir.join("left.sock")).unwrap());
    let cases = vec![
        (run(Some("/dev/kvm"), "openat:error=ENOENT", &["demo", "--probe"]), "KVM does not work here"),
        (run(None, "unlinkat:error=EPERM", &["metrics", "--socket", "left.sock"]), "cannot listen on"),
        (run(None, "clone,clone3,vfork:error=EAGAIN", &["run", "true"]), "cannot start a daemon"),
        (run(None, "fstatfs:error=EIO", &["pool", "check", "./made"]), "cannot look at the pool"),
        (run(None, "memfd_create:error=EMFILE", &with_pool), "cannot make the pool"),
        (old(&["demo"]), "`pageone doctor` says more"),
        (old(&["run", "true"]), "is too old; 6.7 or later is needed"),
    ];
    let of_ksm = vec![
        (run(Some("/proc"), "openat:error=EMFILE", &["ksm", "status"]), "cannot read /proc"),
        (run(Some("/sys/kernel/mm/ksm/run"), "statx:error=ENOENT", &["ksm", "status"]), "this kernel has no KSM"),
        (run(Some("/proc"), "getdents64:retval=0", &["ksm", "advise"]), "ksmd is not in /proc"),
        (old(&["run", "--backend", "ksm", "true"]), "does not keep PR_SET_MEMORY_MERGE"),
    ];
    let has_ksm = Path::new("/sys/kernel/mm/ksm").exists();
    let no_ksm = why_not.or((!has_ksm).then_some("this kernel has no KSM"));
    [run_all(why_not, cases), run_all(no_ksm, of_ksm)].concat()
}

/// What `pageone estimate` says of what it leaves out.
#[test]
fn what_an_estimate_leaves_out_has_a_code_and_a_reason() {
    if let Some(why) = no_injection() {
        return skipped(&why);
    }
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let own = std::process::id().to_string();
    let old = said(injected(dir, None, "ioctl:error=ENOTTY", &["estimate", &own]));
    assert!(old.contains(": Linux 6.7 or later is needed (PAGEMAP_SCAN)"), "{old}");
    let hidden = said(injected(dir, Some("/proc"), "openat:error=EMFILE", &["estimate", "--qemu"]));
    assert!(hidden.contains("--qemu: cannot list processes: "), "{hidden}");
    let hidden = said(injected(dir, Some("/proc"), "openat:error=EMFILE", &["detach", "web-1"]));
    assert!(hidden.contains("cannot list processes"), "{hidden}");
    // No process is seen at all.
    let none = said(injected(dir, Some("/proc"), "getdents64:retval=0", &["estimate", "--qemu"]));
    assert!(none.contains("--qemu: no guest of QEMU runs here"), "{none}");
}
