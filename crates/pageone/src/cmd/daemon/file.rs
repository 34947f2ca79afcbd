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
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        parse(text).unwrap_err().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_problem_is_named_with_its_line_its_key_and_what_would_be_right() {
        let found = problems(
            "merge_perod = 5\nthreads = \"two\"\n# a comment\nmax_cpu = 0.01\nmerge_across_nodes = true\n\n\
             [domains.web]\nuids = \"all\"\n",
        );
        let expected = [
            "line 1: merge_perod: there is no such setting; did you mean merge_period? ",
            "line 2: threads: invalid type: string \"two\", expected usize; write it as in `threads = 0`",
            "line 4: max_cpu: 0.01 is not 0, for none, or between 0.1 and 102400 percent",
            "line 8: domains: invalid type: string \"all\"",
        ];
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
        let found = problems("threads = 1\n= 5\nreserve_mib = \n");
        assert!(found.len() >= 2 && found[0].starts_with("line 2: this is no TOML"), "{found:?}");
        assert!(problems("nonsense = 1\n")[0].contains("no such setting; `pageone config sample`"));
    }

    #[test]
    fn what_keys_mean_together_is_checked_when_each_is_right() {
        assert_eq!(parse("merge_period = 60\ntarget_scan_time = 30\n").unwrap().1, 2);
        let found = problems("threads = 1\ntarget_scan_time = 30\n");
        assert!(found[0].starts_with("line 2: target_scan_time: 30 s is not between"), "{found:?}");
        assert_eq!(parse("").unwrap(), (Config::default(), 0));
    }

    fn loaded(text: &str) -> Result<Config> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(Some(file.path()), Some(PATIENCE))
    }

    #[test]
    fn a_file_sets_what_it_names() {
        let config = loaded("merge_period = 5\nhuge_pages = \"keep\"\n[domains.web]\nuids = [1000, 1001]\n").unwrap();
        assert_eq!(config.merge_period, 5.0);
        assert_eq!(config.huge_pages, engine::HugePages::Keep);
        assert_eq!(config.domains["web"].uids, [1000, 1001]);
        assert_eq!(config.threads, 0, "the default");
    }

    #[test]
    fn what_is_wrong_is_named_by_line_and_key() {
        let error = format!("{:#}", loaded("threads = 2\nmerge_perod = 5\n").unwrap_err());
        assert!(error.contains("line 2") && error.contains("merge_perod") && error.contains("merge_period"), "{error}");
        let error = format!("{:#}", loaded("merge_period = 0\n").unwrap_err());
        assert!(error.contains("merge_period") && error.contains("0.05"), "{error}");
        let error = format!("{:#}", loaded("huge_page_share = 101\n").unwrap_err());
        assert!(error.contains("huge_page_share: 101") && error.contains("between 0 and 100"), "{error}");
        let error = format!("{:#}", loaded("huge_page_share = 50\nhuge_pages = \"keep\"\n").unwrap_err());
        assert!(error.contains("huge_page_share") && error.contains("leave one of the two out"), "{error}");
        let error = format!("{:#}", loaded("threads = \"two\"\n").unwrap_err());
        assert!(error.contains("line 1") && error.contains("threads"), "{error}");
        assert!(
            load(Some(Path::new("/nonexistent/file")), Some(PATIENCE))
                .unwrap_err()
                .to_string()
                .contains("/nonexistent/file")
        );
        let error = format!("{:#}", loaded(&"#".repeat(2 << 20)).unwrap_err());
        assert!(error.contains("cannot be read: it has 1048577 bytes, and at most 1048576"), "{error}");
        let error = load(Some(Path::new("/dev/zero")), Some(PATIENCE)).unwrap_err().to_string();
        assert!(error.contains("/dev/zero: cannot be read: it has 1048577 bytes, and at most 1048576"), "{error}");
        assert_eq!(load(Some(Path::new("/dev/null")), Some(PATIENCE)).unwrap(), Config::default(), "no settings");
        let error = load(Some(Path::new("/")), Some(PATIENCE)).unwrap_err().to_string();
        assert!(error.contains("/: cannot be read: it is a directory"), "{error}");
    }

    #[test]
    fn a_configuration_comes_by_a_pipe_once_if_its_writer_ends() {
        let dir = tempfile::tempdir().unwrap();
        let [silent, fifo] = ["silent", "fifo"].map(|name| {
            let path = dir.path().join(name);
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            path
        });
        let error = text(&silent, Some(Duration::ZERO)).unwrap_err().to_string();
        assert!(error.contains("has not come in 0 s"), "{error}");
        let error = load(Some(&fifo), None).unwrap_err().to_string();
        assert!(error.contains("cannot be read: it is a FIFO"), "{error}");
        let writer = std::thread::spawn({
            let fifo = fifo.clone();
            move || std::fs::write(fifo, "threads = 3\n").unwrap()
        });
        assert_eq!(load(Some(&fifo), Some(PATIENCE)).unwrap().threads, 3);
        writer.join().unwrap();
    }
}
