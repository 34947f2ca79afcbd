//! What was found, and how it is printed.

use std::fmt::{self, Display, Formatter};

use control::units::counted;
use output::text::printable;
use serde::Serialize;

/// What a check says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// Merging runs; something beside it does not, or somebody wants it so.
    Note,
    /// It is in the way of merging.
    Blocks,
}

/// A command that mends what a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Fix {
    /// For a shell, run by root.
    pub(super) command: String,
    /// Whether `--apply` runs it: it restarts nothing that runs, changes no file of another
    /// package, and takes nothing from anybody.
    pub(super) safe: bool,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    pub(super) check: &'static str,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<Fix>,
}

impl Check {
    pub(super) fn ok(check: &'static str, found: impl Display) -> Self {
        Self { check, verdict: Verdict::Ok, found: printable(&found.to_string()), remedy: None, fix: None }
    }

    pub(super) fn note(check: &'static str, found: impl Display, remedy: impl Display) -> Self {
        Self { verdict: Verdict::Note, remedy: Some(printable(&remedy.to_string())), ..Self::ok(check, found) }
    }

    pub(super) fn blocks(check: &'static str, found: impl Display, remedy: impl Display) -> Self {
        Self { verdict: Verdict::Blocks, ..Self::note(check, found, remedy) }
    }

    /// With a command that `--apply` does not run.
    pub(super) fn fix(self, command: impl Into<String>) -> Self {
        Self { fix: Some(Fix { command: command.into(), safe: false }), ..self }
    }

    /// With a command that `--apply` runs.
    pub(super) fn safe_fix(self, command: impl Into<String>) -> Self {
        Self { fix: Some(Fix { command: command.into(), safe: true }), ..self }
    }
}

/// A guest, and what was found of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Guest {
    pub(super) pid: i32,
    /// Its name, if its manager or its command line says one; else that of its program.
    pub(super) name: String,
    /// By what it was recognised.
    pub(super) by: String,
    pub(super) checks: Vec<Check>,
}

impl Guest {
    /// How it is called in a line.
    pub(super) fn title(&self) -> String {
        format!("guest {} {} ({})", self.pid, printable(&self.name), printable(&self.by))
    }
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) host: Vec<Check>,
    pub(super) guests: Vec<Guest>,
    /// Processes that this account may not look into.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hidden: Option<usize>,
}

impl Report {
    /// Says how much is in the way of merging; `None`: nothing.
    pub(super) fn in_the_way(&self) -> Option<String> {
        let blocks = |checks: &[Check]| checks.iter().filter(|check| check.verdict == Verdict::Blocks).count();
        let host = blocks(&self.host);
        let guests = self.guests.iter().filter(|guest| blocks(&guest.checks) > 0).count();
        let of_host = format!("{host} of {} of the host failed", counted(self.host.len(), "check"));
        let of_guests = format!("{guests} of {} cannot be merged as things are", counted(self.guests.len(), "guest"));
        match (host, guests) {
            (0, 0) => None,
            (_, 0) => Some(of_host),
            (0, _) => Some(of_guests),
            _ => Some(format!("{of_host}; {of_guests}")),
        }
    }

    /// Every check, with the title of what it is of.
    pub(super) fn all(&self) -> impl Iterator<Item = (String, &Check)> {
        let host = self.host.iter().map(|check| ("host".to_owned(), check));
        host.chain(self.guests.iter().flat_map(|guest| guest.checks.iter().map(|check| (guest.title(), check))))
    }
}

impl Display for Check {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mark = match self.verdict {
            Verdict::Ok => "ok    ",
            Verdict::Note => "note  ",
            Verdict::Blocks => "BLOCKS",
        };
        write!(f, "  {mark}  {:<18} {}", self.check, self.found)?;
        let remedy = self.remedy.as_ref().filter(|remedy| !remedy.is_empty());
        remedy.map_or(Ok(()), |remedy| write!(f, " → {remedy}"))
    }
}

impl Display for Report {
    /// Several lines, with line ends.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "host")?;
        self.host.iter().try_for_each(|check| writeln!(f, "{check}"))?;
        for guest in &self.guests {
            writeln!(f, "\n{}", guest.title())?;
            guest.checks.iter().try_for_each(|check| writeln!(f, "{check}"))?;
        }
        if self.guests.is_empty() {
            writeln!(f, "\nno guest was found")?;
        }
        match self.hidden {
            Some(hidden) => {
                writeln!(
                    f,
                    "\nprocesses that may not be looked into: {hidden} → run this as root, outside of containers"
                )
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_in_whose_way_something_is_decides_as_the_host_does() {
        let report = |host, guest| Report {
            host: vec![Check { verdict: host, ..Check::note("a", "x", "y") }],
            guests: vec![Guest {
                pid: 7,
                name: "web\n".into(),
                by: "KVM".into(),
                checks: vec![Check { verdict: guest, ..Check::note("b", "x\u{1b}", "y") }],
            }],
            hidden: None,
        };
        assert_eq!(report(Verdict::Ok, Verdict::Note).in_the_way(), None);
        let guest = report(Verdict::Note, Verdict::Blocks);
        assert_eq!(guest.in_the_way().unwrap(), "1 of 1 guest cannot be merged as things are");
        assert_eq!(report(Verdict::Blocks, Verdict::Ok).in_the_way().unwrap(), "1 of 1 check of the host failed");
        let text = guest.to_string();
        assert!(text.contains("\nguest 7 web (KVM)\n  BLOCKS  b                  x → y\n"), "{text}");
    }
}
