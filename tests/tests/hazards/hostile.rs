//! A client that does nothing but attack.

use std::time::Duration;

use e2e::assault::{Assault, Figures, attacks, cannot_attack};
use e2e::{Daemon, skipped};

/// `HOSTILE_ATTACKS` names some attacks, or `all`: a table of what each does to a fresh daemon.
#[test]
fn each_attack_has_its_figures() {
    let Ok(names) = std::env::var("HOSTILE_ATTACKS") else {
        return skipped("HOSTILE_ATTACKS is not set");
    };
    if let Some(why) = cannot_attack() {
        return skipped(&why);
    }
    let names = if names == "all" { attacks() } else { names.split(',').map(str::to_string).collect() };
    let pairs = std::env::var("HOSTILE_PAIRS").map_or(2, |n| n.parse().unwrap());
    println!("{}", Figures::head());
    for name in names {
        let mut assault = Assault::new(Daemon::start(), 1);
        println!("{}", assault.run(&name, pairs, Duration::from_secs(3)));
    }
}
