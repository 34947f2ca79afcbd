//! After a restart of the daemon its figures of what is saved go on where they were: they are read
//! from the clients' memory, and from what their agents have noted.

use std::time::Duration;

use e2e::{Daemon, eventually};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(30);
/// Pages of a client.
const PAGES: u64 = 4096;

fn figure(status: &Value, name: &str) -> u64 {
    status[name].as_u64().unwrap_or_else(|| panic!("{name} in {status}"))
}

/// What a host has saved: pages that share, pages given back, and the bytes that all would take.
fn saved(status: &Value) -> [u64; 5] {
    ["pages_shared", "pages_sharing", "pages_zero", "pages_recycled", "unmerge_bytes"].map(|name| figure(status, name))
}

#[test]
fn what_is_shared_zero_and_recycled_goes_on_where_it_was_and_so_does_the_profit() {
    let mut daemon = Daemon::with(&["--merge-period", "0.2", "--reclaim-period", "0.2"]);
    let pages = PAGES.to_string();
    let mut clients: Vec<_> = [&["hold", &pages, "4", "5"][..], &["hold", &pages, "4", "5"], &["zeros", &pages]]
        .into_iter()
        .map(|words| daemon.scenario(words))
        .collect();
    clients.push(daemon.scenario(&["recycle", &(2 * PAGES).to_string(), "3"]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    daemon.wait_merged(clients[3].pid(), 2 * PAGES);
    clients[3].tell("free");
    clients[3].expect("ok");
    // The two that hold have PAGES / 4 contents, so has what the recycler keeps: half its pages.
    let (shared, users) = (2 * PAGES / 4, 3 * PAGES);
    let before = eventually("all is merged", SOON, || {
        let status = daemon.status();
        let all = [shared, users - shared, PAGES, PAGES];
        (saved(&status)[..4] == all).then_some(status)
    });
    let profit = |status: &Value| status["general_profit"].as_i64().unwrap();
    for how in ["killed", "stopped", "killed while it takes them back"] {
        match how {
            "stopped" => drop(daemon.stop()),
            _ => daemon.kill(),
        }
        daemon.restart();
        if how.ends_with("back") {
            daemon.kill();
            daemon.restart();
        }
        let mut seen = Value::Null;
        eventually(how, SOON, || {
            seen = daemon.status();
            println!("{how}: {:?} of {:?}, profit {}", saved(&seen), saved(&before), profit(&seen));
            // Its indexes may take a little more or less than before.
            (saved(&seen) == saved(&before) && profit(&seen) >= profit(&before) * 98 / 100).then_some(())
        });
        assert_eq!(figure(&seen, "pages_merged_total"), 0, "what a daemon has done itself begins anew");
    }
    for client in &mut clients[..3] {
        client.go();
    }
}

#[test]
fn a_segment_is_written_down_before_a_client_maps_it() {
    // A daemon that is killed at once is followed by one that takes back what is written down.
    let daemon = Daemon::with(&["--merge-period", "5"]);
    let mut clients = [5, 5].map(|seed| daemon.scenario(&["hold", &PAGES.to_string(), "4", &seed.to_string()]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    let maps = format!("/proc/{}/maps", clients[0].pid());
    let mapped = eventually("a segment is mapped", SOON, || {
        let maps = std::fs::read_to_string(&maps).unwrap();
        let line = maps.lines().find(|line| line.contains("memfd:pageone:uid"))?;
        line.split_whitespace().nth(4).map(str::to_string)
    });
    let written = std::fs::read_to_string(daemon.dir.path().join("segments")).unwrap_or_default();
    assert!(written.lines().any(|line| line.split(' ').next() == Some(&mapped)), "{mapped} in {written:?}");
    clients.iter_mut().for_each(|client| client.go());
}

#[test]
fn zero_pages_that_were_written_while_no_daemon_was_there_do_not_count() {
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["zeros", &PAGES.to_string()]);
    client.expect("ready");
    eventually("all pages are given back", SOON, || {
        (figure(&daemon.client(client.pid())?, "pages_zero") == PAGES).then_some(())
    });
    daemon.kill();
    // It reads them all, and writes every third.
    client.go();
    daemon.restart();
    let left = PAGES - PAGES.div_ceil(3);
    eventually("those that were written are merged, and the others zero", SOON, || {
        let client = daemon.client(client.pid())?;
        (figure(&client, "pages_zero") == left && figure(&client, "pages_merged") == PAGES - left).then_some(())
    });
    assert_eq!(client.finish(), Some(0));
}
