//! The daemon's configuration: a TOML file, and the options that stand for some of its keys.
//!
//! Keys, options, defaults and ranges all come from the table in [`engine::Config`].

use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use engine::{Config, Range, SETTINGS, Setting};

use crate::{Code, Coded};

/// A domain that spans several users, as an example.
pub(crate) const DOMAIN_EXAMPLE: &str = "[domains.web]\nuids = [1000, 1001]\n";

/// The settings that the command line gives, as text.
pub(crate) struct Options(Vec<(&'static Setting, String)>);

impl Options {
    /// Whether an option is given.
    fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(setting, _)| setting.key == key)
    }

    /// Puts the options in the place of what the file says.
    pub(crate) fn apply(&self, config: &mut Config) -> Result<()> {
        for (setting, text) in &self.0 {
            let Some(option) = setting.option else { continue };
            let wrong =
                |e: engine::ConfigError| Coded(Code::Configuration, format!("--{}: {}", long(setting), e.problem));
            (option.set)(config, text).map_err(wrong)?;
        }
        // A target alone sets both.
        if self.has("target_scan_time") && !self.has("merge_period") {
            config.merge_period = config.target_scan_time;
        }
        Ok(())
    }
}

/// The name of a setting's option, without its hyphens.
pub(crate) fn long(setting: &Setting) -> String {
    setting.key.replace('_', "-")
}

/// A text that is no number is wrong usage. An unknown word is a wrong configuration, as it is in
/// the file.
fn is_readable(setting: &Setting, text: &str) -> Result<String, engine::ConfigError> {
    match (setting.range, setting.option) {
        (Range::OneOf(_), _) | (_, None) => {}
        (_, Some(option)) => (option.set)(&mut Config::default(), text)?,
    }
    Ok(text.to_owned())
}

/// The option's help: the setting's, with its unit and default.
fn help(setting: &Setting) -> String {
    let unit = if setting.unit.is_empty() { String::new() } else { format!("{}, ", setting.unit) };
    let default = default_of(setting).to_string();
    format!("{} [{unit}default: {}]", setting.help().trim_end_matches('.'), default.trim_matches('"'))
}

/// The default of a setting, as JSON has it.
pub(crate) fn default_of(setting: &Setting) -> serde_json::Value {
    let all = serde_json::to_value(Config::default()).unwrap_or_default();
    all.get(setting.key).cloned().unwrap_or_default()
}

/// A range in words, for people.
pub(crate) fn range(range: Range) -> String {
    match range {
        Range::Any => "any value of its type".into(),
        Range::Between(least, most) => format!("{least} to {most}"),
        Range::NoneOr(most) => format!("0, or 0.1 to {most}"),
        Range::AtMost(most) => format!("0 to {most}"),
        Range::MergePeriod => "0 to `merge_period`; whole numbers with mode `scan-time`".into(),
        Range::OneOf(names) => names().iter().map(|name| format!("`\"{name}\"`")).collect::<Vec<_>>().join(", "),
    }
}

fn args() -> impl Iterator<Item = Arg> {
    SETTINGS.iter().filter_map(|setting| {
        let option = setting.option?;
        let read = move |text: &str| is_readable(setting, text).map_err(|e| e.problem);
        Some(
            Arg::new(setting.key)
                .long(long(setting))
                .value_name(option.value_name)
                .help(help(setting))
                .value_parser(read),
        )
    })
}

impl clap::Args for Options {
    fn augment_args(command: Command) -> Command {
        command.args(args())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Options {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |setting: &'static Setting| {
            let text = setting.option.and_then(|_| matches.get_one::<String>(setting.key))?;
            Some((setting, text.clone()))
        };
        Ok(Self(SETTINGS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
