//! Just enough of HTTP/1.1 (RFC 9112) for a scraper: one request and one answer a connection, one
//! connection at a time.
//!
//! A scraper asks every few seconds, and an answer takes milliseconds, so nobody waits long. One
//! that does not send its request, or does not read its answer, has [`TIMEOUT`].

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Time for a request, and for an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of a request at most.
const MOST: usize = 8 << 10;
/// Header fields of a request at most.
const MOST_FIELDS: usize = 64;
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// A connection.
pub(super) trait Stream: Read + Write {
    /// Sets how long reading and writing may take.
    fn limit(&self, time: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

impl Stream for UnixStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

/// Answers for ever.
pub(super) fn serve<S: Stream>(accept: impl Fn() -> io::Result<S>, ask: &dyn Fn() -> Result<String>) -> Result<()> {
    loop {
        match accept() {
            // A scraper that goes away misses a sample, which it knows.
            Ok(mut stream) => drop(answer(&mut stream, ask)),
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Reads a request and answers it.
fn answer(stream: &mut impl Stream, ask: &dyn Fn() -> Result<String>) -> io::Result<()> {
    let end = Instant::now() + TIMEOUT;
    let mut bytes = Vec::new();
    let target = loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() >= MOST {
            break Err("400 Bad Request");
        }
        stream.limit(left)?;
        let mut part = [0; 1024];
        let len = stream.read(&mut part)?;
        if len == 0 {
            break Err("400 Bad Request");
        }
        bytes.extend_from_slice(&part[..len]);
        if let Some(target) = target(&bytes) {
            break target;
        }
    };
    let (status, kind, body) = match target {
        Err(status) => (status, "text/plain", "Ask for GET /metrics.\n".to_owned()),
        Ok(()) => match ask() {
            Ok(text) => ("200 OK", control::CONTENT_TYPE, text),
            Err(error) => ("503 Service Unavailable", "text/plain", format!("{error:#}\n")),
        },
    };
    stream.limit(TIMEOUT)?;
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Whether a request asks for the metrics, or the status that it gets; `None` as long as it is not
/// complete.
fn target(bytes: &[u8]) -> Option<Result<(), &'static str>> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => None,
        Err(_) => Some(Err("400 Bad Request")),
        Ok(httparse::Status::Complete(_)) => Some(match (request.method, request.path) {
            (Some("GET"), Some(path)) if path.split('?').next() == Some("/metrics") => Ok(()),
            (Some("GET"), _) => Err("404 Not Found"),
            _ => Err("405 Method Not Allowed"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a request gets, sent in parts of `step` bytes.
    fn get(request: &str, step: usize) -> String {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || answer(&mut there, &|| Ok("pageone_up 1\n".into())));
        for part in request.as_bytes().chunks(step) {
            // It may have been refused before its end.
            let _ = here.write_all(part);
        }
        let _ = here.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        // After the answer comes a reset if not all of the request was read.
        let _ = here.read_to_end(&mut answer);
        let _ = server.join().unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn a_scraper_gets_the_metrics_and_others_a_status() {
        let ask = "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\n\r\n";
        for step in [1, 7, 4096] {
            let answer = get(ask, step);
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; "), "{answer}");
            assert!(answer.ends_with("Content-Length: 13\r\nConnection: close\r\n\r\npageone_up 1\n"), "{answer}");
        }
        assert!(get("GET / HTTP/1.1\r\n\r\n", 99).starts_with("HTTP/1.1 404 "));
        assert!(get("POST /metrics HTTP/1.1\r\n\r\n", 99).starts_with("HTTP/1.1 405 "));
        assert!(get("nonsense\r\n\r\n", 99).starts_with("HTTP/1.1 400 "));
        assert!(get("GET /metrics", 99).starts_with("HTTP/1.1 400 "), "cut off");
        assert!(get(&format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(MOST)), 4096).starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn who_does_not_ask_has_two_seconds() {
        let (_here, mut there) = UnixStream::pair().unwrap();
        let start = Instant::now();
        assert!(answer(&mut there, &|| unreachable!()).is_err());
        assert!(start.elapsed() < TIMEOUT * 5);
    }

    #[test]
    fn without_a_daemon_the_answer_says_so() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        here.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        answer(&mut there, &|| anyhow::bail!("no daemon answers")).unwrap();
        drop(there);
        let mut text = String::new();
        here.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("no daemon answers\n"), "{text}");
    }
}
