//! Counts what keeps the sources easy to read, and fails where a count is above its limit.
//!
//! ```text
//! house [--list COUNT]     COUNT: circles, booleans, forwarders, fields
//! ```
//!
//! It parses every Rust file of the workspace outside tests, and counts:
//!
//! * *circles*: groups of files in one folder that use each other, directly or through others;
//! * *booleans*: functions with a parameter of type `bool`;
//! * *forwarders*: functions whose body only calls another one with the same arguments;
//! * *fields*: structs of 14 fields and more;
//! * *lines*: of Rust, C and shell, outside tests;
//! * *words*: of README, CHANGELOG and `docs/`.
//!
//! `--list` names the places of one count. Exit: 0 all are within their limits, 1 some are not.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]

mod circles;
mod items;
mod source;

use anyhow::{Context, Result, bail};

use source::{Files, Place};

/// What may be counted at most, and what is aimed at. A limit is lowered when its count is.
const LIMITS: [(&str, usize, usize); 6] = [
    ("circles", 0, 0),
    ("booleans", 20, 50),
    ("forwarders", 200, 167),
    ("fields", 3, 6),
    ("lines", 129_400, 112_000),
    ("words", 63_000, 63_000),
];

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let listed = match (words.next().as_deref(), words.next()) {
        (None, None) => None,
        (Some("--list"), Some(count)) => Some(count),
        _ => bail!("usage: house [--list circles|booleans|forwarders|fields]"),
    };
    let files = Files::tracked().context("cannot read the sources")?;
    let parsed = files.parse()?;
    let items = items::find(&parsed);
    let counts = [
        ("circles", circles::find(&parsed)),
        ("booleans", items.booleans),
        ("forwarders", items.forwarders),
        ("fields", items.fields),
    ];
    if let Some(listed) = listed {
        let (_, places) = counts.iter().find(|(name, _)| *name == listed).context("there is no such count")?;
        show(places);
        return Ok(());
    }
    let sizes = [("lines", files.lines()?), ("words", files.words()?)];
    let counted = counts.iter().map(|(name, places)| (*name, places.len())).chain(sizes);
    let mut over = Vec::new();
    for (name, count) in counted {
        let (_, limit, aim) = LIMITS.into_iter().find(|(of, ..)| *of == name).context("a count has no limit")?;
        say(&format!("house: {name:<11} {count:>7}   at most {limit}, aim {aim}"));
        if count > limit {
            over.push(name);
        }
    }
    if !over.is_empty() {
        bail!("above the limit: {}; `cargo run -p house -- --list {}` names the places", over.join(", "), over[0]);
    }
    Ok(())
}

fn show(places: &[Place]) {
    for place in places {
        say(&format!("{}:{}: {}", place.file, place.line, place.what));
    }
}

/// This program's standard output.
#[allow(clippy::print_stdout, reason = "a tool of the project's own lint")]
fn say(line: &str) {
    println!("{line}");
}
