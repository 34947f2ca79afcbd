//! The state of a guest, as far as its console tells.

use std::collections::VecDeque;
use std::time::Instant;

use crate::console::{self, Line, Round};

/// Console lines kept: hours of rounds, and a bound on what a faulty guest can make the caller
/// keep.
const LINES_KEPT: usize = 8192;

/// What the console has printed.
#[derive(Debug)]
pub(crate) struct Heard {
    /// Whether init has started.
    pub(crate) booted: bool,
    /// Whether init has ended its work.
    pub(crate) rests: bool,
    /// The end of each round.
    pub(crate) rounds: Vec<Instant>,
    /// Files checked in all rounds, and those that were wrong.
    pub(crate) checks: u64,
    pub(crate) failures: u64,
    pub(crate) last_round: u64,
    /// The first round with a wrong file.
    corrupt: Option<Round>,
    /// The kernel's last words.
    pub(crate) panic: Option<String>,
    /// When init last printed a line.
    pub(crate) at: Instant,
    /// The last lines.
    pub(crate) lines: VecDeque<String>,
}

impl Heard {
    /// Nothing yet.
    pub(crate) fn new() -> Self {
        Self {
            booted: false,
            rests: false,
            rounds: Vec::new(),
            checks: 0,
            failures: 0,
            last_round: 0,
            corrupt: None,
            panic: None,
            at: Instant::now(),
            lines: VecDeque::new(),
        }
    }

    /// Adds a line of the console.
    pub(crate) fn line(&mut self, line: &str) {
        match console::parse(line) {
            None => {}
            Some(Line::Booted) => {
                self.booted = true;
                self.at = Instant::now();
            }
            Some(Line::Rests) => self.rests = true,
            Some(Line::Panic(text)) => self.panic = Some(text),
            Some(Line::Round(round)) => {
                self.at = Instant::now();
                self.rounds.push(self.at);
                self.checks += round.checks;
                self.failures += round.failures;
                self.last_round = round.number;
                if round.failures > 0 {
                    self.corrupt.get_or_insert(round);
                }
            }
        }
        if self.lines.len() == LINES_KEPT {
            self.lines.pop_front();
        }
        self.lines.push_back(line.trim_end().to_owned());
    }

    /// The first round with a wrong file, and that file.
    pub(crate) fn corrupt(&self) -> Option<(u64, String)> {
        let Round { number, first_failure, .. } = self.corrupt.as_ref()?;
        Some((*number, first_failure.clone().unwrap_or_else(|| "(file not named)".into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_and_failures_are_heard() {
        let mut heard = Heard::new();
        for line in ["PAGEONE-BOOTED files=3", "PAGEONE-ROUND 0 PASS checks=3\r\n", "x PAGEONE-ROUND 1 PASS checks=3"] {
            heard.line(line);
        }
        assert!(heard.booted && heard.corrupt.is_none() && heard.panic.is_none());
        assert_eq!((heard.rounds.len(), heard.checks, heard.last_round), (2, 6, 1));
        heard.line("PAGEONE-ROUND 2 CORRUPT checks=3 failures=1 file=a");
        heard.line("[ 1.0] Kernel panic - not syncing");
        assert_eq!(heard.corrupt(), Some((2, "a".into())));
        assert!(heard.failures == 1 && heard.panic.is_some());
    }
}
