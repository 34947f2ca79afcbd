//! The wrapper as a real process, with other real programs in QEMU's place.
//!
//! Most tests give it a shell as its QEMU, and a script that shows what the shell got: its
//! arguments, `-c` and the script among them, its environment, and what it is.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

use std::fs::{Permissions, read_to_string};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const WRAPPER: &str = env!("CARGO_BIN_EXE_qemu-system-x86_64-pageone");
const GUEST: [&str; 4] = ["-machine", "pc-q35-7.2,usb=off,dump-guest-core=off", "-m", "256"];
/// Shows the arguments, then the environment.
const SHOW: &str =
    r#"tr '\0' '\n' < /proc/$$/cmdline; echo ====; env | grep -E '^(PAGEONE_SOCKET|LD_PRELOAD|OTHER)=' | sort"#;

/// A daemon's socket, and a library that changes nothing: the C library itself.
struct Host {
    dir: tempfile::TempDir,
    socket: UnixListener,
}

fn library() -> PathBuf {
    let maps = read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .find_map(|line| line.split_ascii_whitespace().last().filter(|path| path.contains("libc.so")))
        .unwrap()
        .into()
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(dir.path().join("socket")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { dir, socket }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The wrapper with a shell in QEMU's place.
    fn shell(&self) -> Command {
        let mut command = Command::new(WRAPPER);
        command.env_remove("LD_PRELOAD").env("PAGEONE_QEMU", "/bin/sh").env("PAGEONE_AGENT", library());
        command.env("PAGEONE_SOCKET", self.path("socket")).args(["-c", SHOW]);
        command
    }

    fn is_wanted(&self) -> bool {
        self.socket.accept().is_ok()
    }
}

fn run(command: &mut Command) -> (String, String) {
    let Output { stdout, stderr, .. } = command.output().unwrap();
    (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// QEMU got the environment as it was, and standard error has this many lines.
fn is_plain(command: &mut Command, lines: usize) -> String {
    let socket = command.get_envs().find(|(name, _)| *name == "PAGEONE_SOCKET").unwrap().1.unwrap().to_owned();
    let (shown, said) = run(command);
    let (_, environment) = shown.split_once("\n====\n").unwrap();
    assert_eq!(environment, format!("PAGEONE_SOCKET={}\n", socket.display()), "{said}");
    assert_eq!(said.lines().count(), lines, "{said}");
    said
}

#[test]
fn qemu_gets_the_agent_and_everything_else_as_it_was() {
    let host = Host::new();
    let (shown, said) =
        run(host.shell().arg0("an emulator").args(GUEST).args(["", "-name", "a b"]).env("OTHER", "=x="));
    let (arguments, environment) = shown.split_once("\n====\n").unwrap();
    let wanted = ["an emulator", "-c", SHOW].into_iter().chain(GUEST).chain(["", "-name", "a b"]);
    assert_eq!(arguments.lines().collect::<Vec<_>>().join("\n"), wanted.collect::<Vec<_>>().join("\n"));
    let wanted =
        format!("LD_PRELOAD={}\nOTHER==x=\nPAGEONE_SOCKET={}\n", library().display(), host.path("socket").display());
    assert_eq!(environment, wanted);
    assert_eq!(said, "");
    assert!(!host.is_wanted(), "the agent connects, and nobody else");
}

#[test]
fn a_library_that_is_preloaded_already_stays() {
    let host = Host::new();
    for (before, after) in [
        ("libm.so.6", format!("{}:libm.so.6", library().display())),
        (&*format!("libm.so.6:{}", library().display()), format!("libm.so.6:{}", library().display())),
        ("", library().display().to_string()),
    ] {
        let (shown, said) = run(host.shell().args(GUEST).env("LD_PRELOAD", before));
        assert!(shown.contains(&format!("\nLD_PRELOAD={after}\n")), "{before}: {shown}");
        assert_eq!(said, "");
    }
}

#[test]
fn what_is_missing_is_named_once_and_qemu_runs_without_the_agent() {
    let host = Host::new();
    let said = is_plain(host.shell().args(GUEST).env("PAGEONE_AGENT", "/nonexistent/agent.so"), 1);
    assert!(
        said.starts_with("pageone: this guest is not merged: /nonexistent/agent.so ")
            && said.contains("libpageone-agent"),
        "{said}"
    );
    let said = is_plain(host.shell().args(GUEST).env("PAGEONE_SOCKET", "/nonexistent/socket"), 1);
    assert!(said.contains("/nonexistent/socket") && said.contains("systemctl start pageone"), "{said}");
    std::fs::write(host.path("file"), "").unwrap();
    let said = is_plain(host.shell().args(GUEST).env("PAGEONE_SOCKET", host.path("file")), 1);
    assert!(said.contains("is not a socket"), "{said}");
    for machine in ["q35,mem-merge=off", "type=q35,mem-merge=on,mem-merge=false,usb=off"] {
        let said = is_plain(host.shell().args(["-M", machine]), 1);
        assert!(said.contains("mem-merge=off"), "{said}");
    }
    let (shown, _) = run(host.shell().args(["-machine", "q35,mem-merge=off", "--machine", "mem-merge=on"]));
    assert!(shown.contains("LD_PRELOAD="), "the last one counts: {shown}");
    assert!(!host.is_wanted());
    // Nothing was made in the place of what is missing.
    assert!(!Path::new("/nonexistent").exists());
}

#[test]
fn another_users_socket_is_not_used() {
    let host = Host::new();
    if std::os::unix::fs::chown(host.path("socket"), Some(65534), None).is_err() {
        println!("SKIPPED: only root may give a socket away");
        return;
    }
    let said = is_plain(host.shell().args(GUEST), 1);
    assert!(said.contains("is not a socket that root or this user has made"), "{said}");
}

#[test]
fn who_asks_what_qemu_can_do_gets_the_same_answer_and_the_daemon_hears_nothing() {
    let host = Host::new();
    let probes: [&[&str]; 7] = [
        &[
            "-S",
            "-no-user-config",
            "-nodefaults",
            "-nographic",
            "-machine",
            "none,accel=kvm:tcg",
            "-qmp",
            "stdio",
            "-daemonize",
        ],
        &["-M", "type=none"],
        &["--version"],
        &["-help"],
        &["-machine", "help"],
        &["-cpu", "?"],
        &["-machine", "q35", "-machine", "none"],
    ];
    for probe in probes {
        is_plain(host.shell().args(probe), 0);
        // Neither is there a word about what is missing.
        is_plain(host.shell().args(probe).env("PAGEONE_AGENT", "/nonexistent"), 0);
    }
    assert!(!host.is_wanted());
    let Some(qemu) = qemu() else { return };
    let ask = |program: &Path| {
        let mut command = Command::new(program);
        command.env("PAGEONE_QEMU", &qemu).env("PAGEONE_AGENT", library()).env("PAGEONE_SOCKET", host.path("socket"));
        command.args([
            "-S",
            "-no-user-config",
            "-nodefaults",
            "-nographic",
            "-machine",
            "none,accel=tcg",
            "-qmp",
            "stdio",
        ]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let questions = [
            "qmp_capabilities",
            "query-version",
            "query-machines",
            "query-commands",
            "query-kvm",
            "qom-list-types",
            "quit",
        ];
        let questions = questions.map(|question| format!("{{\"execute\": \"{question}\"}}\n")).concat();
        child.stdin.take().unwrap().write_all(questions.as_bytes()).unwrap();
        let Output { stdout, stderr, .. } = child.wait_with_output().unwrap();
        let answers = String::from_utf8(stdout).unwrap();
        // Events have a time.
        let answers: Vec<_> = answers.lines().filter(|line| !line.contains("timestamp")).map(str::to_owned).collect();
        (answers, String::from_utf8(stderr).unwrap())
    };
    let plain = ask(&qemu);
    assert!(plain.0.len() >= 7, "{plain:?}");
    assert_eq!(ask(Path::new(WRAPPER)), plain);
    assert!(!host.is_wanted());
}

/// The machine's QEMU.
fn qemu() -> Option<PathBuf> {
    let path = PathBuf::from("/usr/bin/qemu-system-x86_64");
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: {} is not installed", path.display());
    None
}

#[test]
fn a_static_qemu_runs_without_the_agent() {
    let Some(busybox) = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from).into_iter().find(|path| path.exists())
    else {
        println!("SKIPPED: busybox-static is not installed");
        return;
    };
    let host = Host::new();
    let said = is_plain(host.shell().arg0("sh").args(GUEST).env("PAGEONE_QEMU", busybox), 1);
    assert!(said.contains("linked statically"), "{said}");
}

#[test]
fn what_cannot_be_run_is_an_error_that_names_it() {
    let host = Host::new();
    let Output { status, stderr, .. } =
        host.shell().args(GUEST).env("PAGEONE_QEMU", "/nonexistent/qemu").output().unwrap();
    assert_eq!(status.code(), Some(127));
    assert!(String::from_utf8(stderr).unwrap().starts_with("pageone: cannot run /nonexistent/qemu: "));
    std::fs::write(host.path("qemu"), "").unwrap();
    std::fs::set_permissions(host.path("qemu"), Permissions::from_mode(0o600)).unwrap();
    let status = host.shell().args(GUEST).env("PAGEONE_QEMU", host.path("qemu")).output().unwrap().status;
    assert_eq!(status.code(), Some(126));
    // Never itself, by whatever name.
    std::os::unix::fs::symlink(WRAPPER, host.path("link")).unwrap();
    let Output { status, stderr, .. } =
        host.shell().args(GUEST).env("PAGEONE_QEMU", host.path("link")).output().unwrap();
    assert_eq!(status.code(), Some(127));
    let said = String::from_utf8(stderr).unwrap();
    assert!(said.contains("this program itself") && said.lines().count() == 1, "{said}");
}

#[test]
fn signals_and_a_closed_standard_error_are_qemus_own_affair() {
    let host = Host::new();
    let ignored = "exec grep -E 'SigIgn|SigBlk' /proc/self/status";
    let direct = Command::new("/bin/sh").args(["-c", ignored]).output().unwrap().stdout;
    let mut through = Command::new(WRAPPER);
    through.env("PAGEONE_QEMU", "/bin/sh").env("PAGEONE_AGENT", "/nonexistent").args(["-c", ignored]).args(GUEST);
    assert_eq!(through.output().unwrap().stdout, direct);
    // The reader of the log is gone.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = through.stderr(writer).stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut shown).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(shown, direct);
    drop(host);
}

#[test]
fn it_costs_a_start_less_than_50_ms() {
    let host = Host::new();
    let quickest = |mut command: Command| {
        let mut time = || {
            let begin = Instant::now();
            assert!(command.output().unwrap().status.success());
            begin.elapsed()
        };
        (0..20).map(|_| time()).min().unwrap()
    };
    let direct = || {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exit"]).args(GUEST);
        command
    };
    let through = || {
        let mut command = Command::new(WRAPPER);
        command.env("PAGEONE_QEMU", "/bin/sh").env("PAGEONE_AGENT", library());
        command.env("PAGEONE_SOCKET", host.path("socket")).args(["-c", "exit"]).args(GUEST);
        command
    };
    let end = Instant::now() + Duration::from_secs(60);
    // On a busy machine few starts are quick: it is tried until one is.
    loop {
        let (direct, through) = (quickest(direct()), quickest(through()));
        println!("{direct:?} without it, {through:?} with it");
        if through.saturating_sub(direct) < Duration::from_millis(50) {
            break;
        }
        assert!(Instant::now() < end, "{direct:?}, {through:?}");
    }
}

#[test]
fn its_variables_are_the_agents() {
    assert_eq!(wire::ENV_SOCKET, "PAGEONE_SOCKET");
}
