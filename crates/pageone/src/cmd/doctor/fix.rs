//! The commands that mend what was found: shown by `--fix`, the safe ones run by `--apply`.

use std::fmt::Write;
use std::process::Command;

use output::StdoutError;

use super::report::{Check, Fix, Report};

/// The commands, each once, with what they are for.
fn commands(report: &Report) -> Vec<(String, &Check, &Fix)> {
    let mut all: Vec<(String, &Check, &Fix)> = Vec::new();
    for (title, check) in report.all() {
        let Some(fix) = &check.fix else { continue };
        if !all.iter().any(|(.., known)| known == &fix) {
            all.push((title, check, fix));
        }
    }
    all
}

/// For a shell: each command below a comment that says what it mends. Those that `--apply` does not
/// run are for a person to judge, since they restart something or change others' files.
pub(super) fn script(report: &Report) -> String {
    let mut out = String::new();
    for (title, check, fix) in commands(report) {
        let by = if fix.safe { "--apply runs it" } else { "yours to run" };
        let _ = writeln!(out, "# {title}: {}: {} ({by})\n{}", check.check, check.found, fix.command);
    }
    if out.is_empty() { "# no command is known that would mend anything\n".into() } else { out }
}

/// Runs the safe ones, and says what it did and what it left. Returns how many it ran.
pub(super) fn apply(report: &Report) -> Result<usize, StdoutError> {
    let mut count = 0;
    for (title, check, fix) in commands(report) {
        if !fix.safe {
            output::line!("left to you  {title}: {}: {}", check.check, fix.command)?;
            continue;
        }
        count += 1;
        let done = Command::new("sh").args(["-c", &fix.command]).stdout(std::io::stderr()).status();
        match done {
            Ok(status) if status.success() => output::line!("done         {}", fix.command)?,
            Ok(status) => {
                output::line!("FAILED       {}: {status}; run it as root, and read what it said", fix.command)?
            }
            Err(e) => output::line!("FAILED       {}: {e}", fix.command)?,
        }
    }
    if count == 0 {
        output::line!("nothing was done: no safe command is known for what was found")?;
    }
    output::line!("")?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_safe_commands_are_run_and_each_once() {
        let dir = tempfile::tempdir().unwrap();
        let count = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap_or_default().len();
        let command = |file: &str| format!("printf x >> '{}'", dir.path().join(file).display());
        let safe = Check::note("a", "x", "y").safe_fix(command("safe"));
        let host =
            vec![safe.clone(), safe, Check::blocks("b", "x", "y").fix(command("unsafe")), Check::blocks("c", "x", "y")];
        let report = Report { host, guests: Vec::new(), hidden: None };
        let script = script(&report);
        assert_eq!(script.lines().count(), 4, "{script}");
        assert!(script.contains("(--apply runs it)") && script.contains("(yours to run)"), "{script}");
        assert_eq!(apply(&report).unwrap(), 1);
        assert_eq!((count("safe"), count("unsafe")), (1, 0));
    }
}
