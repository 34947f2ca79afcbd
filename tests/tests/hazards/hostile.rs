//! A client that does nothing but attack, while another user's memory is merged.
//!
//! `HOSTILE_SECONDS` says for how long (`make test-hostile`: 600). `HOSTILE_SEED` repeats the order
//! of the attacks. Without `HOSTILE_SECONDS` other tests may have the machine: then the victim must
//! keep a third of its speed. Of the attacks that the bounds are for, each took nearly all of it.

use std::time::Duration;

use e2e::assault::{ATTACKER, Assault, Figures, Holdings, attacks, cannot_attack};
use e2e::{Daemon, eventually, skipped};

/// Seconds without `HOSTILE_SECONDS`.
const SHORT: u64 = 36;
/// One slice with the attackers, or without.
const SLICE: Duration = Duration::from_secs(3);
/// Percent of its speed that the victim keeps.
const KEPT: f64 = 90.0;
/// The same where other tests may run beside this one: on two busy CPUs slices without attackers
/// differ by a factor of two.
const KEPT_BESIDE_OTHERS: f64 = 33.0;
/// A loaded machine is slower now and then; an attack that slows another user does so every time.
const TRIES: usize = 3;

/// MiB that a daemon may hold more because of one attack.
const MOST_OF_ONE: u64 = 64;
/// How long root may wait for the status.
const STATUS: Duration = Duration::from_secs(1);
/// The most that a daemon may hold more because it is attacked by one user, in several ways.
const MOST: Holdings = Holdings { rss_mib: 128, threads: 96, descriptors: 8192, log_lines: 0, log_bytes: 0 };
/// Lines in the log about one user's clients in a minute, and some of the daemon's own.
const LINES_IN_A_MINUTE: u64 = 100;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// The daemon held no more than it may, and has given it back.
fn bounded(assault: &Assault, figures: &Figures) {
    let (before, most) = (figures.before, figures.most);
    let more = |most: u64, before: u64| most.saturating_sub(before);
    assert!(!figures.died, "the daemon has died");
    assert!(more(most.rss_mib, before.rss_mib) <= MOST.rss_mib, "memory: {most:?} of {before:?}");
    assert!(more(most.threads, before.threads) <= MOST.threads, "threads: {most:?} of {before:?}");
    assert!(more(most.descriptors, before.descriptors) <= MOST.descriptors, "descriptors: {most:?} of {before:?}");
    let minutes = (figures.with.time + figures.without.time).as_secs() / 60 + 1;
    let lines = more(most.log_lines, before.log_lines);
    assert!(lines <= minutes * LINES_IN_A_MINUTE, "{lines} lines in the log in {minutes} min");
    assert!(more(most.log_bytes, before.log_bytes) <= lines * 1000, "lines that are far too long: {most:?}");
    eventually("what the attackers held is given back", Duration::from_secs(60), || {
        let now = assault.holdings();
        let back = now.threads <= before.threads + 2 && now.descriptors <= before.descriptors + 64;
        back.then_some(())
    });
}

/// A daemon; the attacker has subordinate uids, where that can be.
fn attacked() -> Daemon {
    let mut daemon = Daemon::start();
    daemon.restart_with_subuid(ATTACKER);
    daemon
}

#[test]
fn a_client_that_does_nothing_but_attack_leaves_another_user_nine_tenths_of_its_speed() {
    if let Some(why) = cannot_attack() {
        return skipped(&why);
    }
    let seed = number("HOSTILE_SEED", u64::from(std::process::id()));
    let pairs = (number("HOSTILE_SECONDS", SHORT) as usize).div_ceil(2 * SLICE.as_secs() as usize);
    println!("seed {seed}\n{}", Figures::head());
    let mut assault = Assault::new(attacked(), seed);
    let kept = if std::env::var_os("HOSTILE_SECONDS").is_some() { KEPT } else { KEPT_BESIDE_OTHERS };
    let mut best = 0.0f64;
    for _ in 0..TRIES {
        let figures = assault.run("mix", pairs, SLICE);
        println!("{figures}");
        bounded(&assault, &figures);
        assault.check_memory();
        best = best.max(figures.percent());
        if best >= kept {
            return;
        }
    }
    panic!("the victim keeps {best:.0} % of its speed, in {TRIES} tries; seed {seed}");
}

/// `HOSTILE_ATTACKS` names some attacks, with commas, or `all`: a table of what each does to a
/// fresh daemon, and bounds on that. Speed is not judged.
#[test]
fn each_attack_has_its_figures() {
    let Ok(names) = std::env::var("HOSTILE_ATTACKS") else {
        return skipped("HOSTILE_ATTACKS is not set");
    };
    if let Some(why) = cannot_attack() {
        return skipped(&why);
    }
    let names = if names == "all" { attacks() } else { names.split(',').map(str::to_string).collect() };
    let pairs = number("HOSTILE_PAIRS", 2) as usize;
    println!("{}", Figures::head());
    let mut over = Vec::new();
    for name in names {
        let mut assault = Assault::new(attacked(), 1);
        let figures = assault.run(&name, pairs, SLICE);
        println!("{figures}");
        let (mib, waited) = (figures.most.rss_mib - figures.before.rss_mib, figures.with.status);
        if mib > MOST_OF_ONE || waited > STATUS * e2e::patience() {
            over.push(format!("{name}: {mib} MiB more, and root waits {waited:?}"));
        }
        bounded(&assault, &figures);
        assault.check_memory();
    }
    assert!(over.is_empty(), "{over:#?}");
}
