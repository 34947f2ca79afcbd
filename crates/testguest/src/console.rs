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
mod tests {
    use super::*;

    fn pass(number: u64, checks: u64) -> Option<Line> {
        Some(Line::Round(Round { number, checks, failures: 0, first_failure: None }))
    }

    #[test]
    fn a_pass_is_read_between_noise_on_either_side() {
        assert_eq!(parse("PAGEONE-ROUND 3 PASS checks=1234\r"), pass(3, 1234), "carriage return of the serial line");
        assert_eq!(parse("[    2.1] clocksource: PAGEONE-ROUND 0 PASS checks=7"), pass(0, 7));
    }

    #[test]
    fn a_garbled_pass_is_no_pass() {
        for line in [
            "PAGEONE-ROUND 3 PASS",
            "PAGEONE-ROUND 3 PASS checks=",
            "PAGEONE-ROUND 3 PASS checks=12[  9.1] random: crng init done",
            "PAGEONE-ROUND 3 PASS checks=12 failures=1",
            "PAGEONE-ROUND three PASS checks=12",
            "PAGEONE-ROUND 3 PAS",
            "3 PASS checks=12",
            "",
        ] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_corrupt_round_names_the_file() {
        assert_eq!(
            parse("PAGEONE-ROUND 9 CORRUPT checks=50 failures=2 file=03/usr/lib/a file"),
            Some(Line::Round(Round {
                number: 9,
                checks: 50,
                failures: 2,
                first_failure: Some("03/usr/lib/a file".into()),
            }))
        );
    }

    #[test]
    fn a_garbled_corrupt_round_still_fails() {
        for line in [
            "PAGEONE-ROUND 9 CORRUPT",
            "PAGEONE-ROUND x CORRUPT checks=50 failures=0",
            "PAGEONE-ROUND 9 CORRUPT checks=5[  3.4] noise",
            "noise PAGEONE-ROUND 9 CORRUPT failures=x file=",
        ] {
            let Some(Line::Round(round)) = parse(line) else {
                panic!("{line:?} was not read as a round");
            };
            assert!(round.failures >= 1 && round.checks >= 1, "{line:?}");
        }
    }

    #[test]
    fn boot_and_panic_are_seen() {
        assert_eq!(parse("PAGEONE-BOOTED files=12"), Some(Line::Booted));
        assert_eq!(parse("PAGEONE-RESTS"), Some(Line::Rests));
        assert_eq!(
            parse("[    1.0] Kernel panic - not syncing: Attempted to kill init!"),
            Some(Line::Panic("Kernel panic - not syncing: Attempted to kill init!".into()))
        );
    }
}
