//! Metrics for Prometheus.

mod known;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use e2e::{Client, Daemon, eventually};

const PAGES: u64 = 1024;
/// How long a scraper waits at most: more than a silent client may hold its connection.
const PATIENCE: Duration = Duration::from_secs(20);

/// `pageone metrics` that answers; it is killed at the end.
struct Exporter {
    child: Child,
    /// Where it answers.
    place: String,
    notes: BufReader<ChildStderr>,
}

impl Exporter {
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let mut command = daemon.pageone(&[&["metrics"], args].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut notes = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        notes.read_line(&mut line).unwrap();
        let place = line.trim().strip_prefix("pageone: metrics at ").unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, place, notes }
    }

    /// The next thing that it says.
    fn note(&mut self) -> String {
        let mut line = String::new();
        self.notes.read_line(&mut line).unwrap();
        line
    }

    fn address(&self) -> &str {
        self.place.split("//").last().unwrap().trim_end_matches("/metrics")
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a request gets.
fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(stream: impl Read + Write) -> String {
    ask(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n")
}

/// Two clients that are merged.
fn merged(daemon: &Daemon) -> [Client; 2] {
    let clients = [0, 1].map(|_| {
        let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "1", "3"]);
        client.expect("ready");
        client
    });
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    clients
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
    let clients = merged(&daemon);
    let exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0", "--names"]);
    let answer = get(exporter.connect());
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

    // Of one moment: others take memory. That these are the kernel's figures is for agree.rs.
    let of = |name: &str| sum(text, &format!("pageone_{name} "));
    let sharing = status["pages_sharing"].as_f64().unwrap() * 4096.0;
    let left = of("memory_available_bytes") + of("swap_free_bytes") - sharing;
    let headroom = of("unmerge_headroom_bytes");
    assert!(sharing > 0.0 && (headroom - left).abs() <= left.abs() * 0.0001, "{headroom}, not {left}");

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
    eventually("the exporter says that there is no daemon", PATIENCE, || {
        let answer = get(exporter.connect());
        (answer.starts_with("HTTP/1.1 503 ") && answer.contains("no daemon answers")).then_some(())
    });
    daemon.restart();
    eventually("the exporter goes on", PATIENCE, || get(exporter.connect()).starts_with("HTTP/1.1 200").then_some(()));
}

#[test]
fn metrics_are_printed_once_and_told_to_no_network() {
    let daemon = Daemon::start();
    let once = daemon.pageone(&["metrics"]).output().unwrap();
    assert!(once.status.success() && String::from_utf8_lossy(&once.stdout).ends_with("# EOF\n"), "{once:?}");
    for words in [&["--listen", "0.0.0.0:0"][..], &["--listen", "0.0.0.0:0", "--names"]] {
        let refused = daemon.pageone(&[&["metrics"], words].concat()).output().unwrap();
        assert!(!refused.status.success());
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("0.0.0.0:0 is not of the loopback, and nobody is asked for a password"), "{said}");
    }
}

#[test]
fn without_a_password_there_are_figures_of_the_host_and_no_name() {
    let daemon = Daemon::start();
    let clients = merged(&daemon);
    let mut exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0"]);
    assert!(exporter.note().contains("figures of clients and domains are left out"));
    let text = get(exporter.connect());
    assert!(sum(&text, "pageone_pages{state=\"sharing\"}") > 0.0, "{text}");
    assert!((sum(&text, "pageone_unlisted{what=\"clients\"}") - 2.0).abs() < f64::EPSILON, "{text}");
    let pids = clients.each_ref().map(|client| format!("\"{}\"", client.pid()));
    for hidden in ["pageone-test-client", "uid-0", "pid=", "guest=", &pids[0], &pids[1]] {
        assert!(!text.contains(hidden), "{hidden} is in\n{text}");
    }
}

#[test]
fn head_and_a_page_for_people_are_answered_and_the_rest_is_refused() {
    let daemon = Daemon::start();
    let exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0"]);
    let page = ask(exporter.connect(), "GET / HTTP/1.1\r\n\r\n");
    let version = format!("Version {}.", env!("CARGO_PKG_VERSION"));
    for held in ["text/html", "<h1>PageONE</h1>", "href=\"metrics\"", &version] {
        assert!(page.contains(held), "{held} is not in\n{page}");
    }
    let head = ask(exporter.connect(), "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert!(!head.contains("content-length: 0\r\n") && head.contains("content-length: "), "{head}");
    assert!(ask(exporter.connect(), "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    let post = ask(exporter.connect(), "POST /metrics HTTP/1.1\r\n\r\n");
    assert!(post.starts_with("HTTP/1.1 405 ") && post.contains("\r\nallow: GET, HEAD\r\n"), "{post}");
}

#[test]
fn silent_connections_delay_no_scrape_and_a_lack_of_descriptors_ends() {
    let daemon = Daemon::start();
    let exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0"]);
    let silent: Vec<TcpStream> = (0..300).map(|_| exporter.connect()).collect();
    assert!(get(exporter.connect()).contains("# EOF"));
    drop(silent);

    let pid = rustix::process::Pid::from_raw(exporter.child.id() as i32);
    let used = std::fs::read_dir(format!("/proc/{}/fd", exporter.child.id())).unwrap().count() as u64;
    let few = rustix::process::Rlimit { current: Some(used + 3), maximum: Some(used + 3) };
    rustix::process::prlimit(pid, rustix::process::Resource::Nofile, few).unwrap();
    let silent: Vec<TcpStream> = (0..20).map(|_| exporter.connect()).collect();
    eventually("a scrape is answered when the silent ones were cut", 10 * PATIENCE, || {
        let mut stream = exporter.connect();
        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer.starts_with(b"HTTP/1.1 200").then_some(())
    });
    drop(silent);
}

#[test]
fn promtool_finds_nothing_to_mend() {
    let cache = std::env::var_os("PAGEONE_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("XDG_CACHE_HOME")?).join("pageone")));
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/pageone")));
    let Some(promtool) = cache.map(|cache| cache.join("promtool")).filter(|promtool| promtool.exists()) else {
        return e2e::skipped("there is no promtool: scripts/deps.sh alerts");
    };
    let daemon = Daemon::start();
    let _clients = merged(&daemon);
    let exporter = Exporter::start(&daemon, &["--listen", "127.0.0.1:0", "--names"]);
    let answer = ask(exporter.connect(), "GET /metrics HTTP/1.0\r\n\r\n");
    let (_, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(text.contains("pageone_client_pages{"), "{text}");
    let mut check = Command::new(promtool);
    check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut check = check.spawn().unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let said = check.wait_with_output().unwrap();
    assert!(said.status.success() && said.stdout.is_empty() && said.stderr.is_empty(), "{said:?}");
}
