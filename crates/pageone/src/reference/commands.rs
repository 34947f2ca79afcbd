//! `commands.md`, from the command line's definition.

use std::fmt::Write;

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::{head, wrap};
use crate::exit::Code;

pub(super) fn page() -> String {
    let mut program = crate::Cli::command();
    program.build();
    let mut out = head("Commands", "the program's command line, as `pageone --help` shows it");
    let _ = writeln!(out, "\n{}\n", about(&program));
    let _ = writeln!(out, "Every command takes:\n");
    options(&mut out, &program);
    commands(&mut out, &program, "##");
    let _ = writeln!(out, "\n## Exit codes\n");
    for code in Code::ALL {
        let _ = writeln!(out, "- {}: {}", code as u8, code.meaning());
    }
    let _ = writeln!(
        out,
        "\n{}",
        wrap(
            "`pageone run` has the exit code of the started program. [Errors](errors.md) says what to do about each.",
            "",
            ""
        )
    );
    out
}

/// The visible subcommands, each with its own.
fn commands(out: &mut String, command: &Command, level: &str) {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        let usage = sub.clone().render_usage().to_string();
        let name = sub.get_bin_name().unwrap_or(sub.get_name());
        let _ = writeln!(out, "\n{level} `{name}`\n\n{}\n", about(sub));
        let _ = writeln!(out, "`{}`", usage.trim_start_matches("Usage: ").replace(" [OPTIONS]", "").trim());
        if sub.get_arguments().any(is_own) {
            out.push('\n');
            options(out, sub);
        }
        if let Some(more) = sub.get_after_help() {
            let _ = writeln!(out, "\n{}", wrap(&more.to_string(), "", ""));
        }
        commands(out, sub, &format!("{level}#"));
    }
}

fn about(command: &Command) -> String {
    let text = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    wrap(&format!("{}.", text.trim_end_matches('.')), "", "")
}

/// Whether an argument is the command's own.
fn is_own(arg: &Arg) -> bool {
    !arg.is_hide_set() && !arg.is_global_set() && !matches!(arg.get_id().as_str(), "help" | "version")
}

fn options(out: &mut String, command: &Command) {
    let is_program = command.get_name() == "pageone";
    for arg in command.get_arguments().filter(|arg| is_own(arg) || is_program && arg.is_global_set()) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let mut notes = Vec::new();
        let default: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        if !default.is_empty() && takes_value(arg) {
            notes.push(format!("default: `{}`", default.join(" ")));
        }
        let values: Vec<_> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
        if !values.is_empty() && takes_value(arg) {
            notes.push(format!("one of {}", values.join(", ")));
        }
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        let _ = writeln!(out, "{}", wrap(&format!("`{}`: {help}{notes}", name(arg)), "- ", "  "));
    }
}

fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

/// The argument as one types it.
fn name(arg: &Arg) -> String {
    let names: Vec<_> = arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    match arg.get_long() {
        Some(long) if takes_value(arg) => format!("--{long} {}", names.join(" ")),
        Some(long) => format!("--{long}"),
        None => names.join(" "),
    }
}
