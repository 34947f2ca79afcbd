//! Many at once, none of whom delays another.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;

use control::Status;

use super::*;

/// Serves until the tests end.
fn start(ask: impl Fn() -> Result<Status, String> + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let figures = Figures::new("1.2.3", Arc::new(ask));
    std::thread::spawn(move || serve(Listener::Tcp(listener), None, Names::ForKnown, figures));
    address
}

/// What a request gets; empty if the connection is cut.
fn get(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    // It may have been refused before its end.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[test]
fn each_request_has_its_answer() {
    let address = start(|| Err("no daemon answers".into()));
    let long = format!("GET /metrics HTTP/1.1\r\nA: {}\r\n\r\n", "a".repeat(2 * MOST_BYTES));
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: a\r\n".repeat(MOST_FIELDS + 1));
    for (request, status, end) in [
        ("GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n", "503", "no daemon answers\n"),
        ("GET / HTTP/1.1\r\n\r\n", "200", "</html>\n"),
        ("GET /x HTTP/1.1\r\n\r\n", "404", "Ask for GET /metrics.\n"),
        ("HEAD / HTTP/1.1\r\n\r\n", "200", "\r\n\r\n"),
        ("nonsense\r\n\r\n", "400", ""),
        (&long, "431", ""),
        (&many, "431", ""),
    ] {
        let answer = get(address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.ends_with(end), "{request}: {answer}");
    }
    let answer = get(address, "POST /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("\r\nallow: GET, HEAD\r\n"), "{answer}");
}

#[test]
fn who_is_silent_or_slow_delays_nobody_and_a_crowd_makes_room() {
    let address = start(|| Ok(Status::default()));
    let open = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HT").unwrap();
        stream
    };
    let silent: Vec<_> = (0..MOST + 20).map(open).collect();
    let answer = get(address, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    // Each of them is cut in the end.
    for mut stream in silent {
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

#[test]
fn a_daemon_that_is_silent_holds_up_no_other_page() {
    let (go, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let address = start(move || {
        let _ = wait.lock().unwrap().recv();
        Ok(Status::default())
    });
    let scrape = std::thread::spawn(move || get(address, "GET /metrics HTTP/1.1\r\n\r\n"));
    assert!(get(address, "GET / HTTP/1.1\r\n\r\n").contains("Version 1.2.3"));
    drop(go);
    assert!(scrape.join().unwrap().starts_with("HTTP/1.1 200 "));
}
