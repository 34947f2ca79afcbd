//! The daemon as a service: its unit, its log, and settings that change while it runs.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use e2e::{Daemon, eventually, program, skipped};

const SOON: Duration = Duration::from_secs(20);

/// A file of the source tree; `None` where a test runs without it.
fn source(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    path.exists().then_some(path)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_unit_gives_the_daemon_no_more_than_it_needs() {
    let Some(unit) = source("packaging/pageone.service") else { return skipped("the source is not here") };
    // Tenths: 20 is an exposure of 2.0.
    let security = |file: &Path| {
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=yes", "--no-pager", "--threshold=20"]).arg(file);
        command.env("SYSTEMD_COLORS", "0").output()
    };
    let Ok(out) = security(&unit) else { return skipped("there is no systemd-analyze") };
    let said = text(&out.stdout) + &text(&out.stderr);
    if said.contains("offline") {
        return skipped("this systemd-analyze does not look at files");
    }
    assert!(out.status.success(), "{said}");
    // Without one of its restrictions it is above.
    let dir = tempfile::tempdir().unwrap();
    let weaker = dir.path().join("pageone.service");
    let lines = std::fs::read_to_string(&unit).unwrap();
    std::fs::write(&weaker, lines.replace("PrivateNetwork=yes", "")).unwrap();
    assert!(!security(&weaker).unwrap().status.success(), "the test would notice");
    // Each capability has a line that says what it is for.
    let set = lines.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    for capability in set.split_whitespace() {
        assert!(lines.lines().any(|line| line.starts_with(&format!("#   {capability} "))), "{capability}");
    }
}

#[test]
fn a_reload_changes_settings_while_clients_stay_connected_and_merged() {
    let daemon = Daemon::with_settings(&["--max-cpu", "300"], "merge_period = 0.1\ndirect_io_seconds = 0\n");
    let clients: Vec<_> = (0..2).map(|_| daemon.scenario(&["hold", "4096", "1", "5"])).collect();
    let mut clients: Vec<_> = clients;
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 4000));
    let file = daemon.dir.path().join("config.toml");
    let log = || std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let connections = || log().matches(" client pid=").count();
    let before = connections();

    let settings = "merge_period = 0.3\nmax_cpu = 50\ndirect_io_seconds = 0\nthreads = 7\n";
    std::fs::write(&file, settings).unwrap();
    daemon.signal(libc::SIGHUP);
    eventually("the new merge period", SOON, || (daemon.status()["merge_period_seconds"] == 0.3).then_some(()));
    for words in ["merge_period: in effect", "threads: in effect when the daemon is started again"] {
        eventually(&format!("the log says: {words}"), SOON, || log().contains(words).then_some(()));
    }
    let governor = |key: &str| daemon.status()["governor"][key].clone();
    assert_eq!(governor("target_scan_time_seconds"), 0.3);
    assert_eq!(governor("max_cpu_percent"), 300.0, "the command line's is before the file's");

    std::fs::write(&file, "merge_period = 0.2\nmax_cpus = 5\nthreads = \"two\"\n").unwrap();
    daemon.signal(libc::SIGHUP);
    let refused = || log().contains("the configuration was not changed").then_some(());
    eventually("a bad file is refused", SOON, refused);
    for words in ["config.toml: line 2: max_cpus", "did you mean max_cpu?", "config.toml: line 3: threads"] {
        assert!(log().contains(words), "{words}: {}", log());
    }
    assert_eq!(daemon.status()["merge_period_seconds"], 0.3, "the old values stay");

    for client in &clients {
        let client = daemon.client(client.pid()).expect("it is connected");
        assert!(client["pages_merged"].as_u64().unwrap() >= 4000, "{client}");
    }
    assert_eq!(connections(), before, "nobody connected again");
    let mut third = daemon.scenario(&["hold", "4096", "1", "5"]);
    third.expect("ready");
    daemon.wait_merged(third.pid(), 4000);
    clients.push(third);
    for client in &mut clients {
        client.go();
        assert_eq!(client.finish(), Some(0), "no byte of it changed");
    }
}

#[test]
fn sockets_that_somebody_deletes_are_made_again_and_no_second_daemon_begins_beside_them() {
    let daemon = Daemon::with_settings(&[], "merge_period = 0.1\n");
    let mut clients = vec![daemon.scenario(&["hold", "4096", "1", "5"])];
    clients[0].expect("ready");
    let all = ["agent.sock", "control.sock", "daemon.lock"];
    for files in [&all[..1], &all[1..2], &all[2..], &all] {
        for file in files {
            std::fs::remove_file(daemon.dir.path().join(file)).unwrap();
        }
        let is_there = |file: &&str| daemon.dir.path().join(file).exists();
        eventually("they are there again", SOON, || files.iter().all(is_there).then_some(()));
        let mut client = daemon.scenario(&["hold", "4096", "1", "5"]);
        client.expect("ready");
        clients.push(client);
        clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 4000));
    }
    let second = daemon.pageone(&["daemon", "--config", "/dev/null"]).output().unwrap();
    assert!(!second.status.success(), "{second:?}");
    assert!(text(&second.stderr).contains("another daemon is running in"), "{second:?}");
    for client in &mut clients {
        client.go();
        assert_eq!(client.finish(), Some(0), "no byte of it changed");
    }
}

#[test]
fn the_service_manager_hears_of_each_reload_and_the_journal_gets_priorities_and_no_times() {
    let dir = tempfile::tempdir().unwrap();
    let socket = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    socket.set_read_timeout(Some(SOON * e2e::patience())).unwrap();
    let hear = || {
        let mut state = [0; 256];
        let length = socket.recv(&mut state).expect("the daemon tells");
        text(&state[..length])
    };
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "").unwrap();
    let mut log = std::fs::File::options().create(true).append(true).read(true).open(dir.path().join("log")).unwrap();
    let stat = rustix::fs::fstat(log.as_fd()).unwrap();
    let mut daemon = Command::new(program("pageone"))
        .arg("--dir")
        .arg(dir.path().join("run"))
        .arg("daemon")
        .arg("--config")
        .arg(&file)
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .env("JOURNAL_STREAM", format!("{}:{}", stat.st_dev, stat.st_ino))
        .stdin(Stdio::null())
        .stderr(log.try_clone().unwrap())
        .spawn()
        .unwrap();
    let pid = daemon.id() as i32;
    assert_eq!(hear(), "READY=1");
    std::fs::write(&file, "nonsense = 1\n").unwrap();
    e2e::signal_process(pid, libc::SIGHUP);
    assert!(hear().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(hear(), "READY=1", "with the old settings");
    e2e::signal_process(pid, libc::SIGTERM);
    assert_eq!(hear(), "STOPPING=1");
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
    let mut lines = String::new();
    std::io::Seek::rewind(&mut log).unwrap();
    log.read_to_string(&mut lines).unwrap();
    assert!(lines.lines().any(|line| line.starts_with("<6>pageone daemon")), "{lines}");
    assert!(lines.lines().any(|line| line.starts_with("<3>the configuration was not changed")), "{lines}");
    assert!(lines.lines().all(|line| line.starts_with('<')), "{lines}");
}

#[test]
fn a_configuration_is_checked_without_a_daemon_and_the_sample_has_nothing_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pageone.toml");
    let check = || Command::new(program("pageone")).args(["config", "check"]).arg(&file).output().unwrap();
    let sample = Command::new(program("pageone")).args(["config", "sample"]).output().unwrap();
    std::fs::write(&file, &sample.stdout).unwrap();
    let out = check();
    assert!(out.status.success() && text(&out.stdout).contains("nothing is wrong; 0 of"), "{}", text(&out.stdout));
    std::fs::write(&file, "merge_period = 0\n\nthreads = -1\n").unwrap();
    let out = check();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(5));
    assert!(said.contains("pageone.toml: line 1: merge_period: 0 is not between 0.05"), "{said}");
    assert!(said.contains("pageone.toml: line 3: threads: "), "{said}");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(check().status.code(), Some(5));
    // What another program writes.
    let mut piped = Command::new("sh");
    piped.args(["-c", "echo 'threads = 2' | \"$0\" config check /dev/stdin"]).arg(program("pageone"));
    let out = piped.output().unwrap();
    assert!(text(&out.stdout).contains("nothing is wrong; 1 of"), "{} {}", text(&out.stdout), text(&out.stderr));
}
