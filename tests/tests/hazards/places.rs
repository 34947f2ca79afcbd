//! Programs in places of their own: namespaces, without dumps, without the daemon's socket.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
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
    // And what was denied, which is told without PAGEONE_LOG too.
    assert_eq!(
        log.matches("memory is not merged: /proc/self/pagemap is denied because the program").count(),
        1,
        "{log}"
    );
    assert_eq!(log.lines().count(), 2, "{log}");
}

#[test]
fn a_program_that_drops_privileges_or_all_files_merges_on_and_is_detached() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root may become another user, or change the root directory");
    }
    for change in ["drop", "chroot"] {
        let daemon = Daemon::start();
        let mut client = daemon.scenario(&["hold", PAGES, "4"]);
        client.expect("ready");
        daemon.wait_merged(client.pid(), 1500);
        client.tell(change);
        client.expect("ok");
        // New contents merge.
        let merges = || daemon.status()["pages_merged_total"].as_u64().unwrap();
        let before = merges();
        client.tell("rewrite");
        client.expect("ok");
        eventually(&format!("new contents after {change} merge"), Duration::from_secs(20), || {
            (merges() >= before + 1500).then_some(())
        });
        let out = daemon.pageone(&["detach", &client.pid().to_string()]).output().unwrap();
        assert!(out.status.success(), "{change}: {}", String::from_utf8_lossy(&out.stderr));
        // The page that it shared with the daemon goes when the connection has ended.
        eventually(&format!("after {change} nothing of the daemon's is mapped"), Duration::from_secs(60), || {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", client.pid())).unwrap();
            (!maps.contains("memfd:pageone:")).then_some(())
        });
        client.go();
    }
}

/// The test client as a program of root, which runs with root's rights if `setuid`.
fn program_of_root(dir: &Path, setuid: bool) -> PathBuf {
    let path = dir.join(if setuid { "setuid" } else { "plain" });
    std::fs::copy(program("pageone-test-client"), &path).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(if setuid { 0o4755 } else { 0o755 })).unwrap();
    path
}

#[test]
fn a_setuid_program_runs_as_without_us() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can make a setuid program of another user");
    }
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    // The library too, where nobody can read it.
    for path in [daemon.dir.path(), dir.path()] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let library = dir.path().join("libpageone_agent.so");
    std::fs::copy(program("libpageone_agent.so"), &library).unwrap();
    let start = |setuid| {
        // As `pageone run` does where the user may have a userfaultfd.
        let mut command = Command::new(program_of_root(dir.path(), setuid));
        command.args(["hold", PAGES, "4"]).uid(65534).gid(65534);
        command.env("LD_PRELOAD", &library).env(wire::ENV_SOCKET, daemon.dir.path().join("agent.sock"));
        command.env("PAGEONE_LOG", "1");
        let log = dir.path().join("log");
        command.stderr(std::fs::File::create(&log).unwrap());
        let mut client = Client::spawn(command);
        client.expect("ready");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", client.pid())).unwrap();
        (client, maps.contains("libpageone_agent"), log)
    };
    let (mut plain, has_agent, _) = start(false);
    assert!(has_agent, "the loader takes the library into an ordinary program of this user");
    plain.go();
    let (mut setuid, has_agent, log) = start(true);
    let status = kmem::procfs::status(Some(setuid.pid())).unwrap();
    if status.uid != 0 {
        return skipped(&format!("{} is mounted nosuid, or privileges are refused here", dir.path().display()));
    }
    assert!(!has_agent, "the loader's secure mode ignores libraries of other users");
    assert_eq!(status.threads, 1);
    std::thread::sleep(Duration::from_millis(300));
    setuid.go();
    assert!(only_client(&daemon).is_none(), "{}", daemon.status());
    let log = std::fs::read_to_string(log).unwrap();
    assert!(!log.contains("pageone-agent"), "{log}");
    assert_eq!(setuid.finish(), Some(0));
}

#[test]
fn a_program_that_starts_where_proc_is_missing_is_left_alone() {
    let wrapper = ["unshare", "--mount", "sh", "-c", "umount -l /proc && exec \"$@\"", "sh"];
    if !works(&wrapper) {
        return;
    }
    let daemon = Daemon::start();
    let log = daemon.dir.path().join("client");
    let mut command = wrapped(&daemon, &wrapper);
    command.env("PAGEONE_LOG", "1").stderr(std::fs::File::create(&log).unwrap());
    let mut client = Client::spawn(command);
    client.expect("ready");
    std::thread::sleep(Duration::from_millis(300));
    client.go();
    assert!(only_client(&daemon).is_none(), "{}", daemon.status());
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("memory is left to the kernel: its page map cannot be read").count(), 1, "{log}");
    assert_eq!(client.finish(), Some(0));
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
