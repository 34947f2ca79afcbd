//! Metrics for Prometheus.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use e2e::{Daemon, eventually};

const PAGES: u64 = 1024;

/// `pageone metrics` that answers; it is killed at the end.
struct Exporter {
    child: Child,
    /// Where it answers.
    place: String,
}

impl Exporter {
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let mut command = daemon.pageone(&[&["metrics"], args].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let place = line.trim().strip_prefix("pageone: metrics at ").unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, place }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The sum of all samples whose line begins so.
fn sum(text: &str, start: &str) -> f64 {
    text.lines()
        .filter(|line| line.starts_with(start))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

#[test]
fn prometheus_sees_what_status_shows() {
    let mut daemon = Daemon::start();
    let clients = [0, 1].map(|_| {
        let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "1", "3"]);
        client.expect("ready");
        client
    });
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    let exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0"]);
    let address = exporter.place.trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
    let answer = get(TcpStream::connect(&address).unwrap());
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    assert!(text.ends_with("# EOF\n"), "{text}");
    let status = daemon.status();
    for (sample, expected) in [
        ("pageone_pages{state=\"shared\"}", &status["pages_shared"]),
        ("pageone_pages{state=\"sharing\"}", &status["pages_sharing"]),
        ("pageone_client_pages{guest=\"pageone-test-client\",", &serde_json::json!(2 * PAGES)),
        ("pageone_domain_store_bytes{sharing_domain=\"uid-0\"}", &status["domains"][0]["store_bytes"]),
        ("pageone_pages_merged_total", &status["pages_merged_total"]),
    ] {
        let expected = expected.as_f64().unwrap();
        let found = match sample.starts_with("pageone_client_pages") {
            true => text
                .lines()
                .filter(|line| line.starts_with(sample) && line.contains("state=\"merged\""))
                .map(|line| sum(line, ""))
                .sum(),
            false => sum(text, sample),
        };
        assert!((found - expected).abs() <= expected * 0.01, "{sample}: {found}, not {expected}\n{text}");
    }
    let profit = sum(text, "pageone_general_profit_bytes");
    let expected = status["general_profit"].as_f64().unwrap();
    assert!((profit - expected).abs() <= expected.abs() * 0.01, "{profit}, not {expected}");

    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let of = |name: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
    };
    let left = of("MemAvailable:") + of("SwapFree:") - status["pages_sharing"].as_f64().unwrap() * 4096.0;
    let headroom = sum(text, "pageone_unmerge_headroom_bytes");
    assert!((headroom - left).abs() <= left.abs() * 0.05, "{headroom}, not {left}");

    // The same on a Unix socket, which is nobody else's.
    let path = daemon.dir.path().join("metrics.sock");
    let here = Exporter::start(&daemon, &["--socket", path.to_str().unwrap()]);
    assert!(get(UnixStream::connect(&path).unwrap()).contains("pageone_client_pages"));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let second = daemon.pageone(&["metrics", "--socket", path.to_str().unwrap()]).output().unwrap();
    assert!(String::from_utf8_lossy(&second.stderr).contains("somebody listens"), "{second:?}");
    drop(here);
    let again = Exporter::start(&daemon, &["--socket", path.to_str().unwrap()]);
    assert!(get(UnixStream::connect(&path).unwrap()).contains("# EOF"), "a left socket is replaced");
    drop((again, clients));

    // While the daemon is away a scrape fails, and says so.
    daemon.kill();
    let answer = get(TcpStream::connect(&address).unwrap());
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("no daemon answers"), "{answer}");
    daemon.restart();
    eventually("the exporter goes on", Duration::from_secs(10), || {
        get(TcpStream::connect(&address).unwrap()).starts_with("HTTP/1.1 200").then_some(())
    });
}

#[test]
fn metrics_are_printed_once_and_told_to_no_network() {
    let daemon = Daemon::start();
    let once = daemon.pageone(&["metrics"]).output().unwrap();
    assert!(once.status.success() && String::from_utf8_lossy(&once.stdout).ends_with("# EOF\n"), "{once:?}");
    let refused = daemon.pageone(&["metrics", "--listen", "0.0.0.0:0"]).output().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("0.0.0.0:0 is not of the loopback: the metrics name every guest"), "{said}");
}
