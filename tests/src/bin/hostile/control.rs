//! The control socket: connections without end, requests without end, other users' clients.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::memory::{PAGE, map};
use super::peer::Peer;
use super::processes::{fork, wait_for};
use super::{Host, Random};

/// Connections to keep: what one process may open.
const MANY: usize = 900;

fn ask(host: &Host, request: &str) -> Option<String> {
    let mut stream = UnixStream::connect(&host.control).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = vec![0; 4096];
    let len = stream.read(&mut answer).ok()?;
    Some(String::from_utf8_lossy(&answer[..len]).into_owned())
}

/// Connections that ask nothing; others take the place of those that the daemon ends.
pub(super) fn silent(host: &Host, _: Random) {
    let mut kept: Vec<UnixStream> = Vec::new();
    loop {
        if let Ok(stream) = UnixStream::connect(&host.control) {
            host.step();
            let _ = stream.set_nonblocking(true);
            kept.push(stream);
        }
        if kept.len() >= MANY {
            kept.retain_mut(|stream| !matches!(stream.read(&mut [0]), Ok(0)));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Requests that arrive byte by byte: each byte is in time.
pub(super) fn trickle(host: &Host, _: Random) {
    let mut kept: Vec<UnixStream> = Vec::new();
    loop {
        kept.retain_mut(|stream| stream.write_all(b" ").is_ok());
        while kept.len() < MANY {
            let Ok(stream) = UnixStream::connect(&host.control) else { break };
            host.step();
            kept.push(stream);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Requests at a rate, answers that nobody reads, lines that are no requests.
pub(super) fn requests(host: &Host, mut random: Random) {
    let _peer = Peer::client(host, &[(map(64 * PAGE), 64 * PAGE)]);
    let own = std::process::id();
    loop {
        let request = match random.below(6) {
            0 | 1 => "\"status\"\n".to_string(),
            2 => "{\"dirty\":[]}\n".into(),
            3 => format!("{{\"dirty\":[{}]}}\n", vec![own.to_string(); 600].join(",")),
            4 => "[".repeat(4000),
            _ => {
                // Nobody reads this answer.
                if let Ok(mut stream) = UnixStream::connect(&host.control) {
                    let _ = stream.write_all(b"\"status\"\n");
                }
                continue;
            }
        };
        ask(host, &request);
        host.step();
    }
}

/// Detaches, freezes and watches every process that there is.
pub(super) fn others(host: &Host, _: Random) {
    let processes = || std::fs::read_dir("/proc").into_iter().flatten().flatten();
    loop {
        for pid in processes().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
            for request in ["detach", "hold", "map"].map(|word| format!("{{\"{word}\":{pid}}}\n")) {
                ask(host, &request);
            }
            ask(host, &format!("{{\"dirty\":[{pid}]}}\n"));
            host.step();
        }
    }
}

/// Freezes processes of its own, which end while the connections stay: their numbers will be those
/// of other programs.
pub(super) fn freezes(host: &Host, _: Random) {
    let mut kept = Vec::new();
    loop {
        let (mut ready, mut done) = std::io::pipe().unwrap();
        let (mut end, go) = std::io::pipe().unwrap();
        let child = fork(|| {
            let _peer = Peer::client(host, &[(map(PAGE), PAGE)]);
            std::thread::sleep(Duration::from_millis(20));
            let _ = done.write_all(b"r");
            let _ = end.read(&mut [0]);
        });
        let _ = ready.read(&mut [0]);
        if let Ok(mut stream) = UnixStream::connect(&host.control) {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(format!("{{\"hold\":{child}}}\n").as_bytes());
            let _ = stream.read(&mut [0]);
            kept.push(stream);
        }
        let mut go = go;
        let _ = go.write_all(b"e");
        wait_for(child);
        host.step();
        if kept.len() >= MANY {
            kept.clear();
        }
    }
}
