//! A fuzzer of behaviour: programs that do to marked memory whatever system calls can do, while a
//! daemon merges it, dies, stops, detaches, recycles and stores it, and an oracle of every byte.
//!
//! `pageone-behaviour-fuzz --seed N --seconds S` starts a daemon in a directory of its own and
//! some clients in one domain. The clients draw their pages from few contents, so that most pages
//! are merged and a wrong frame shows. A seed determines the operations of each client, and what
//! happens to the daemon; what happens at the same time it does not. A finding names the seed,
//! the last operations and the bytes, and ends the run with exit code 1. So does an operation that
//! does not end, and a client that dies.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test program fails by panicking")]

mod advice;
mod arena;
mod client;
mod device;
mod driver;
mod finding;
mod mapping;
mod ops;
mod pool;
mod process;
mod random;
mod slow;
mod sys;
mod writers;

use std::time::Duration;

const USAGE: &str = "usage: pageone-behaviour-fuzz [OPTIONS]

  --seed N[,N...]      what decides all operations; `time` takes the clock's [default: time]
  --seconds S          how long each seed is tried [default: 60]
  --clients K          clients at a time [default: 3]
  --without NAME,...   leaves operations or events out
  --only NAME,...      leaves all operations out but these, and fill, check and map
  --client-seed N      all clients have this seed, as a finding names it
  --direct-io S        the daemon's direct_io_seconds, far above what slow-read takes; 0: leaves out all
                       operations that write past the page tables [default: 2]
  --sabotage GUARD     switches a guard of the agent off (built with the feature `sabotage`)
  --ops                lists operations and events";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    let number = |name: &str, default: u64| value(name).map_or(default, |text| parse(name, &text));
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        return println!("{USAGE}");
    }
    if args.iter().any(|arg| arg == "--ops") {
        ops::OPS.iter().for_each(|op| println!("{:16} {:4}  {}", op.name, op.weight, op.help));
        return driver::EVENTS
            .iter()
            .for_each(|event| println!("{:16} {:4}  {}", event.name, event.weight, event.help));
    }
    let list = |name: &str| value(name).map_or(Vec::new(), |text| text.split(',').map(str::to_string).collect());
    let mut without: Vec<String> = list("--without");
    let only = list("--only");
    let known =
        |name: &String| driver::EVENTS.iter().any(|e| e.name == name) || ops::OPS.iter().any(|o| o.name == name);
    if let Some(name) = without.iter().chain(&only).find(|name| !known(name)) {
        eprintln!("pageone-behaviour-fuzz: there is no operation or event {name}; --ops lists them");
        std::process::exit(2);
    }
    if !only.is_empty() {
        let kept = |name: &str| only.iter().any(|other| other == name) || ["fill", "check", "map"].contains(&name);
        without.extend(ops::OPS.iter().filter(|op| !kept(op.name)).map(|op| op.name.to_string()));
    }
    let direct_io = number("--direct-io", 2);
    if direct_io == 0 {
        without.extend(["slow-read", "read", "pin", "pin-io"].map(str::to_string));
    }
    if args.first().is_some_and(|arg| arg == "client") {
        return client::run(client::Options {
            seed: number("--seed", 1),
            without,
            contents: value("--contents").unwrap_or_default(),
            slow: value("--slow"),
            slow_from: number("--slow-from", 1 << 20) as usize,
            dir: value("--files").unwrap_or_default(),
        });
    }
    let seeds = value("--seed").unwrap_or_else(|| "time".into());
    for seed in seeds.split(',') {
        let time = std::time::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_secs());
        let seed = if seed == "time" { time } else { parse("--seed", seed) };
        let plan = driver::Plan {
            seed,
            time: Duration::from_secs(number("--seconds", 60)),
            clients: number("--clients", 3) as usize,
            without: without.clone(),
            client_seed: value("--client-seed").map(|text| parse("--client-seed", &text)),
            sabotage: value("--sabotage"),
            direct_io,
        };
        if !driver::run(plan) {
            std::process::exit(1);
        }
    }
}

fn parse(name: &str, text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| {
        eprintln!("pageone-behaviour-fuzz: {name} takes a number, not {text}\n{USAGE}");
        std::process::exit(2);
    })
}
