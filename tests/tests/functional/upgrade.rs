//! Daemons and agents of different builds: which version of the protocol they speak, and what
//! becomes of guests.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use e2e::{Daemon, Guest, eventually, program, skipped};
use kmem::memfd::SharedMap;
use kmem::range::Range;
use kmem::seqpacket::Conn;
use kmem::uffd::{Features, Uffd};
use serde_json::Value;
use wire::{MergeRun, OLDEST, Outcome, RegionId, Report, RunOutcome, ToAgent, ToDaemon, VERSION};

const PAGE: usize = kmem::PAGE_SIZE;
const PAGES: usize = 512;

/// An agent of any version that speaks for this process.
struct Raw(Conn);

impl Raw {
    fn hello(daemon: &Daemon, version: u16) -> Self {
        let raw = Self(Conn::connect(&daemon.dir.path().join("agent.sock")).unwrap());
        raw.say(&ToDaemon::Hello { version, domain: None, name: "raw".into(), forks: 0 });
        raw
    }

    fn say(&self, message: &ToDaemon) {
        self.0.send(&wire::encode(message), &[]).unwrap();
    }

    /// The next message; `None`: the daemon has hung up.
    fn hear(&self) -> Option<(ToAgent, Vec<OwnedFd>)> {
        let (mut packet, mut fds) = (vec![0; wire::MAX_MESSAGE], Vec::new());
        let len = eventually("a message", Duration::from_secs(20), || match self.0.recv(&mut packet, &mut fds) {
            Ok(len) => len,
            Err(_) => Some(0),
        });
        (len > 0).then(|| (wire::decode_to_agent(&packet[..len]).unwrap(), fds))
    }

    /// Ends the handshake; gives the version that the daemon chose.
    fn become_client(&self) -> (u16, SharedMap) {
        self.say(&ToDaemon::Ready);
        let Some((ToAgent::Welcome { version, .. }, fds)) = self.hear() else { panic!("no welcome") };
        let control = kmem::memfd::map_shared(&fds[0], wire::control::LEN).unwrap();
        self.say(&ToDaemon::Mapped { address: control.range().start as u64 });
        (version, control)
    }
}

fn own(daemon: &Daemon) -> Option<Value> {
    daemon.client(std::process::id() as i32)
}

/// Pages of zeros that are registered as a client's.
fn zeros() -> (Vec<u8>, Uffd, usize) {
    let memory = vec![0x55u8; (PAGES + 1) * PAGE];
    let start = memory.as_ptr().addr().next_multiple_of(PAGE);
    let skipped = start - memory.as_ptr().addr();
    let mut memory = memory;
    memory[skipped..][..PAGES * PAGE].fill(0);
    let uffd = Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED).unwrap();
    uffd.register_wp(Range::new(start, PAGES * PAGE)).unwrap();
    (memory, uffd, start)
}

#[test]
fn an_agent_of_the_version_before_merges() {
    let daemon = Daemon::start();
    let (_memory, _uffd, start) = zeros();
    let raw = Raw::hello(&daemon, OLDEST);
    raw.say(&ToDaemon::RegionAdded { region: RegionId(1), start: start as u64, len: (PAGES * PAGE) as u64 });
    let (version, _control) = raw.become_client();
    assert_eq!(version, OLDEST);
    let mut done = 0;
    while done < PAGES {
        match raw.hear().expect("the connection lasts").0 {
            ToAgent::Merge(merge) => {
                let outcome = |merge: &MergeRun| RunOutcome { run: merge.run, outcome: Outcome::Merged };
                done += merge.runs.iter().map(|merge| merge.run.len as usize).sum::<usize>();
                let outcomes = merge.runs.iter().map(outcome).collect();
                raw.say(&ToDaemon::Report(Report { batch: merge.batch, last: true, outcomes, ..Report::default() }));
            }
            other => panic!("{other:?}"),
        }
    }
    let client = eventually("all pages count", Duration::from_secs(10), || {
        own(&daemon).filter(|client| client["pages_zero"].as_u64() == Some(PAGES as u64))
    });
    let outdated = client["outdated"].as_str().unwrap();
    assert!(
        outdated.contains(&format!("it speaks protocol {OLDEST}, and this daemon {OLDEST} and {VERSION}")),
        "{outdated}"
    );
    // A later version's message is none of this connection's.
    raw.say(&ToDaemon::CpuTime { cpu_ns: 3 });
    while raw.hear().is_some() {}
}

#[test]
fn an_agent_of_the_next_version_is_welcomed_in_this_one() {
    let daemon = Daemon::start();
    for said in [VERSION, VERSION + 1] {
        let raw = Raw::hello(&daemon, said);
        let (version, _control) = raw.become_client();
        assert_eq!(version, VERSION);
        raw.say(&ToDaemon::Library { version: "0.0.9\u{1b}".into() });
        let how = || own(&daemon)?["outdated"].as_str().map(str::to_owned);
        let how = eventually("its build is known", Duration::from_secs(10), how);
        assert!(how.starts_with("it is of version 0.0.9"), "{how}");
    }
    let text = String::from_utf8(daemon.pageone(&["status"]).output().unwrap().stdout).unwrap();
    assert!(text.contains("its agent is of another build: it is of version 0.0.9, and"), "{text}");
}

#[test]
fn versions_too_far_apart_are_refused_with_the_remedy_in_both_logs() {
    let daemon = Daemon::start();
    for (said, remedy) in [(OLDEST - 1, "start the program again"), (VERSION + 2, "upgrade the daemon")] {
        let raw = Raw::hello(&daemon, said);
        let Some((ToAgent::Refused { reason }, _)) = raw.hear() else { panic!("{said} is not refused") };
        assert!(reason.contains(remedy) && reason.contains(&format!("{OLDEST} and {VERSION}")), "{reason}");
        assert!(raw.hear().is_none(), "the connection ends");
        let known = || {
            let status = daemon.status();
            let mut refused = status["refused"].as_array()?.iter();
            refused.find(|refused| refused["reason"].as_str().is_some_and(|said| said.contains(&reason))).map(drop)
        };
        eventually("status says why", Duration::from_secs(10), known);
        assert!(std::fs::read_to_string(daemon.dir.path().join("log")).unwrap().contains(&reason));
    }
}

/// A guest whose agent is of the build in this directory.
fn guest(daemon: &Daemon, words: &[String], build: &std::path::Path) -> Guest {
    let mut command = daemon.run(&[]);
    command.args(words).env("PAGEONE_AGENT", build.join("libpageone_agent.so"));
    Guest::start(command)
}

fn merged(daemon: &Daemon, guest: &Guest) -> u64 {
    let client = daemon.client(guest.pid()).unwrap_or_default();
    client["pages_merged"].as_u64().unwrap_or(0) + client["pages_zero"].as_u64().unwrap_or(0)
}

/// `PAGEONE_BEFORE` names a directory with `pageone` and `libpageone_agent.so` of the build before
/// (`make test-upgrade`).
#[test]
#[ignore = "needs the build before: make test-upgrade"]
fn a_daemon_is_exchanged_under_guests_in_both_directions() {
    const MOST: u64 = 12_000;
    let before = PathBuf::from(std::env::var_os("PAGEONE_BEFORE").expect("PAGEONE_BEFORE"));
    let this = program("pageone").parent().unwrap().to_path_buf();
    let words = match Guest::words(192) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let mut daemon = Daemon::with(&["--merge-period", "1"]);
    let mut guests = vec![];
    // Each step: the daemon's build, and that of the agent of another guest.
    for (step, (theirs, agent)) in
        [(&before, &before), (&before, &this), (&this, &this), (&before, &this), (&this, &before)]
            .into_iter()
            .enumerate()
    {
        let had: Vec<u64> = guests.iter().map(|guest| merged(&daemon, guest)).collect();
        if step % 2 == 0 {
            daemon.kill();
        } else {
            daemon.stop();
        }
        daemon.restart_from(theirs.join("pageone"));
        for (guest, had) in guests.iter().zip(had) {
            eventually("what was merged is known again", Duration::from_secs(60), || {
                (merged(&daemon, guest) > had * 9 / 10).then_some(())
            });
        }
        guests.push(guest(&daemon, &words, agent));
        for guest in &mut guests {
            guest.pass_rounds(1);
        }
        // Alone, a guest has not enough that is equal.
        for guest in guests.iter().filter(|_| step > 0) {
            eventually("merging goes on", Duration::from_secs(180), || (merged(&daemon, guest) > MOST).then_some(()));
        }
        let counts: Vec<_> = guests.iter().map(|guest| merged(&daemon, guest)).collect();
        let outdated: Vec<_> =
            guests.iter().map(|guest| daemon.client(guest.pid()).unwrap_or_default()["outdated"].clone()).collect();
        println!("step {step}: daemon of {}; merged {counts:?}; {outdated:?}", theirs.display());
        if theirs == &this {
            assert!(outdated[0].as_str().is_some_and(|how| how.contains("speaks protocol")), "{outdated:?}");
            assert!(outdated[1].is_null(), "{outdated:?}");
        }
    }
    for guest in &mut guests {
        guest.pass_rounds(1);
    }
}
