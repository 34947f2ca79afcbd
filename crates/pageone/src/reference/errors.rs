//! `errors.md`: the exit codes with remedies, and the sentences of every error type.
//!
//! The sentences are read from the crates' sources: an error type's `#[error("…")]` attributes are
//! its definition, and no list beside them can be forgotten.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::{head, root, wrap};
use crate::exit::Code;

/// Crates whose errors reach the user of a command, in the order of the page.
const CRATES: [&str; 10] =
    ["control", "engine", "wire", "governor", "checkpoint", "mpool", "estimate", "ppr", "track", "testguest"];

pub(super) fn page() -> String {
    let source = "the exit codes in `crates/pageone/src/exit.rs` and the error types of the crates";
    let mut out = head("Exit codes and errors", source);
    let _ = writeln!(out, "\n## Exit codes\n\n| code | meaning | what to do |\n|---|---|---|");
    for code in Code::ALL {
        let _ = writeln!(out, "| {} | {} | {} |", code as u8, code.meaning(), remedy(code));
    }
    let run = "`pageone run` has the exit code of the started program: 127 if it was not found and 126 if it could not \
               be started, as a shell does. A program that cannot be merged runs all the same, and a line on standard \
               error says why.";
    let _ = writeln!(out, "\n{}\n\n## Sentences\n", wrap(run, "", ""));
    let intro = "An error is printed on standard error behind `pageone:`. Below are the sentences of the libraries' \
                 error types, crate by crate; `…` stands for a name, a number or the system's own words. \
                 Those of the engine that begin with `it` or `its` are in the daemon's log: an agent broke the \
                 protocol, and its connection was closed. What a subcommand says of its own options is not listed.";
    let _ = writeln!(out, "{}", wrap(intro, "", ""));
    for name in CRATES {
        let sentences = sentences_of(&root().join("crates").join(name).join("src"));
        if !sentences.is_empty() {
            let _ = writeln!(out, "\n### {name}\n");
        }
        for sentence in sentences {
            let _ = writeln!(out, "{}", wrap(&sentence, "- ", "  "));
        }
    }
    out
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::Done => "",
        Code::Failed => {
            "read the message: it names what failed, and the remedy where there is one; `doctor` has found something in \
             the way of merging"
        }
        Code::Usage => "`pageone COMMAND --help`",
        Code::NoDaemon => "start one with `pageone daemon`, or name the directory of the one that runs with `--dir`",
        Code::NoClient => "`pageone status` lists the clients; `pageone run` starts one",
        Code::Configuration => {
            "correct the key that the message names; [configuration](configuration.md) has its range"
        }
        Code::SecondDaemon => "stop the other one first, or give this daemon a directory of its own with `--dir`",
        Code::HostLacks => "`pageone doctor` says what is missing and how to get it",
        Code::LeftOut => "the message names what was left out and why; the figures are without it",
    }
}

/// The sentences of all error types in a folder, in the order of file names and lines.
fn sentences_of(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    collect(folder, &mut files);
    files.sort();
    let mut sentences = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        for part in text.split("#[error(").skip(1) {
            sentences.extend(literal(part).map(|text| readable(&text)).filter(|text| says_something(text)));
        }
    }
    let mut seen = std::collections::HashSet::new();
    sentences.retain(|sentence| seen.insert(sentence.clone()));
    sentences
}

/// Whether a sentence has words of its own, beside what is filled in.
fn says_something(sentence: &str) -> bool {
    sentence.chars().filter(|c| c.is_alphabetic()).count() > 8
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs") && path.file_name().is_some_and(|n| n != "tests.rs") {
            files.push(path);
        }
    }
}

/// The string literal with which a text begins.
fn literal(text: &str) -> Option<String> {
    let mut chars = text.trim_start().strip_prefix('"')?.chars();
    let mut out = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(out),
            '\\' => match chars.next()? {
                // A line that goes on.
                '\n' => out.push(' '),
                escaped => out.push(escaped),
            },
            other => out.push(other),
        }
    }
}

/// The sentence with `…` in place of what is filled in.
fn readable(format: &str) -> String {
    let mut out = String::new();
    let mut depth = 0;
    for c in format.replace("{{", "\u{1}").replace("}}", "\u{2}").chars() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                out.push('…');
            }
            '\u{1}' => out.push('{'),
            '\u{2}' => out.push('}'),
            other if depth == 0 => out.push(other),
            _ => {}
        }
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_sentence_is_read_from_its_attribute() {
    let source = "\n    \"cannot {what} {path:?}: \\\"{{x}}\\\" \\\n         is {0}; try again\")]";
    assert_eq!(readable(&literal(source).unwrap()), "cannot … …: \"{x}\" is …; try again");
    assert_eq!(literal("transparent)]"), None);
}
