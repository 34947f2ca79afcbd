//! The soak: guests under load while daemons are killed, guests come and go, and an oracle counts
//! every write.
//!
//! `PAGEONE_SOAK_SECONDS` says how long; without it the test is skipped (`make soak`: 1800, in CI:
//! 120).

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use e2e::{Client, Daemon, Guest, eventually, skipped};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

const WRITER_SECONDS: u64 = 20;

fn writer(daemon: &Daemon) -> (Client, Instant) {
    let mut client = daemon.scenario(&["writers", "16384", &WRITER_SECONDS.to_string()]);
    client.expect("ready");
    client.tell("go");
    (client, Instant::now())
}

fn sharing(daemon: &Daemon) -> u64 {
    daemon.try_status().and_then(|status| status["pages_sharing"].as_u64()).unwrap_or(0)
}

/// Waits until much is merged, or was, as long as it becomes more: on a slow machine no daemon may
/// have lived long enough. Returns the most `pages_sharing`.
fn much_is_merged(daemon: &Daemon, mut most: u64) -> u64 {
    let mut now = 0;
    while most <= 20_000 {
        now = eventually("more is merged", Duration::from_secs(180), || {
            let more = sharing(daemon);
            (more > now).then_some(more)
        });
        most = most.max(now);
    }
    most
}

/// No mapping and no frame is left over.
fn nothing_leaked(daemon: &Daemon, mut guests: Vec<Guest>) {
    // No mapping leaked: a guest that is detached has about as many as one that was never merged,
    // and one for each stretch that was unmerged, in one step, while it ran. That is hundreds; what
    // leaked for each merged page would be tens of thousands.
    let detached = guests.pop().unwrap();
    eventually("the guest is a client again", Duration::from_secs(60), || daemon.client(detached.pid()));
    let out = daemon.pageone(&["detach", &detached.pid().to_string()]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // The page that it shared with the daemon goes when the connection has ended.
    let maps = eventually("no store is mapped", Duration::from_secs(60), || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", detached.pid())).unwrap();
        (!maps.contains("memfd:pageone:")).then_some(maps)
    });
    let count = maps.lines().count();
    println!("{count} mappings after detaching");
    assert!(count < 2000, "{count} mappings; a guest that was never merged has some 330");
    // No frame leaked: with the last guest the store is empty.
    drop(detached);
    guests.clear();
    eventually("the store is empty", Duration::from_secs(60), || {
        let status = daemon.try_status()?;
        status["domains"].as_array()?.iter().all(|d| d["segments"] == 0).then_some(())
    });
}

#[test]
fn guests_survive_everything() {
    let Ok(seconds) = std::env::var("PAGEONE_SOAK_SECONDS") else {
        return skipped("PAGEONE_SOAK_SECONDS is not set");
    };
    let seconds: u64 = seconds.parse().unwrap();
    let words = match Guest::words(192) {
        Err(why) => return skipped(&why),
        Ok(words) => words,
    };
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut daemon = Daemon::with(&["--merge-period", "2"]);
    let start_guest = |daemon: &Daemon| {
        let mut command = daemon.run(&[]);
        command.args(&words);
        Guest::start(command)
    };
    let mut guests = vec![start_guest(&daemon), start_guest(&daemon)];
    let (mut client, mut since) = writer(&daemon);
    let (mut kills, mut rounds, mut ended, mut most_merged) = (0u32, 0usize, 0, 0);
    // Often enough for twenty kills in two minutes.
    let pause = (seconds * 1000 / 30).min(30_000);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end || kills < 20 {
        std::thread::sleep(Duration::from_millis(pause / 2 + random.below(pause)));
        most_merged = most_merged.max(sharing(&daemon));
        daemon.kill();
        kills += 1;
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        let _: usize = guests.iter_mut().map(Guest::rounds).sum();
        daemon.restart();
        match random.below(4) {
            0 if guests.len() < 4 => guests.push(start_guest(&daemon)),
            1 if guests.len() > 2 => {
                let at = random.below(guests.len() as u64) as usize;
                rounds += guests[at].rounds();
                guests.swap_remove(at).kill();
                ended += 1;
            }
            _ => {}
        }
        if since.elapsed() > Duration::from_secs(WRITER_SECONDS + 5) {
            client.hear();
            client.expect("ok");
            (client, since) = writer(&daemon);
        }
    }
    client.hear();
    client.expect("ok");
    drop(client);
    let most_merged = much_is_merged(&daemon, most_merged);
    guests.iter_mut().for_each(|g| g.pass_rounds(1));
    rounds += guests.iter_mut().map(Guest::rounds).sum::<usize>();
    println!(
        "{kills} daemons killed, {ended} guests ended, {rounds} rounds passed, {most_merged} pages_sharing at most"
    );
    nothing_leaked(&daemon, guests);
    assert_eq!(daemon.stop(), Some(0));
}
