//! `pageone config`: checks the daemon's configuration file, and shows a sample of it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Subcommand;
use engine::{Effect, SETTINGS, Setting};
use serde_json::json;

use super::daemon::file::{self, DEFAULT_FILE};
use super::daemon::settings::{DOMAIN_EXAMPLE, default_of, range};
use crate::cmd::Json;
use crate::reflow;

/// `pageone config …`.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Say all that is wrong with a configuration file; a running daemon is not asked
    #[command(after_help = "JSON: `file`; `settings`, their number, and `settings_set`, null if something is wrong; \
                            `problems`: `line` (0: none), `key` and `text`.")]
    Check {
        /// The file [default: /etc/pageone/pageone.toml, which may be missing]
        file: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Print a configuration file with every setting, explained, at its default
    Sample,
}

/// Runs it.
///
/// # Errors
///
/// All that is wrong with the file, each with line, key and remedy.
pub(crate) fn run(command: &Command) -> Result<()> {
    match command {
        Command::Check { file, json } => check(file.as_deref(), *json),
        Command::Sample => Ok(output::put!("{}", sample())?),
    }
}

fn check(file: Option<&Path>, json: Json) -> Result<()> {
    let checked = file::check(file, Some(file::PATIENCE))?;
    let name = file.unwrap_or(Path::new(DEFAULT_FILE)).display();
    let (all, set) = (SETTINGS.len(), checked.as_ref().ok().map(|(_, count)| count));
    let problems = checked.as_ref().err().map_or(&[][..], |problems| problems);
    let value = json!({ "file": name.to_string(), "settings": all, "settings_set": set, "problems": problems });
    let text = |count| format!("{name}: nothing is wrong; {count} of {all} settings are set\n");
    json.print(&value, || set.map(text).unwrap_or_default())?;
    checked.map_err(|problems| file::wrong(file, &problems))?;
    Ok(())
}

/// The longest line of the sample, in characters.
const WIDTH: usize = 100;

/// The sample file: every setting with its explanation, commented out.
pub(crate) fn sample() -> String {
    let head = format!(
        "Settings of the PageONE daemon. Every one is here with its default; remove the `#` before a key to change it. \
         `pageone config check` says what is wrong, and `systemctl reload pageone` puts changes in effect while \
         clients stay connected. This file is {DEFAULT_FILE}; `pageone config sample` prints it as it was."
    );
    let mut out = reflow(&head, "# ", "# ", WIDTH) + "\n";
    // What follows a table's head belongs to the table, so tables come last.
    let (tables, values): (Vec<_>, Vec<_>) = SETTINGS.iter().partition(|setting| default_of(setting).is_object());
    for setting in values.into_iter().chain(tables) {
        out += &format!("\n{}\n{}", entry(setting), line(setting));
    }
    out
}

fn entry(setting: &Setting) -> String {
    let unit = if setting.unit.is_empty() { String::new() } else { format!(" Unit: {}.", setting.unit) };
    let facts = format!("{}{unit} Range: {}. {}", setting.help(), range(setting.range), effect(setting.effect));
    reflow(&facts, "# ", "# ", WIDTH)
}

/// When a change counts, in a sentence.
pub(crate) fn effect(effect: Effect) -> &'static str {
    match effect {
        Effect::AtOnce => "A reload puts a change in effect at once.",
        Effect::NewClients => "After a reload a change is in effect for clients that come from then on.",
        Effect::Restart => "A change takes effect when the daemon is started again.",
    }
}

/// The key with its default, commented out by a `#` alone; explanations have a space behind it.
fn line(setting: &Setting) -> String {
    let default = default_of(setting);
    if default.is_object() {
        return DOMAIN_EXAMPLE.lines().map(|line| format!("#{line}\n")).collect();
    }
    format!("#{} = {default}\n", setting.key)
}

#[cfg(test)]
mod tests {
    use super::super::daemon::file;
    use super::*;

    #[test]
    fn the_sample_is_right_as_it_is_and_with_every_key_set() {
        let sample = sample();
        assert_eq!(file::parse(&sample).unwrap(), (engine::Config::default(), 0), "only comments");
        let keys: String = sample
            .lines()
            .filter_map(|line| line.strip_prefix('#'))
            .filter(|line| !line.starts_with(' '))
            .fold(String::new(), |all, line| all + line + "\n");
        let (config, count) = file::parse(&keys).unwrap_or_else(|problems| panic!("{problems:?}\n{keys}"));
        assert_eq!(count, SETTINGS.len(), "every setting is in it");
        let without = engine::Config { domains: Default::default(), ..config };
        assert_eq!(without, engine::Config::default());
        assert!(sample.lines().all(|line| line.chars().count() <= WIDTH));
    }
}
