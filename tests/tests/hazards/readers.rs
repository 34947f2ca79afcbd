//! Reading a client: never another program, never for long.

use std::process::Command;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, program};

/// A client without an agent that speaks for itself; see `tests/src/bin/client/raw.rs`.
fn raw(daemon: &Daemon, scenario: &str, words: &[&str]) -> Client {
    let mut command = Command::new(program("pageone-test-client"));
    command.arg(scenario).arg(daemon.dir.path().join("agent.sock")).args(words);
    Client::spawn(command)
}

#[test]
fn a_program_that_a_client_becomes_is_never_read() {
    const PAGES: u64 = 1024;
    // A slow period: the program changes after its pages were noted, and before they are read.
    let daemon = Daemon::with(&["--merge-period", "1"]);
    let mut holder = daemon.scenario(&["hold", "1024", "1", "6"]);
    holder.expect("ready");
    eventually("the holder's pages are known", Duration::from_secs(30), || {
        (daemon.client(holder.pid())?["pages_unshared"] == PAGES).then_some(())
    });
    let mut client = raw(&daemon, "exec", &["1024", "6"]);
    client.expect("ready");
    eventually("the client was scanned", Duration::from_secs(30), || {
        (daemon.client(client.pid())?["full_scans"].as_u64()? >= 1).then_some(())
    });
    client.tell("exec");
    client.expect("other");
    let scans = || daemon.client(holder.pid()).and_then(|holder| holder["full_scans"].as_u64()).unwrap();
    let before = scans();
    eventually("some periods pass", Duration::from_secs(30), || (scans() >= before + 5).then_some(()));
    let status = daemon.status();
    assert_eq!(status["pages_shared"], 0, "what another program holds became frames: {status:#}");
    client.go();
    holder.go();
}

#[test]
fn a_process_that_shares_a_clients_memory_and_outlives_it_keeps_its_frames() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["sibling", "4096", "4"]);
    client.expect("ready");
    let pid = client.pid();
    daemon.wait_merged(pid, 4096);
    client.tell("go");
    client.expect("alone");
    let other = || {
        // Its pages need frames, and take those that are free.
        let mut other = daemon.scenario(&["hold", "4096", "4", "9"]);
        other.expect("ready");
        daemon.wait_merged(other.pid(), 4096);
        other
    };
    let mut others = [other(), other()];
    let merged = daemon.client(pid).map(|client| (client["pages_merged"].clone(), client["state"].clone()));
    assert_eq!(merged, Some((4096.into(), "disconnected".into())), "its memory is in use");
    client.go();
    others.iter_mut().for_each(Client::go);
    // The sibling ends with its input.
    client.finish();
    eventually("the client is gone with its memory", Duration::from_secs(30), || {
        daemon.client(pid).is_none().then_some(())
    });
}
