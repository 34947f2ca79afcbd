//! Introductions that are refused, and what the agent and `status` are told.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use kmem::PAGE_SIZE;
use kmem::seqpacket::Listener;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wire::recycle::Pool;
use wire::{OLDEST, SEGMENT_PAGES, VERSION};

use super::*;
use crate::client::scanning::tests::client;
use crate::config::Config;
use crate::config::bounds::HANDSHAKES_OF_USER;
use crate::users::{Received, lingering};
use crate::world::state_file::{STATE_FILE, StateFile};

/// A daemon whose service thread is the test.
struct Daemon {
    directory: tempfile::TempDir,
    service: Service,
    _gone: Receiver<Arc<Client>>,
}

impl Daemon {
    fn new(config: Config) -> Self {
        Self::after(config, "")
    }

    /// Earlier daemons of the directory have noted these segments.
    fn after(config: Config, segments: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(STATE_FILE), segments).unwrap();
        let listener = Listener::bind(&directory.path().join("agent.sock"), 0o666).unwrap();
        let shared = Arc::new(Shared::new(config, StateFile::load(directory.path()).unwrap()));
        let [wake, news] = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let (reaper, _gone) = std::sync::mpsc::channel();
        Self {
            directory,
            service: Service::new(shared, Arc::default(), listener, [wake.into(), news.into()], reaper).unwrap(),
            _gone,
        }
    }

    /// An agent connects.
    fn connect(&mut self) -> Conn {
        let conn = Conn::connect(&self.directory.path().join("agent.sock")).unwrap();
        self.service.accept();
        conn
    }

    /// Takes all that the agent that came last has said.
    fn serve(&mut self) {
        while self.service.shake_hands(self.service.next_handshake) {}
    }

    fn user(&self) -> Arc<User> {
        self.service.shared.users.user(rustix::process::geteuid().as_raw())
    }

    /// Why an agent of this process was refused last.
    fn refusal(&self) -> String {
        self.user().refused().pop().map_or_else(String::new, |refused| refused.reason)
    }
}

fn hello(version: u16) -> ToDaemon {
    ToDaemon::Hello { version, domain: None, name: "test".into(), forks: 0 }
}

fn say(agent: &Conn, message: &ToDaemon) {
    agent.send(&wire::encode(message), &[]).unwrap();
}

/// What the daemon says next.
fn hear(agent: &Conn) -> ToAgent {
    let mut packet = vec![0; wire::MAX_MESSAGE];
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match agent.recv(&mut packet, &mut Vec::new()).unwrap() {
            Some(len) => return wire::decode_to_agent(&packet[..len]).unwrap(),
            None => assert!(Instant::now() < deadline, "the daemon says nothing"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An agent introduces itself up to the last message, which names no place where it maps the
/// control page.
fn introduce_oneself(daemon: &mut Daemon) -> Conn {
    let agent = daemon.connect();
    [hello(VERSION), ToDaemon::Ready].iter().for_each(|message| say(&agent, message));
    daemon.serve();
    assert!(matches!(hear(&agent), ToAgent::Welcome { .. }));
    agent
}

/// The reason why an agent is no client.
fn refusal_of(daemon: &mut Daemon, agent: &Conn) -> String {
    say(agent, &ToDaemon::Mapped { address: 0 });
    daemon.serve();
    let ToAgent::Refused { reason } = hear(agent) else { panic!("it is not refused") };
    reason
}

#[test]
fn an_introduction_against_the_rules_is_refused_with_the_rule() {
    let (old, _map) = memfd::create_sealed("old", SEGMENT_PAGES as usize * PAGE_SIZE).unwrap();
    let segment = memfd::identity(&old).unwrap().ino;
    let held = || (wire::encode(&ToDaemon::SegmentHeld { segment }), true);
    let plain = |message: ToDaemon| (wire::encode(&message), false);
    let pool = || plain(ToDaemon::Pool(Pool { extents: Vec::new(), period_ms: 0 }));
    let region = |pages: u64| ToDaemon::RegionAdded { region: RegionId(1), start: 4096, len: pages * PAGE_SIZE as u64 };
    let cases = [
        (vec![plain(ToDaemon::Ready)], "it spoke before it said hello"),
        (vec![plain(hello(VERSION)); 2], "it said hello twice"),
        (vec![plain(hello(VERSION)), held(), held()], "it holds segment"),
        (vec![plain(hello(VERSION)), (held().0, false)], "a segment came without its descriptor"),
        (vec![plain(hello(VERSION)), plain(ToDaemon::Mapped { address: 0 })], "it spoke of a control page that it"),
        (vec![plain(hello(VERSION)), plain(ToDaemon::Ready), plain(ToDaemon::Ready)], "it said twice that it is ready"),
        (vec![plain(hello(VERSION)), pool()], "it spoke of a pool before it was ready"),
        (vec![plain(hello(VERSION)), plain(region(1 << 30))], "would announce"),
        (vec![(vec![0xff; 9], false)], "a packet of 9 bytes is no message of protocol"),
        (vec![plain(hello(VERSION)), plain(region(0))], "a message breaks the protocol"),
        (vec![plain(hello(OLDEST)), plain(ToDaemon::CpuTime { cpu_ns: 3 })], "on a connection that speaks"),
        (vec![plain(hello(OLDEST - 1))], "start the program again, so that it loads this version's agent"),
    ];
    for (messages, expected) in cases {
        let config = Config { user_memory: 0.001, ..Config::default() };
        let mut daemon = Daemon::after(config, &format!("{segment} uid-0\n"));
        let agent = daemon.connect();
        for (packet, brings_segment) in &messages {
            let fds: &[_] = if *brings_segment { &[old.as_fd()] } else { &[] };
            agent.send(packet, fds).unwrap();
        }
        daemon.serve();
        let why = daemon.refusal();
        assert!(why.starts_with("connection closed: ") && why.contains(expected), "{expected}: {why}");
        assert!(daemon.service.handshakes.is_empty());
    }
}

#[test]
fn a_segment_is_taken_from_anybody_if_nobody_can_change_it() {
    let len = SEGMENT_PAGES as usize * PAGE_SIZE;
    let nothing = |_: &OwnedFd| Ok::<(), memfd::MemfdError>(());
    let whole = memfd::create_written("pageone:snapshot", len, nothing).unwrap();
    let short = memfd::create_written("pageone:snapshot", len / 2, nothing).unwrap();
    let (writable, _map) = memfd::create_sealed("pageone:snapshot", len).unwrap();
    for (fd, is_taken) in [(whole, true), (short, false), (writable, false)] {
        let mut daemon = Daemon::new(Config::default());
        let agent = daemon.connect();
        say(&agent, &hello(VERSION));
        let segment = memfd::identity(&fd).unwrap().ino;
        agent.send(&wire::encode(&ToDaemon::SegmentHeld { segment }), &[fd.as_fd()]).unwrap();
        daemon.serve();
        let held = &daemon.service.handshakes.values().next().unwrap().segments;
        assert_eq!(matches!(held.get(&segment), Some(Held::Snapshot(..))), is_taken);
        assert_eq!(matches!(held.get(&segment), Some(Held::Unknown(_))), !is_taken, "the agent is to close it");
        assert_eq!(daemon.user().taken(Kind::Segments), 1);
    }
}

#[test]
fn a_user_has_so_many_connections_that_say_nothing() {
    // Both ends of each are here.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let mut daemon = Daemon::new(Config::default());
    let _silent: Vec<_> = (0..HANDSHAKES_OF_USER).map(|_| daemon.connect()).collect();
    assert_eq!(daemon.refusal(), "");
    let _one_more = daemon.connect();
    assert!(daemon.refusal().contains("wait to introduce themselves"), "{}", daemon.refusal());
}

#[test]
fn an_agent_that_does_not_wait_for_its_control_page_is_no_client() {
    let mut daemon = Daemon::new(Config::default());
    let agent = daemon.connect();
    [hello(VERSION), ToDaemon::Ready].iter().for_each(|message| say(&agent, message));
    drop(agent);
    daemon.serve();
    assert!(daemon.refusal().starts_with("its control page cannot be sent: "), "{}", daemon.refusal());
}

#[test]
fn a_daemon_that_is_full_says_so() {
    let mut daemon = Daemon::new(Config { user_clients: 0, ..Config::default() });
    let agent = introduce_oneself(&mut daemon);
    let why = refusal_of(&mut daemon, &agent);
    assert!(why.contains("has 0 clients, and may not have more"), "{why}");

    let mut daemon = Daemon::new(Config::default());
    let agent = introduce_oneself(&mut daemon);
    let owner = daemon.user().owner;
    let under_way = vec![daemon.service.admissions.by_user.entry(owner).or_default().under_way.clone(); MAX_ADMISSIONS];
    say(&agent, &ToDaemon::Mapped { address: 0 });
    daemon.serve();
    let next = introduce_oneself(&mut daemon);
    say(&next, &ToDaemon::Mapped { address: 0 });
    daemon.serve();
    let waiting = &mut daemon.service.admissions.by_user.get_mut(&owner).unwrap().waiting;
    assert_eq!(waiting.len(), 2, "they wait");
    waiting.front_mut().unwrap().0.since = Instant::now().checked_sub(HANDSHAKE_TIME).unwrap();
    daemon.service.expire_handshakes();
    let ToAgent::Refused { reason } = hear(&agent) else { panic!("it is not refused") };
    assert!(reason.contains("16 other new clients of this user"), "{reason}");
    drop(under_way);
    daemon.service.take_admitted();
    let ToAgent::Refused { reason } = hear(&next) else { panic!("it is not refused") };
    assert!(!reason.contains("other new clients"), "its turn has come: {reason}");

    let agent = introduce_oneself(&mut daemon);
    daemon.service.shared.fill(&Arc::new(client().0));
    let why = refusal_of(&mut daemon, &agent);
    assert_eq!(
        why,
        format!(
            "there are {MAX_CLIENTS} clients, and there can be no more: start further ones under \
                             a second daemon with a directory of its own (--dir)"
        )
    );
}

#[test]
fn descriptors_that_cannot_be_closed_end_the_connections_of_their_user() {
    let mut daemon = Daemon::new(Config::default());
    let user = daemon.user();
    let (fd, other_end) = lingering();
    user.close(vec![fd]);
    user.wait_for_closer();
    while let Some(mut received) = Received::of(&user) {
        received.fds.push(std::fs::File::open("/dev/null").unwrap().into());
    }
    let agent = daemon.connect();
    say(&agent, &hello(VERSION));
    daemon.serve();
    assert!(daemon.refusal().contains("descriptors without a request"), "{}", daemon.refusal());
    drop(other_end);
}

#[test]
fn a_daemon_without_descriptors_says_that_it_cannot_watch_a_process() {
    crate::testing::alone(|| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut daemon = Daemon::new(Config::default());
        let agent = introduce_oneself(&mut daemon);
        let limit = getrlimit(Resource::Nofile);
        let _next = Conn::connect(&daemon.directory.path().join("agent.sock")).unwrap();
        // What is open stays open.
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(0), ..limit }).unwrap();
        let why = refusal_of(&mut daemon, &agent);
        daemon.service.accept();
        setrlimit(Resource::Nofile, limit).unwrap();
        assert!(
            daemon.service.handshakes.is_empty() && daemon.service.accepting.rests.is_some(),
            "it would go round and round"
        );
        daemon.service.accept();
        assert_eq!(daemon.service.handshakes.len(), 1, "the connection has waited");
        assert!(why.starts_with("its process can't be watched: "), "{why}");
    });
}

/// An agent that is this process becomes a client.
fn become_client(daemon: &mut Daemon) -> (Arc<Client>, Conn, SharedMap) {
    let agent = daemon.connect();
    [hello(VERSION), ToDaemon::Ready].iter().for_each(|message| say(&agent, message));
    daemon.serve();
    let (mut packet, mut fds) = (vec![0; wire::MAX_MESSAGE], Vec::new());
    agent.recv(&mut packet, &mut fds).unwrap();
    let control = memfd::map_shared(&fds[0], wire::control::LEN).unwrap();
    say(&agent, &ToDaemon::Mapped { address: control.range().start as u64 });
    daemon.serve();
    let Admitted { client, .. } = daemon.service.admissions.done.1.recv().unwrap();
    daemon.service.shared.add_client(&client);
    (client, agent, control)
}

#[test]
fn a_process_that_connects_again_and_again_has_a_tenth_of_a_cpu() {
    let mut daemon = Daemon::new(Config::default());
    let (first, ..) = become_client(&mut daemon);
    let (time, begin) = (Duration::from_millis(50), Instant::now());
    first.took(time);
    let (_second, ..) = become_client(&mut daemon);
    assert!(begin.elapsed() >= 9 * time, "it was looked at before");
    // Several connections wait for each other, or are closed.
    let begin = Instant::now();
    first.took(time);
    let wait = || first.wait_to_return().then(|| begin.elapsed());
    let waits: Vec<_> = std::thread::scope(|scope| {
        let waits = [(); 5].map(|()| scope.spawn(wait));
        waits.into_iter().filter_map(|wait| wait.join().unwrap()).collect()
    });
    let longest = waits.iter().max().unwrap();
    assert!(*longest >= 9 * time * waits.len() as u32, "{waits:?}");
}
