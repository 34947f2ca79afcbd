//! A program that does nothing but attack a daemon, as an ordinary user.
//!
//! `pageone-hostile-client DIRECTORY UID SEED ATTACK…` becomes the user and attacks the daemon of
//! this directory until its standard input ends. Then it prints `cpu SECONDS did STEPS`. Several
//! attacks go on at once. `mix` draws others from the seed all the time, `burn=SHARE` only takes
//! that share of a CPU, and `list` alone prints the names of all attacks.
//!
//! All of it runs on one CPU, the last that it may use, at a lower priority. It speaks the wire
//! protocol itself: no agent holds it back.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(unsafe_code, reason = "it maps memory and makes processes as no safe program would")]
#![allow(clippy::unwrap_used, reason = "a test program fails by panicking")]

mod connections;
mod control;
mod descriptors;
mod exporter;
mod lies;
mod memory;
mod peer;
mod processes;
mod regions;
mod uids;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use e2e::user;
use processes::{fork, kill_group, reap_all};

/// What an attack knows.
struct Host {
    /// The user that attacks.
    uid: u32,
    /// The daemon's agent socket.
    agents: PathBuf,
    /// Its control socket.
    control: PathBuf,
    /// Steps done so far, of all processes.
    steps: &'static AtomicU64,
}

impl Host {
    /// Counts a step.
    fn step(&self) {
        self.steps.fetch_add(1, Relaxed);
    }
}

/// Random numbers that a seed repeats.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// An attack: goes on until its process is killed.
type Attack = fn(&Host, Random);

const ATTACKS: &[(&str, Attack)] = &[
    ("regions-before-ready", regions::before_ready),
    ("regions-after-ready", regions::after_ready),
    ("real-huge-regions", regions::real),
    ("many-small-regions", regions::small),
    ("discards", regions::discards),
    ("shrinks", regions::shrinks),
    ("retained", regions::retained),
    ("leaving", regions::leaving),
    ("silent", connections::silent),
    ("connect-and-die", connections::die),
    ("nonsense", connections::nonsense),
    ("packets", connections::packets),
    ("domains", connections::domains),
    ("huge-names", connections::huge_names),
    ("control-silent", control::silent),
    ("control-trickle", control::trickle),
    ("control-requests", control::requests),
    ("control-others", control::others),
    ("segments", descriptors::segments),
    ("stray-descriptors", descriptors::stray),
    ("pools", descriptors::pools),
    ("lying-reports", lies::reports),
    ("lying-cpu", lies::cpu),
    ("lying-digests", lies::digests),
    ("proofs", lies::proofs),
    ("control-page", lies::control_page),
    ("unanswered", lies::unanswered),
    ("missing-on-digest", memory::missing_on_digest),
    ("missing-at-random", memory::missing_at_random),
    ("busy-memory", memory::busy),
    ("exec", processes::exec),
    ("forks", processes::forks),
    ("siblings", processes::siblings),
    ("freezes", control::freezes),
    ("mappers", memory::mappers),
    ("lying-about-free-pages", lies::free_pages),
    (uids::NAME, uids::subordinates),
    (exporter::NAME, exporter::flood),
];

/// How long an attack of the mix goes on.
const TURN: Duration = Duration::from_millis(1500);
/// Attacks of the mix at a time.
const AT_ONCE: usize = 4;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args == ["list"] {
        ATTACKS.iter().for_each(|(name, _)| println!("{name}"));
        return;
    }
    let [directory, uid, seed, attacks @ ..] = &args[..] else {
        panic!("usage: pageone-hostile-client DIRECTORY UID SEED ATTACK…")
    };
    let directory = Path::new(directory);
    let host = Host {
        uid: uid.parse().unwrap(),
        agents: directory.join("agent.sock"),
        control: directory.join("control.sock"),
        steps: memory::shared_counter(),
    };
    assert!(processes::succeeds(|| processes::become_user(host.uid)), "it cannot become user {uid}");
    user::last_cpu_only();
    processes::adopt_orphans();
    let random = Random::new(seed.parse().unwrap());
    let groups: Vec<i32> = attacks.iter().map(|name| start(&host, name, random.clone())).collect();
    let _ = std::io::stdin().read_line(&mut String::new());
    groups.into_iter().for_each(kill_group);
    reap_all();
    println!("cpu {:.3} did {}", processes::cpu_of_children().as_secs_f64(), host.steps.load(Relaxed));
}

/// Starts an attack in a process group of its own.
fn start(host: &Host, name: &str, random: Random) -> i32 {
    fork(|| {
        processes::new_group();
        if !["mix", uids::NAME, exporter::NAME].contains(&name) {
            processes::become_user(host.uid);
        }
        match name.strip_prefix("burn=") {
            Some(share) => burn(share.parse().unwrap()),
            None if name == "mix" => mix(host, random),
            None => {
                let (_, attack) = ATTACKS.iter().find(|(known, _)| *known == name).expect("an attack of the list");
                attack(host, random);
            }
        }
    })
}

/// Other attacks all the time.
fn mix(host: &Host, mut random: Random) {
    processes::adopt_orphans();
    loop {
        let mut groups = Vec::new();
        for _ in 0..AT_ONCE {
            let (name, _) = ATTACKS[random.below(ATTACKS.len() as u64) as usize];
            groups.push(start(host, name, Random::new(random.below(u64::MAX))));
        }
        std::thread::sleep(TURN);
        groups.into_iter().for_each(kill_group);
        reap_all();
    }
}

/// Uses this share of a CPU and does nothing with it.
fn burn(share: f64) {
    let begin = Instant::now();
    loop {
        while kmem::cpu::process_time().as_secs_f64() < share * begin.elapsed().as_secs_f64() {
            std::hint::spin_loop();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
