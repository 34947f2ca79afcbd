//! The exporter: connections that say nothing, requests without end, answers that nobody reads.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::{Command, Stdio};
use std::time::Duration;

use e2e::program;

use super::processes::{become_user, die_with_parent, fork, reap_all};
use super::{Host, Random};

/// The name of the attack: it is root's process at first, which alone is told of all clients.
pub(super) const NAME: &str = "exporter";
/// Processes that flood it.
const FLOODS: usize = 3;
/// Connections that one of them keeps.
const KEPT: usize = 300;

/// Starts an exporter of the daemon, as the service does, and floods it.
pub(super) fn flood(host: &Host, mut random: Random) {
    let directory = host.control.parent().unwrap();
    let mut command = Command::new(program("pageone"));
    command.arg("--dir").arg(directory).args(["metrics", "--listen", "127.0.0.1:0", "--names"]);
    let parent = std::process::id();
    // SAFETY: two system calls, in a child of a program with one thread. A parent that has ended
    // before the first would leave an exporter that nobody ends.
    unsafe {
        command.pre_exec(move || {
            die_with_parent();
            if parent_id() == parent { Ok(()) } else { Err(std::io::ErrorKind::BrokenPipe.into()) }
        });
    }
    let mut exporter = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(exporter.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().trim_end_matches("/metrics").rsplit('/').next().unwrap();
    for _ in 0..FLOODS {
        let random = Random::new(random.below(u64::MAX));
        fork(|| {
            become_user(host.uid);
            ask(host, address, random);
        });
    }
    reap_all();
    let _ = exporter.wait();
}

fn ask(host: &Host, address: &str, mut random: Random) {
    let mut kept: Vec<TcpStream> = Vec::new();
    loop {
        let Ok(mut stream) = TcpStream::connect(address) else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        host.step();
        let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
        match random.below(5) {
            0 => drop(stream.write_all(b"GET /metrics HTTP/1.1\r\n")),
            1 => drop(stream.write_all(&[b'x'; 64 << 10])),
            // Nobody reads this answer.
            2 => drop(stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")),
            3 => {
                let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nAuthorization: Basic YTpi\r\n\r\n");
                let _ = stream.read_to_end(&mut Vec::new());
                continue;
            }
            _ => {}
        }
        kept.push(stream);
        if kept.len() >= KEPT {
            kept.drain(..KEPT / 2);
        }
    }
}
