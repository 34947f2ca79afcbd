//! Headroom: merging pauses while the host could not give back what guests may write, and goes on
//! when it could.

use std::time::Duration;

use e2e::{Daemon, eventually};
use serde_json::Value;

const PAGES: u64 = 2048;

fn merged(daemon: &Daemon, pid: i32) -> u64 {
    daemon.client(pid).and_then(|client| client["pages_merged"].as_u64()).unwrap_or(0)
}

/// Writes the daemon's configuration anew, and lets it read it.
fn reload(daemon: &Daemon, lines: &str) {
    let path = daemon.dir.path().join("config.toml");
    std::fs::write(path, format!("direct_io_seconds = 0\n{lines}")).unwrap();
    daemon.signal(libc::SIGHUP);
}

fn wait_short(daemon: &Daemon, short: bool) -> Value {
    eventually("merging pauses, or goes on", Duration::from_secs(20), || {
        daemon.try_status().filter(|status| status["headroom_is_short"] == short)
    })
}

#[test]
fn merging_pauses_while_the_headroom_is_short_and_then_goes_on() {
    let daemon = Daemon::start();
    let mut first = daemon.scenario(&["hold", &PAGES.to_string(), "2", "3"]);
    first.expect("ready");
    daemon.wait_merged(first.pid(), PAGES);

    // A share that no host has makes it short: what is available would have to be more than all.
    reload(&daemon, "headroom_percent = 1000000\n");
    let status = wait_short(&daemon, true);
    let why = status["paused"].as_str().unwrap();
    assert!(why.contains("headroom_percent = 1000000") && why.contains("merging waits until"), "{why}");
    let text = String::from_utf8(daemon.pageone(&["status"]).output().unwrap().stdout).unwrap();
    assert!(text.contains("PAUSED: ") && text.contains("add swap space"), "{text}");
    let metrics = String::from_utf8(daemon.pageone(&["metrics"]).output().unwrap().stdout).unwrap();
    assert!(metrics.contains("\npageone_headroom_is_short 1.0\n"), "{metrics}");

    // What comes now is looked at, and not merged.
    let mut second = daemon.scenario(&["hold", &PAGES.to_string(), "2", "3"]);
    second.expect("ready");
    let scans = |pid| daemon.client(pid).and_then(|client| client["full_scans"].as_u64()).unwrap_or(0);
    eventually("it is scanned", Duration::from_secs(20), || (scans(second.pid()) >= 20).then_some(()));
    assert_eq!(merged(&daemon, second.pid()), 0, "nothing is merged meanwhile");
    let client = daemon.client(second.pid()).unwrap();
    assert_eq!(client["why"]["code"], "headroom", "{client}");
    assert_eq!(merged(&daemon, first.pid()), PAGES, "what is merged stays so");

    reload(&daemon, "");
    wait_short(&daemon, false);
    daemon.wait_merged(second.pid(), PAGES);
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let count = |what: &str| log.matches(what).count();
    assert_eq!((count("merging pauses: "), count("there is headroom again")), (1, 1), "{log}");
}

#[test]
fn merging_pauses_when_guests_write_faster_than_memory_lasts() {
    // A day's worth of writes at any rate is more than any host has.
    let daemon = Daemon::with_config(&["--merge-period", "0.1"], "headroom_percent = 0\nheadroom_seconds = 86400\n");
    let mut clients: Vec<_> = (0..2)
        .map(|_| {
            let mut client = daemon.scenario(&["hold", &(32 * PAGES).to_string(), "2", "3"]);
            client.expect("ready");
            client
        })
        .collect();
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 32 * PAGES - 16));
    assert_eq!(daemon.status()["unmerge_headroom_seconds"], Value::Null, "nothing was written yet");
    for client in &mut clients {
        client.tell("refill");
        client.expect("ok");
    }
    let status = wait_short(&daemon, true);
    let why = status["paused"].as_str().unwrap();
    assert!(why.contains("headroom_seconds = 86400") && why.contains("MiB a second"), "{why}");
    // Half a GiB within the last minute. Merging pauses when the first of it was seen.
    let rate = |status: &Value| status["unmerge_bytes_per_second"].as_f64().unwrap();
    let written = (2 * 32 * PAGES * 4096) as f64;
    let status = eventually("what was written is seen", Duration::from_secs(50), || {
        let status = daemon.status();
        (0.5 * written..1.1 * written).contains(&(rate(&status) * 60.0)).then_some(status)
    });
    let rate = rate(&status);
    let lasts = status["unmerge_headroom_seconds"].as_f64().unwrap();
    let available =
        (status["memory_available_bytes"].as_f64().unwrap() + status["swap_free_bytes"].as_f64().unwrap()) / rate;
    assert!((lasts - available).abs() < 0.01 * available, "{lasts} {available}");
}
