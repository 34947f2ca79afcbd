//! Clients that take more than is theirs: memory, descriptors, time of the daemon's threads.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use e2e::{Daemon, eventually, skipped};
use kmem::memfd::SharedMap;
use kmem::seqpacket::Conn;
use wire::{PageNo, RegionId, Run, ToDaemon};

/// A connection of an agent that says what it likes.
struct Liar(Conn);

impl Liar {
    /// Connects, waiting for room in the daemon's queue. Does not introduce itself.
    fn connect(daemon: &Daemon) -> Self {
        let socket = daemon.dir.path().join("agent.sock");
        Self(eventually("the daemon takes a connection", Duration::from_secs(10), || Conn::connect(&socket).ok()))
    }

    /// Says that all was said, and shows the control page: it is a client afterwards.
    fn become_client(&self) -> SharedMap {
        self.say(&ToDaemon::Ready);
        let mut packet = vec![0; wire::MAX_MESSAGE];
        let mut fds = Vec::new();
        eventually("the daemon's welcome", Duration::from_secs(10), || self.0.recv(&mut packet, &mut fds).unwrap());
        let page = kmem::memfd::map_shared(&fds[0], wire::control::LEN).unwrap();
        self.say(&ToDaemon::Mapped { address: page.range().start as u64 });
        page
    }

    /// Connects, and says hello.
    fn hello(daemon: &Daemon) -> Self {
        let liar = Self::connect(daemon);
        liar.say(&ToDaemon::Hello { version: wire::VERSION, domain: None, name: "liar".into(), forks: 0 });
        liar
    }

    /// Sends a message, waiting for room. `false`: the daemon has closed the connection.
    fn say(&self, message: &ToDaemon) -> bool {
        loop {
            match self.0.send(&wire::encode(message), &[]) {
                Ok(()) => return true,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return false,
            }
        }
    }

    /// Whether the daemon has closed the connection.
    fn is_closed(&self) -> bool {
        let mut packet = vec![0; wire::MAX_MESSAGE];
        loop {
            match self.0.recv(&mut packet, &mut Vec::new()) {
                Ok(Some(0)) | Err(_) => return true,
                Ok(None) => return false,
                Ok(Some(_)) => {}
            }
        }
    }
}

fn region(id: u32, start: u64, pages: u64) -> ToDaemon {
    ToDaemon::RegionAdded { region: RegionId(id), start, len: pages * kmem::PAGE_SIZE as u64 }
}

/// Waits until `status` names a refused client with this in the reason.
fn expect_refusal(daemon: &Daemon, part: &str) {
    let own = std::process::id();
    eventually(&format!("a refusal with {part:?}"), Duration::from_secs(10), || {
        let status = daemon.status();
        let mut refused = status["refused"].as_array().into_iter().flatten();
        let is_ours = |refused: &&serde_json::Value| {
            refused["pid"] == own && refused["reason"].as_str().is_some_and(|reason| reason.contains(part))
        };
        refused.find(is_ours).map(drop)
    });
    let text = String::from_utf8(daemon.pageone(&["status"]).output().unwrap().stdout).unwrap();
    assert!(text.contains(part), "{text}");
}

/// Two clients that merge 16 MiB with each other, from the start, in at most `limit`.
fn merge_within(daemon: &Daemon, limit: Duration) {
    let begin = Instant::now();
    let mut clients: Vec<_> = (0..2).map(|_| daemon.scenario(&["hold", "4096", "1", "5"])).collect();
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 4096));
    let took = begin.elapsed();
    clients.iter_mut().for_each(|client| client.go());
    assert!(took < limit * e2e::patience(), "it took {took:?}");
}

#[test]
fn a_region_that_no_process_can_have_is_refused_with_the_reason() {
    let daemon = Daemon::start();
    let liar = Liar::hello(&daemon);
    // Before the handshake is over already: each of them would be 17 GiB of ledger.
    for id in 0..4000 {
        if !liar.say(&region(id, 1 << 12, u64::from(u32::MAX))) {
            break;
        }
    }
    eventually("the connection is closed", Duration::from_secs(10), || liar.is_closed().then_some(()));
    expect_refusal(&daemon, "user_memory");
    merge_within(&daemon, Duration::from_secs(30));
}

#[test]
fn regions_that_a_process_does_not_map_cost_nothing_and_are_refused() {
    // 64 GiB are within its bounds on a small machine, too.
    let daemon = Daemon::with_config(&["--merge-period", "0.1"], "user_memory = 100000");
    let liar = Liar::hello(&daemon);
    (0..64).for_each(|id| assert!(liar.say(&region(id, u64::from(id + 1) << 40, 1 << 18))));
    let _page = liar.become_client();
    eventually("the connection is closed", Duration::from_secs(30), || liar.is_closed().then_some(()));
    expect_refusal(&daemon, "not among its mappings");
    let resident = kmem::procfs::status(Some(daemon.pid())).unwrap().vm_rss_kib;
    assert!(resident < 256 << 10, "the daemon has {} MiB", resident >> 10);
}

#[test]
fn messages_about_whole_regions_delay_nobody() {
    let daemon = Daemon::with_config(&["--merge-period", "0.1"], "user_memory = 100000");
    let liar = Liar::hello(&daemon);
    let pages = 1 << 31;
    (0..8).for_each(|id| assert!(liar.say(&region(id, u64::from(id + 1) << 43, pages))));
    let page = liar.become_client();
    let own = std::process::id() as i32;
    eventually("it is a client", Duration::from_secs(10), || daemon.client(own));
    // As many as the socket takes.
    let all = Run::new(PageNo(0), pages as u32);
    for id in (0..8).cycle().take(64) {
        let message = ToDaemon::Discarded { region: RegionId(id), run: all };
        let _ = liar.0.send(&wire::encode(&message), &[]);
    }
    merge_within(&daemon, Duration::from_secs(20));
    // It comes anew: all that it had is given back.
    drop((liar, page));
    let liar = Liar::hello(&daemon);
    let _page = liar.become_client();
    eventually("its regions are gone", Duration::from_secs(30), || (daemon.client(own)?["regions"] == 0).then_some(()));
    merge_within(&daemon, Duration::from_secs(20));
}

#[test]
fn connections_that_say_nothing_keep_nobody_out() {
    let daemon = Daemon::start();
    let silent: Vec<Liar> = (0..600).map(|_| Liar::connect(&daemon)).collect();
    expect_refusal(&daemon, "wait to introduce themselves");
    let closed = || silent.iter().filter(|liar| liar.is_closed()).count();
    eventually("a user has 512 at a time", Duration::from_secs(10), || (closed() >= 600 - 512).then_some(()));
    eventually("those that stay silent are ended", Duration::from_secs(30), || (closed() == 600).then_some(()));
    expect_refusal(&daemon, "has not introduced itself");
    merge_within(&daemon, Duration::from_secs(30));
}

#[test]
fn descriptors_that_no_daemon_made_are_not_kept() {
    let daemon = Daemon::start();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let before = open();
    let liar = Liar::hello(&daemon);
    let file = rustix::fs::memfd_create("pageone:forged", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // The connection may end before: they are closed by a thread, which has to keep up.
    'sending: for segment in 0..1000 {
        let message = wire::encode(&ToDaemon::SegmentHeld { segment });
        while let Err(e) = liar.0.send(&message, &[std::os::fd::AsFd::as_fd(&file)]) {
            match e.kind() {
                std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => break 'sending,
                _ => panic!("{e}"),
            }
        }
    }
    eventually("all but a few are closed", Duration::from_secs(60), || (open() <= before + 8).then_some(()));
}

/// Whether all threads of a daemon wait for something.
fn sleeps(daemon: &Daemon) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let state = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
    tasks.flatten().filter_map(state).all(|stat| stat.rsplit(')').next().is_some_and(|state| state.starts_with(" S")))
}

#[test]
fn a_descriptor_that_cannot_be_closed_holds_up_nobody() {
    // Its close waits for the other end, which takes nothing.
    let other_end = match TcpListener::bind("127.0.0.1:0") {
        Ok(socket) => socket,
        // The kernel of `make test-debug-kernel` has no IP.
        Err(e) => return skipped(&format!("no TCP socket here: {e}")),
    };
    let daemon = Daemon::start();
    let mut stream = TcpStream::connect(other_end.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(300))).unwrap();
    // What the daemon closes is to be the last of it.
    let pid = rustix::process::Pid::from_raw(daemon.pid()).unwrap();
    e2e::stop_process(daemon.pid());
    let (sender, unread) = (Liar::hello(&daemon), Liar::connect(&daemon));
    // One is taken with a message that needs none, one is in a message that is never read.
    sender.0.send(&wire::encode(&region(1, 1 << 30, 1)), &[stream.as_fd()]).unwrap();
    unread.0.send(&wire::encode(&region(1, 1 << 30, 1)), &[]).unwrap();
    let _ = unread.0.send(&wire::encode(&region(2, 1 << 30, 1)), &[stream.as_fd()]);
    drop(stream);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    eventually("both were taken", Duration::from_secs(10), || unread.is_closed().then_some(()));
    drop((sender, unread));
    merge_within(&daemon, Duration::from_secs(30));
    // Connections wait behind it to be closed, which are always ready: nobody looks at them.
    eventually("the daemon sleeps", Duration::from_secs(10), || sleeps(&daemon).then_some(()));
    drop(other_end);
}
