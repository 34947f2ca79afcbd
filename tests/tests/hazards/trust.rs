//! Clients that see more than they may, and peers that lie.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use e2e::{Client, Daemon, eventually, program};

#[test]
fn a_client_of_one_domain_sees_nothing_of_another() {
    let daemon = Daemon::start();
    let mut one = daemon.scenario_with(&["--domain", "one"], &["hold", "4096", "1", "6"], &[]);
    let mut two = daemon.scenario_with(&["--domain", "two"], &["hold", "4096", "1", "6"], &[]);
    one.expect("ready");
    two.expect("ready");
    eventually("both are looked at", Duration::from_secs(20), || {
        let looked = |pid| Some(daemon.client(pid)?["pages_unshared"] == 4096);
        (looked(one.pid())? && looked(two.pid())?).then_some(())
    });
    assert_eq!(daemon.status()["pages_shared"], 0, "the same content in two domains is not shared");
    one.go();
    two.go();
}

/// Goes on in this thread as this user, without capabilities.
fn as_a_client(user: rustix::fs::Uid, act: impl FnOnce()) {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_uid};
    if rustix::process::geteuid().is_root() {
        set_thread_res_uid(user, user, user).unwrap();
        let mut sets = capabilities(None).unwrap();
        (sets.effective, sets.permitted) = (CapabilitySet::empty(), CapabilitySet::empty());
        set_capabilities(None, sets).unwrap();
    }
    act();
}

/// Tries to change a store of which one has a descriptor. Where the store is sealed it can be
/// opened for writing, and not be written.
fn try_to_change(file: &std::fs::File) {
    use rustix::fs::{FallocateFlags, Mode, OFlags};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    let _ = rustix::fs::fchmod(file, Mode::from_raw_mode(0o666));
    assert!(rustix::fs::fchown(file, Some(rustix::process::getuid()), None).is_err(), "taken");
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let again = [OFlags::RDWR, OFlags::WRONLY].map(|flags| rustix::fs::open(&path, flags, Mode::empty()));
    let again = again.into_iter().flatten().map(std::fs::File::from);
    for file in again.chain([file.try_clone().unwrap()]) {
        assert!(file.write_at(b"evil", 0).is_err(), "written");
        assert!(file.set_len(0).is_err(), "truncated");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&file, punch, 0, 2 << 20).is_err(), "punched");
        assert!(kmem::memfd::map_shared(&file, 4096).is_err(), "mapped for writing");
    }
}

#[test]
fn a_client_cannot_write_its_store() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "4096", "4", "6"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4096);
    let mut tried = 0;
    for entry in std::fs::read_dir(format!("/proc/{}/fd", client.pid())).unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().contains("memfd:pageone:") || target.to_string_lossy().contains("control") {
            continue;
        }
        tried += 1;
        // The client's own descriptor, then what it can make of it, as its user and as another.
        let file = std::fs::File::from(client.descriptor(entry.file_name().to_string_lossy().parse().unwrap()));
        let flags = rustix::fs::fcntl_getfl(&file).unwrap();
        assert!(kmem::memfd::require_kept(&file).is_ok(), "its owner is no user, or it is sealed");
        assert_eq!(flags & rustix::fs::OFlags::RWMODE, rustix::fs::OFlags::RDONLY);
        for user in [rustix::process::getuid(), rustix::fs::Uid::from_raw(4321)] {
            std::thread::scope(|scope| scope.spawn(|| as_a_client(user, || try_to_change(&file))).join()).unwrap();
        }
    }
    assert!(tried > 0, "the client holds its store");
    client.go();
}

#[test]
fn a_peer_that_talks_nonsense_or_nobody_at_all_leaves_the_program_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let start = |socket: &std::path::Path| {
        let mut command = Command::new(program("pageone-test-client"));
        command
            .args(["hold", "4096", "2"])
            .env("LD_PRELOAD", program("libpageone_agent.so"))
            .env(wire::ENV_SOCKET, socket);
        let mut client = Client::spawn(command);
        client.expect("ready");
        client
    };
    // Nobody.
    let mut client = start(&socket);
    client.go();
    // A listener whose queue is full and that never accepts.
    let listener = kmem::seqpacket::Listener::bind(&socket, 0o600).unwrap();
    let mut held = Vec::new();
    while let Ok(conn) = kmem::seqpacket::Conn::connect(&socket) {
        held.push(conn);
        if held.len() > 5000 {
            break;
        }
    }
    let mut crowded = start(&socket);
    crowded.go();
    drop(held);
    // A peer that answers nonsense to everything.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut answered = 0u32;
            while !stop.load(Relaxed) {
                while let Ok(Some(conn)) = listener.accept() {
                    answered += 1;
                    let nonsense: &[u8] = match answered % 3 {
                        0 => &[0xff; 300],
                        1 => &[],
                        _ => &[4, 1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
                    };
                    let _ = conn.send(nonsense, &[]);
                    std::thread::sleep(Duration::from_millis(10));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(200));
            client.go();
            crowded.go();
        }
        stop.store(true, Relaxed);
    });
}

/// Where a process has a mapping of this many bytes.
fn mapping_of(pid: i32, len: usize) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mut ranges = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-')).map(|(start, end)| {
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        number(start)..number(end)
    });
    ranges.find(|range| range.len() == len).unwrap().start
}

/// An agent that says of its pages that they hold what `other`'s hold. It speaks for this process,
/// until `stop`; `told`: lies so far.
fn lie(socket: &std::path::Path, other: i32, told: &AtomicU64, stop: &AtomicBool) {
    use kmem::uffd::{Features, Uffd};
    use wire::{Digests, MergeRun, Outcome, PageNo, RegionId, Report, RunOutcome, ToAgent, ToDaemon};
    const PAGES: usize = 4096;
    const PAGE: usize = kmem::PAGE_SIZE;
    let theirs = mapping_of(other, PAGES * PAGE);
    let addresses: Vec<usize> = (0..PAGES).map(|page| theirs + page * PAGE).collect();
    let mut content = vec![0; PAGES * PAGE];
    assert_eq!(kmem::procmem::read_pages(other, &addresses, &mut content), Ok(PAGES));

    let mut memory = vec![0u8; (PAGES + 1) * PAGE];
    let start = memory.as_ptr().addr().next_multiple_of(PAGE);
    let skipped = start - memory.as_ptr().addr();
    for (page, number) in memory[skipped..].chunks_exact_mut(PAGE).zip(1u64..) {
        page[..8].copy_from_slice(&number.to_ne_bytes());
    }
    let uffd = Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED).unwrap();
    uffd.register_wp(kmem::range::Range::new(start, PAGES * PAGE)).unwrap();

    let conn = kmem::seqpacket::Conn::connect(socket).unwrap();
    let send = |message: ToDaemon| conn.send(&wire::encode(&message), &[]).unwrap();
    send(ToDaemon::Hello { version: wire::VERSION, domain: None, name: "liar".into(), forks: 0 });
    send(ToDaemon::RegionAdded { region: RegionId(1), start: start as u64, len: (PAGES * PAGE) as u64 });
    send(ToDaemon::Ready);
    let mut packet = vec![0; wire::MAX_MESSAGE];
    let mut pages = Vec::new();
    while !stop.load(Relaxed) {
        let mut fds = Vec::new();
        let len = match conn.recv(&mut packet, &mut fds).unwrap() {
            Some(0) => panic!("the daemon has hung up"),
            Some(len) => len,
            None => {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
        };
        match wire::decode_to_agent(&packet[..len]).unwrap() {
            ToAgent::Welcome { .. } => {
                let page = kmem::memfd::map_shared(&fds[0], wire::control::LEN).unwrap();
                send(ToDaemon::Mapped { address: page.range().start as u64 });
                pages.push(page);
            }
            ToAgent::Digest(asked) => {
                let pages = asked.runs.iter().flat_map(|run| run.pages());
                let digest = |page: PageNo| {
                    let bytes = &content[page.index() * PAGE..][..PAGE];
                    xxhash_rust::xxh3::xxh3_64_with_seed(bytes, asked.seed)
                };
                let digests: Vec<u64> = pages.map(digest).collect();
                let count = digests.len() as u64;
                send(ToDaemon::Digests(Digests { request: asked.request, digests, cpu_ns: 0 }));
                told.fetch_add(count, Relaxed);
            }
            ToAgent::Merge(merge) => {
                // So that what it is said to share stays.
                let merged = |merge: &MergeRun| RunOutcome { run: merge.run, outcome: Outcome::Merged };
                let outcomes = merge.runs.iter().map(merged).collect();
                send(ToDaemon::Report(Report { batch: merge.batch, last: true, outcomes, ..Report::default() }));
            }
            _ => {}
        }
    }
}

/// Ends a thread also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn an_agent_that_lies_about_its_pages_keeps_nobody_from_merging() {
    let daemon = Daemon::start();
    let mut first = daemon.scenario(&["hold", "4096", "1", "5"]);
    first.expect("ready");
    eventually("the first client's pages are known", Duration::from_secs(30), || {
        (daemon.client(first.pid())?["pages_unshared"] == 4096).then_some(())
    });
    let (told, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let socket = daemon.dir.path().join("agent.sock");
    std::thread::scope(|scope| {
        let stop = Stop(&stop);
        let liar = scope.spawn(|| lie(&socket, first.pid(), &told, stop.0));
        eventually("lies are told", Duration::from_secs(30), || (told.load(Relaxed) >= 512).then_some(()));
        std::thread::sleep(Duration::from_secs(1));
        let mut second = daemon.scenario(&["hold", "4096", "1", "5"]);
        second.expect("ready");
        daemon.wait_merged(second.pid(), 4096);
        daemon.wait_merged(first.pid(), 4096);
        second.go();
        drop(stop);
        liar.join().unwrap();
    });
    first.go();
}
