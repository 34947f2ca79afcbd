//! `errors.md`: the exit codes with remedies, and the sentences of all errors with their codes.
//!
//! The sentences are read from the crates' sources: an error type's `#[error("…")]` attributes, and
//! the texts that the commands give to `bail!`, `ensure!`, `context` and `Coded`, are the
//! definition. `exit/codes.txt` gives each a code; it is compared here, and extended.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::{head, root, wrap};
use crate::exit::{Code, catalog};

/// Crates whose errors reach the user of a command, in the order of the page. Their places give the
/// first digits of codes: new ones come last.
const CRATES: [&str; 17] = [
    "control",
    "attach",
    "engine",
    "wire",
    "governor",
    "checkpoint",
    "mpool",
    "estimate",
    "ppr",
    "track",
    "testguest",
    "kmem",
    "pageone",
    "monitor",
    "snapshot",
    "qmp",
    "guests",
];

pub(super) fn page() -> String {
    let source = "the exit codes in `crates/pageone/src/exit.rs` and the error types of the crates";
    let mut out = head("Exit codes and errors", source);
    let _ = writeln!(out, "\n## Exit codes\n\n| code | meaning | what to do | error's code |\n|---|---|---|---|");
    for code in Code::ALL {
        let error = if code == Code::Done { String::new() } else { format!("`{}`", catalog::of_exit(code)) };
        let _ = writeln!(out, "| {} | {} | {} | {error} |", code as u8, code.meaning(), remedy(code));
    }
    let run = "`pageone run` has the exit code of the started program: 127 if it was not found and 126 if it could not \
               be started, as a shell does. A program that cannot be merged runs all the same, and a line on standard \
               error says why.";
    let _ = writeln!(out, "\n{}\n\n## Sentences\n", wrap(run, "", ""));
    let intro = "An error is printed on standard error behind `pageone:`, and ends with its code in brackets. A code \
                 keeps its meaning for good, whatever becomes of the words. Where the words are the system's, or name a \
                 setting, it is that of the exit code above. Below are the sentences, crate by crate; `…` \
                 stands for a name, a number or the system's own words. What to do stands behind the arrow, where the \
                 sentence does not say it; commands print it below the error. Those of the engine that begin with `it` or \
                 `its` are in the daemon's log: an agent broke the protocol, and its connection was closed. Wrong usage \
                 of options has no code: `pageone COMMAND --help` is the remedy.";
    let _ = writeln!(out, "{}", wrap(intro, "", ""));
    let codes = codes();
    for name in CRATES {
        let all: Vec<_> = catalog::parse(&codes).filter(|entry| entry.origin == name).collect();
        if !all.is_empty() {
            let _ = writeln!(out, "\n### {name}\n");
        }
        for entry in all {
            let _ = writeln!(out, "{}", wrap(&format!("`{}` {}", entry.code, entry.sentence), "- ", "  "));
            if let Some(remedy) = entry.to_do() {
                let _ = writeln!(out, "{}", wrap(remedy, "  → ", "    "));
            }
        }
    }
    out
}

/// `codes.txt` as it should be: the lines that there are, each sentence that is new behind those of
/// its crate, and `-` where a sentence is gone.
pub(super) fn codes() -> String {
    let mut lines: BTreeMap<String, (String, String, String)> = BTreeMap::new();
    for entry in catalog::entries() {
        lines.insert(entry.code.into(), (entry.origin.into(), entry.sentence.into(), entry.remedy.into()));
    }
    for (number, name) in (1..).zip(CRATES) {
        let prefix = format!("P{number:02}");
        let sentences = sentences_of(&root().join("crates").join(name).join("src"), name == "pageone");
        for (_, (origin, sentence, _)) in lines.iter_mut().filter(|(code, _)| code.starts_with(&prefix)) {
            *origin = if sentences.contains(sentence) { name.into() } else { "-".into() };
        }
        for sentence in sentences {
            if !lines.iter().any(|(code, (_, known, _))| code.starts_with(&prefix) && *known == sentence) {
                let last = lines.keys().filter_map(|code| code.strip_prefix(&prefix)?.parse::<u32>().ok()).max();
                let code = format!("{prefix}{:02}", last.unwrap_or(0) + 1);
                lines.insert(code, (name.into(), sentence, String::new()));
            }
        }
    }
    let line = |(code, (origin, sentence, remedy)): (_, &(String, String, String))| {
        format!("{code}\t{origin}\t{sentence}\t{remedy}\n")
    };
    lines.iter().map(line).collect()
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::Failed => {
            "read the message: it names what failed, and the remedy where there is one; `doctor` has found something in \
             the way of merging"
        }
        other => other.remedy().unwrap_or_default(),
    }
}

/// The sentences of all errors in a folder, in the order of file names and lines. `commands`: those
/// of macros and contexts, too.
fn sentences_of(folder: &Path, commands: bool) -> Vec<String> {
    let mut files = Vec::new();
    collect(folder, &mut files);
    files.sort();
    let mut sentences = Vec::new();
    let mut add = |text: String| sentences.extend(Some(readable(&text)).filter(|text| says_something(text)));
    for file in files {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        // Tests say what nobody meets.
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        text.split("#[error(").skip(1).filter_map(literal).for_each(&mut add);
        if commands {
            for start in ["bail!(", "ensure!(", "context(", "Coded("] {
                text.split(start).skip(1).filter_map(sentence_in).for_each(&mut add);
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    sentences.retain(|sentence| seen.insert(sentence.clone()));
    sentences
}

/// The first string literal that is an argument of its own, of the call whose arguments begin here.
fn sentence_in(text: &str) -> Option<String> {
    let (mut depth, mut before) = (1, '(');
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        match c {
            '"' => {
                if before == '(' || before == ',' && depth == 1 {
                    return literal(rest);
                }
                rest = behind_literal(rest)?;
                before = '"';
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return None;
        }
        // An argument of another function is no sentence, but for `format!`.
        if !c.is_whitespace() {
            before = if c == '(' && !text[..text.len() - rest.len()].ends_with("format!") { 'x' } else { c };
        }
        rest = &rest[c.len_utf8()..];
    }
    None
}

/// What stands behind the string literal with which a text begins.
fn behind_literal(text: &str) -> Option<&str> {
    let mut escaped = true;
    let end = text.char_indices().find(|&(at, c)| {
        let is_end = at > 0 && c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        is_end
    })?;
    Some(&text[end.0 + 1..])
}

/// Whether a sentence has words of its own, beside what is filled in.
fn says_something(sentence: &str) -> bool {
    sentence.chars().filter(|c| c.is_alphabetic()).count() > 8
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // The pages of the reference say nothing to users.
        if path.is_dir() && path.file_name().is_some_and(|name| name != "reference") {
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
                'n' | 't' => out.push(' '),
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
fn no_crate_with_errors_for_users_is_left_out() {
    // The agent's are in a program's log; the others' reach only who writes programs.
    const OTHERS: [&str; 5] = ["agent", "dirty", "one", "output", "vmm"];
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let has_errors = !sentences_of(&root().join("crates").join(&name).join("src"), false).is_empty();
        let is_listed = CRATES.contains(&&*name) || OTHERS.contains(&&*name);
        assert!(is_listed || !has_errors, "errors of the crate {name} have no codes");
    }
}

#[test]
fn a_sentence_is_read_from_its_attribute() {
    let source = "\n    \"cannot {what} {path:?}: \\\"{{x}}\\\" \\\n         is {0}; try again\")]";
    assert_eq!(readable(&literal(source).unwrap()), "cannot … …: \"{x}\" is …; try again");
    assert_eq!(literal("transparent)]"), None);
}

#[test]
fn a_sentence_is_read_from_a_macro_and_a_context() {
    for (source, expected) in [
        ("\"no {name} here\")", Some("no {name} here")),
        ("name == \"kvm\" || name.starts_with(\"qemu\"),\n \"{name} is not QEMU\")", Some("{name} is not QEMU")),
        ("|| format!(\"cannot open {}\", path.display()))?", Some("cannot open {}")),
        ("Code::Failed, e.to_string())", None),
        ("!(has(word, \"reset\")), \"no reset\")", Some("no reset")),
        ("&mut self) -> \"x\"", None),
    ] {
        assert_eq!(sentence_in(source).as_deref(), expected, "{source}");
    }
}
