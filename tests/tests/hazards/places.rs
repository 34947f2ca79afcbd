//! Programs in places of their own: namespaces, without dumps, without the daemon's socket.

use std::process::Command;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, program, skipped};

const PAGES: &str = "2048";

/// The client's command under a wrapper, such as `unshare` with its options.
fn wrapped(daemon: &Daemon, wrapper: &[&str]) -> Command {
    let mut command = daemon.run(&[]);
    command.args(wrapper).arg(program("pageone-test-client")).args(["hold", PAGES, "4"]);
    command
}

/// Whether this host lets a wrapper run a program.
fn works(wrapper: &[&str]) -> bool {
    let [name, options @ ..] = wrapper else { return true };
    let works = Command::new(name).args(options).arg("true").output().is_ok_and(|output| output.status.success());
    if !works {
        skipped(&format!("{} is not possible here", wrapper.join(" ")));
    }
    works
}

/// What the daemon says of its only client.
fn only_client(daemon: &Daemon) -> Option<serde_json::Value> {
    daemon.status()["domains"].as_array()?.iter().find_map(|domain| domain["clients"].as_array()?.first().cloned())
}

#[test]
fn clients_in_namespaces_of_their_own_merge() {
    for wrapper in [
        &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"][..],
        &["unshare", "--net", "--ipc", "--uts", "--cgroup"],
        &["unshare", "--user", "--map-root-user"],
        &["unshare", "--mount"],
    ] {
        if !works(wrapper) {
            continue;
        }
        let daemon = Daemon::start();
        let mut client = Client::spawn(wrapped(&daemon, wrapper));
        client.expect("ready");
        eventually(&format!("{} merges", wrapper.join(" ")), Duration::from_secs(20), || {
            (only_client(&daemon)?["pages_merged"].as_u64()? >= 1500).then_some(())
        });
        client.go();
        let _ = client.finish();
    }
}

#[test]
fn a_program_that_lets_nobody_look_at_it_merges_if_it_may_look_itself_or_is_left_alone() {
    let start = |daemon: &Daemon, uid| {
        let mut command = wrapped(daemon, &[]);
        command.env("PAGEONE_TEST_DUMPABLE", "0").env(e2e::user::ENV_UID, uid).env("PAGEONE_LOG", "1");
        let log = daemon.dir.path().join("client");
        command.stderr(std::fs::File::create(&log).unwrap());
        let mut client = Client::spawn(command);
        client.expect("ready");
        (client, log)
    };
    let daemon = Daemon::start();
    let (mut client, _) = start(&daemon, "0");
    daemon.wait_merged(client.pid(), 1500);
    client.go();
    let daemon = Daemon::start();
    let (mut client, log) = start(&daemon, "65534");
    std::thread::sleep(Duration::from_millis(300));
    client.go();
    assert!(only_client(&daemon).is_none(), "{}", daemon.status());
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("memory is left to the kernel: its page map cannot be read").count(), 1, "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
}

#[test]
fn a_program_that_does_not_see_the_socket_runs_as_ever() {
    let daemon = Daemon::start();
    let hide = format!("mount -t tmpfs none {} && exec \"$@\"", daemon.dir.path().display());
    let wrapper = ["unshare", "--mount", "sh", "-c", &hide, "sh"];
    if !works(&wrapper) {
        return;
    }
    let mut client = Client::spawn(wrapped(&daemon, &wrapper));
    client.expect("ready");
    std::thread::sleep(Duration::from_millis(500));
    client.go();
    assert!(only_client(&daemon).is_none(), "{}", daemon.status());
    assert_eq!(client.finish(), Some(0));
}
