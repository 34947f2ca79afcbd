//! The lines that a guest's init prints on the serial console.
//!
//! `guest/demo/init` prints a line after booting, one for each round, and one before it rests.
//! Firmware, kernel and launcher may print anything in between; a line counts only if it contains
//! one of our words. Reading is asymmetric on purpose: a PASS must be exact to the last character,
//! but any line with a round and CORRUPT is a failure, however garbled. A lost PASS costs nothing;
//! a lost CORRUPT hides a wrong byte.

/// One line of init, or a kernel panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Init has started.
    Booted,
    /// Init has ended its work.
    Rests,
    /// A round has ended.
    Round(Round),
    /// The guest's kernel has panicked; QEMU exits next (`panic=-1`, `-no-reboot`).
    Panic(String),
}

/// The result of one round of checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    /// Number of the round, from 0 at boot.
    pub(crate) number: u64,
    /// Number of files checked.
    pub(crate) checks: u64,
    /// Number of files whose checksum did not match or could not be computed.
    pub(crate) failures: u64,
    /// Name of the first such file.
    pub(crate) first_failure: Option<String>,
}

/// Reads one line of the console; `None` if it is not one of [`Line`].
pub(crate) fn parse(line: &str) -> Option<Line> {
    let line = line.trim_end();
    if let Some(at) = line.find("Kernel panic") {
        return Some(Line::Panic(line[at..].to_owned()));
    }
    if line.contains("PAGEONE-BOOTED") {
        return Some(Line::Booted);
    }
    if line.contains("PAGEONE-RESTS") {
        return Some(Line::Rests);
    }
    let (_, rest) = line.split_once("PAGEONE-ROUND ")?;
    let mut words = rest.split(' ');
    let number = words.next().and_then(|word| word.parse().ok());
    if rest.contains("CORRUPT") {
        return Some(Line::Round(corrupt(number.unwrap_or(0), rest)));
    }
    match (number, words.next(), words.next(), words.next()) {
        (Some(number), Some("PASS"), Some(checks), None) => Some(Line::Round(Round {
            number,
            checks: checks.strip_prefix("checks=")?.parse().ok()?,
            failures: 0,
            first_failure: None,
        })),
        _ => None,
    }
}

fn corrupt(number: u64, rest: &str) -> Round {
    let value = |key: &str| rest.split(' ').find_map(|word| word.strip_prefix(key)?.parse::<u64>().ok());
    let failures = value("failures=").unwrap_or(1).max(1);
    Round {
        number,
        checks: value("checks=").unwrap_or(failures),
        failures,
        first_failure: rest.split_once("file=").map(|(_, file)| file.to_owned()),
    }
}

#[cfg(test)]
mod tests;
