//! A configuration file: read it, and say all that is wrong with it.
//!
//! Each key is read by itself, so that one mistake does not hide the next. What keys mean together
//! is checked when each of them is right.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;
use claims::ClaimError;
use engine::{Config, SETTINGS};
use serde::{Deserialize, Serialize};
use strsim::levenshtein;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::settings::{DOMAIN_EXAMPLE, default_of};
use crate::{Code, Coded};

/// Read when no `--config` is given, if it is there.
pub(crate) const DEFAULT_FILE: &str = "/etc/pageone/pageone.toml";
/// Bytes of a configuration file, at most.
const MOST: u64 = 1 << 20;
/// How long a program may take to write one into a pipe.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Something wrong in a configuration file.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Problem {
    /// Where, from 1 on; 0: nowhere in particular.
    line: usize,
    /// The key; empty where the file is no TOML.
    key: String,
    /// What is wrong, and what would be right.
    text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.text)
    }
}

/// The text of a regular file, or of what has its end within `patience`: a pipe, or `/dev/null` for
/// no settings. With `None` only the former: it is read again, and a pipe would be empty now.
fn text(path: &Path, patience: Option<Duration>) -> Result<String, ClaimError> {
    let kind = std::fs::metadata(path).map(|meta| meta.file_type());
    let is_stream = kind.is_ok_and(|kind| kind.is_fifo() || kind.is_char_device());
    let Some(patience) = patience.filter(|_| is_stream) else { return claims::text(path, MOST) };
    // To open it may wait as well. What still waits ends with this process.
    let (path, (sender, bytes)) = (path.to_owned(), mpsc::channel());
    std::thread::spawn(move || {
        let _ = sender.send(File::open(path).map_err(ClaimError::Io).and_then(|file| claims::up_to(file, MOST)));
    });
    let late = |_| {
        let why = format!("its end has not come in {} s; write it into a file, and name that", patience.as_secs());
        Err(io::Error::new(ErrorKind::TimedOut, why).into())
    };
    let bytes = bytes.recv_timeout(patience).unwrap_or_else(late)?;
    String::from_utf8(bytes).map_err(|_| ClaimError::Text)
}

/// What a configuration file says, and the number of keys that are set; or all that is wrong in it.
type Checked = Result<(Config, usize), Vec<Problem>>;

/// Reads a configuration file: once, with [`PATIENCE`] for a pipe, or again.
///
/// # Errors
///
/// Name the file, and the line and the key of each problem.
pub(crate) fn load(path: Option<&Path>, patience: Option<Duration>) -> Result<Config> {
    Ok(check(path, patience)?.map_err(|problems| wrong(path, &problems))?.0)
}

/// The error of a file in which something is wrong.
pub(crate) fn wrong(path: Option<&Path>, problems: &[Problem]) -> Coded {
    let name = path.unwrap_or(Path::new(DEFAULT_FILE)).display();
    let lines: Vec<_> = problems.iter().map(|problem| format!("{name}: {problem}")).collect();
    Coded(Code::Configuration, lines.join("\n"))
}

/// The same as [`load`], with each problem for itself.
///
/// # Errors
///
/// If the file cannot be read.
pub(crate) fn check(path: Option<&Path>, patience: Option<Duration>) -> Result<Checked, Coded> {
    let (path, needed) = match path {
        Some(path) => (path, true),
        None => (Path::new(DEFAULT_FILE), false),
    };
    match text(path, patience) {
        Ok(text) => Ok(parse(&text)),
        Err(ClaimError::Io(e)) if e.kind() == ErrorKind::NotFound && !needed => Ok(Ok((Config::default(), 0))),
        Err(e) => Err(Coded(Code::Configuration, format!("{}: cannot be read: {e}", path.display()))),
    }
}

/// Reads a configuration, and checks it. Returns the number of keys that are set, too.
///
/// # Errors
///
/// All that is wrong, in the order of the lines.
pub(crate) fn parse(text: &str) -> Checked {
    let line = |span: Option<Range<usize>>| {
        let before = span.and_then(|span| text.get(..span.start));
        before.map_or(0, |before| before.matches('\n').count() + 1)
    };
    let (table, errors) = DeTable::parse_recoverable(text);
    let wrong = |e: &toml::de::Error| Problem {
        line: line(e.span()),
        key: String::new(),
        text: format!("this is no TOML: {}", e.message()),
    };
    let mut problems: Vec<_> = errors.iter().map(wrong).collect();
    let whole = table.span();
    let mut lines = Vec::new();
    for (key, value) in table.into_inner() {
        let name = key.get_ref().to_string();
        lines.push((name.clone(), line(Some(key.span()))));
        let at = line(Some(key.span()));
        let mut add = |line, text| problems.push(Problem { line, key: name.clone(), text });
        if !SETTINGS.iter().any(|setting| setting.key == name) {
            add(at, unknown(&name));
            continue;
        }
        match read_one(key, value, &whole) {
            Ok(config) => {
                if let Err(e) = config.check_ranges() {
                    add(at, e.problem);
                }
            }
            Err(e) => add(line(e.span()).max(at), format!("{}; {}", e.message(), right(&name))),
        }
    }
    if problems.is_empty() {
        match toml::from_str::<Config>(text).map(|config| (config.check(), config)) {
            Ok((Ok(()), config)) => return Ok((config, lines.len())),
            Ok((Err(e), _)) => {
                let line = lines.iter().find(|(key, _)| key == e.key).map_or(0, |&(_, line)| line);
                problems.push(Problem { line, key: e.key.into(), text: e.problem });
            }
            Err(e) => problems.push(wrong(&e)),
        }
    }
    problems.sort_by_key(|problem| problem.line);
    Err(problems)
}

/// A configuration in which one key is set.
fn read_one<'a>(
    key: Spanned<std::borrow::Cow<'a, str>>,
    value: Spanned<DeValue<'a>>,
    whole: &Range<usize>,
) -> Result<Config, toml::de::Error> {
    let mut table = DeTable::new();
    table.insert(key, value);
    Config::deserialize(ValueDeserializer::from(Spanned::new(whole.clone(), DeValue::Table(table))))
}

/// The message for a key that does not exist, with the nearest one that does.
fn unknown(key: &str) -> String {
    let all = "`pageone config sample` shows all settings";
    let near = SETTINGS.iter().map(|setting| (levenshtein(key, setting.key), setting.key)).min();
    match near {
        Some((distance, near)) if distance <= near.len() / 3 => {
            format!("there is no such setting; did you mean {near}? {all}")
        }
        _ => format!("there is no such setting; {all}"),
    }
}

/// The message for a key whose value has another type: how to write it.
fn right(key: &str) -> String {
    let setting = SETTINGS.iter().find(|setting| setting.key == key);
    match setting.map(default_of) {
        Some(default) if !default.is_object() => format!("write it as in `{key} = {default}`"),
        _ => format!("write it as in `{}`", DOMAIN_EXAMPLE.trim_end().replace('\n', "` and `")),
    }
}

#[cfg(test)]
mod tests;
