//! `configuration.md`, from the table of settings.

use std::fmt::Write;

use engine::{SETTINGS, Setting};

use super::{head, wrap};
use crate::cmd::config::effect;
use crate::cmd::daemon::file::DEFAULT_FILE;
use crate::cmd::daemon::settings::{default_of, long, range};

pub(super) fn page() -> String {
    let mut out = head("Configuration", "the table of settings in `crates/engine/src/config.rs`");
    let intro = format!(
        "The daemon reads `{DEFAULT_FILE}`, or the file that `--config` names. The file is TOML. A key that is not \
         listed here is an error, and so is a value out of its range: `pageone daemon` then ends with exit code 5 and \
         names the file, and the line and the key of each problem, as `pageone config check` does. SIGHUP (`systemctl \
         reload pageone`) makes a running daemon read its file again; clients stay connected, and a file with a \
         problem is refused as a whole. So is a pipe then. An option of `pageone daemon` goes before the key of the same name. \
         `--target-scan-time` alone sets the merge period, too."
    );
    let _ = writeln!(out, "\n{}\n\n## All keys with their defaults\n\n```toml", wrap(&intro, "", ""));
    let is_table = |setting: &&Setting| default_of(setting).is_object() || default_of(setting).is_array();
    for setting in SETTINGS.iter().filter(|setting| !is_table(setting)) {
        let _ = writeln!(out, "{} = {}", setting.key, default_of(setting));
    }
    let _ = writeln!(out, "\n[domains.web]            # an example: there is no such domain by default");
    let _ = writeln!(out, "uids = [1000, 1001]\n");
    let _ = writeln!(out, "[[tenants]]              # an example: there is no such rule by default");
    let _ = writeln!(out, "manager = \"proxmox\"\nby = \"tag\"\nis = [\"acme\", \"umbrella\"]\n```\n\n## Keys\n");
    for setting in SETTINGS {
        entry(&mut out, setting);
    }
    out
}

fn entry(out: &mut String, setting: &Setting) {
    let unit = if setting.unit.is_empty() { "none" } else { setting.unit };
    let default = default_of(setting);
    let default = if default.is_object() || default.is_array() { "none".to_owned() } else { format!("`{default}`") };
    let option = match setting.option {
        Some(option) => format!("`--{} {}`", long(setting), option.value_name),
        None => "none".into(),
    };
    let facts = format!(
        "Unit: {unit}. Range: {}. Default: {default}. Option: {option}. {}",
        range(setting.range),
        effect(setting.effect)
    );
    let _ = writeln!(out, "### `{}`\n\n{}\n\n{}\n", setting.key, wrap(setting.help(), "", ""), wrap(&facts, "", ""));
}
