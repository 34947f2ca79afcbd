//! `pageone dirty`: it reports exactly what a client wrote, changes nothing about merging, and says
//! whom it can't see.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use e2e::{Daemon, eventually};
use serde_json::Value;

const PAGES: u64 = 4096;

/// A running `pageone dirty --json`.
struct Reports {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Reports {
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let mut command = daemon.pageone(&["dirty", "--json"]);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The next report on the only client.
    fn next(&mut self) -> Value {
        let line = self.lines.next().expect("one more report").unwrap();
        let report: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(report["clients"].as_array().unwrap().len(), 1, "{line}");
        report["clients"][0].clone()
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the daemon knows the client with its region: its agent announces it in its own time.
fn known(daemon: &Daemon, client: &e2e::Client) {
    let bytes = serde_json::Value::from(PAGES * 4096);
    let known = || (daemon.client(client.pid())?["region_bytes"] == bytes).then_some(());
    eventually("the daemon knows the client", Duration::from_secs(60), known);
}

/// Distinct pages written within the given number of seconds.
fn within(client: &Value, seconds: f64) -> u64 {
    let windows = client["windows"].as_array().unwrap();
    let window = windows.iter().find(|w| w["seconds"] == seconds);
    window.unwrap_or_else(|| panic!("a window of {seconds} s: {client}"))["pages"].as_u64().unwrap()
}

fn heat(client: &Value) -> u64 {
    let regions = client["regions"].as_array().unwrap().iter();
    regions.flat_map(|r| r["parts"].as_array().unwrap()).map(|n| n.as_u64().unwrap()).sum()
}

#[test]
fn reports_what_a_client_writes_and_ages_nothing() {
    // Nothing is merged within the test by itself.
    let daemon = Daemon::with(&["--merge-period", "1000"]);
    let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "4"]);
    client.expect("ready");
    known(&daemon, &client);
    let pid = client.pid().to_string();
    let mut reports = Reports::start(&daemon, &[&pid, "--interval", "0.5", "--bandwidth", "1", "--downtime", "10"]);
    // What was written before the watch began does not count.
    let mut report = reports.next();
    while report["watched_seconds"].as_f64().unwrap() < 1.0 {
        assert_eq!((within(&report, 1.0), heat(&report)), (0, 0), "{report}");
        report = reports.next();
    }
    assert_eq!((report["pid"].as_i64(), report["pages"].as_u64()), (Some(client.pid().into()), Some(PAGES)));
    assert_eq!(report["migration"]["converges"], true, "{report}");

    client.tell("rewrite");
    client.expect("ok");
    let mut written: f64 = 0.0;
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while within(&report, 10.0) < PAGES || within(&report, 2.0) > 0 {
        assert!(std::time::Instant::now() < deadline, "{report}");
        report = reports.next();
        // Each report is of a scan of its own, unless it says why not.
        let of = |name: &str| report[name].as_f64().unwrap();
        written += if report["held_up"].is_null() { of("pages_per_second") * of("interval_seconds") } else { 0.0 };
        assert!(within(&report, 60.0) <= PAGES, "no page is counted twice: {report}");
    }
    assert_eq!((within(&report, 10.0), within(&report, 60.0), heat(&report)), (PAGES, PAGES, PAGES), "{report}");
    // What is written at the moment of a scan is found by the next one, too.
    assert!((0.99..1.1).contains(&(written / PAGES as f64)), "{written} pages by their rates");
    assert_eq!(report["pages_per_second"], 0.0);

    let merged = daemon.client(client.pid()).unwrap();
    assert_eq!(
        (merged["full_scans"].as_u64().unwrap() <= 1, merged["pages_merged"].as_u64()),
        (true, Some(0)),
        "{merged}"
    );
    client.go();
    assert_eq!(client.finish(), Some(0));
}

#[test]
fn a_watched_client_is_merged_as_any_other() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "4"]);
    client.expect("ready");
    known(&daemon, &client);
    let mut reports = Reports::start(&daemon, &["--interval", "0.1"]);
    daemon.wait_merged(client.pid(), PAGES);
    for _ in 0..3 {
        client.tell("rewrite");
        client.expect("ok");
        reports.next();
        client.go();
        daemon.wait_merged(client.pid(), PAGES);
    }
    client.go();
    assert_eq!(client.finish(), Some(0));
}

#[test]
fn who_is_no_client_cannot_be_seen_and_bad_options_are_refused() {
    let daemon = Daemon::start();
    let run = |args: &[&str]| {
        let out = daemon.pageone(&["dirty"]).args(args).output().unwrap();
        (
            out.status.code(),
            String::from_utf8_lossy(&out.stdout).into_owned(),
            String::from_utf8_lossy(&out.stderr).into_owned(),
        )
    };
    let (code, _, error) = run(&["1"]);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("process 1") && error.contains("pageone run"), "{error}");
    let (code, out, _) = run(&["--count", "1", "--interval", "0.1"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("no clients"), "{out}");
    for bad in [["--interval", "0"], ["--interval", "nan"], ["--bandwidth", "-1"]] {
        assert_ne!(run(&bad).0, Some(0), "{bad:?}");
    }
    let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "4"]);
    client.expect("ready");
    known(&daemon, &client);
    // A migration is predicted of who was watched for a second.
    let out = eventually("a prediction", Duration::from_secs(60), || {
        let (code, out, _) = run(&["--count", "6", "--interval", "0.3", "--bandwidth", "1000"]);
        assert_eq!(code, Some(0));
        out.contains("migration: ").then_some(out)
    });
    for part in [&client.pid().to_string(), "16 MiB", "pages/s", "distinct pages", "migration: converges", "▕"] {
        assert!(out.contains(part), "{part} in {out}");
    }
}
