//! A clone that is tried before its guest is stored: QEMU with its words, without memory, contents
//! of disks, and networks of the host. It is asked what it is made of, and ends.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::directory::{Passing, hand_over, new_directory, tail};
use super::rewrite::overlay;
use super::{CloneError, Options, Ram, check_image, make, run_error, spawn};
use crate::disks::named;
use crate::facts::Facts;
use crate::monitor::{Monitor, MonitorError};
use crate::names::WRITE;
use crate::prepare;
use crate::qcow2;
use crate::record::{Description, Record};
use crate::rights::{Asked, Rights, Untried};
use guests::words::{Opt, options, parts, written};

/// Files that a guest can read and not write: each clone has the same.
pub(crate) fn media(qmp: &mut Monitor) -> Result<Vec<String>, MonitorError> {
    let all = qmp.execute("query-block", json!({}))?;
    let read_only = |one: &&Value| one["inserted"]["ro"] == true;
    let file = |one: &Value| one["inserted"]["image"]["filename"].as_str().unwrap_or_default().to_owned();
    Ok(all.as_array().into_iter().flatten().filter(read_only).map(file).collect())
}

/// Sees that a clone of a guest would start, and be like it, if one may be tried. `media`:
/// [`media`] of the guest.
///
/// # Errors
/// If it would not.
pub(crate) fn run(description: &Description, media: &[String], asked: &Asked) -> Result<Option<Untried>, CloneError> {
    let tried = Description { words: alone(&description.words), ..description.clone() };
    let rights = match Rights::of_trial(&tried, asked) {
        Ok(rights) => rights,
        Err(why) => return Ok(Some(why)),
    };
    let passing = Passing::new(&std::env::temp_dir())?;
    let directory = passing.inner("files");
    new_directory(&directory)?;
    hand_over(&directory, &rights.account)?;
    match run_in(tried, media, &rights, &directory) {
        // The guest runs this program: what cannot be had is its place.
        Err(CloneError::Run { source, .. }) if source.kind() == ErrorKind::PermissionDenied => Ok(Some(source.into())),
        done => done.map(|()| None),
    }
}

fn run_in(description: Description, media: &[String], rights: &Rights, directory: &Path) -> Result<(), CloneError> {
    let images = || {
        description.disks.iter().enumerate().try_for_each(|(number, disk)| {
            let image = overlay(directory, number);
            // The guest has locked what it writes to.
            qcow2::create(&image, check_image(disk)?, None, 0o600).map_err(make(&image))
        })
    };
    rights.account.with_files(|| Ok(images())).map_err(make(directory))??;
    let record = Record { description, stream: Vec::new() };
    let description = &record.description;
    let ram = File::from(prepare::Ram::empty(description.facts.ram).map_err(make(Path::new("memory")))?.fd);
    let options = Options::passing(&record, rights, Ram::Tried(&ram));
    let log = directory.join("output.log");
    let (mut process, monitor, _) = spawn(&options, directory, &log).map_err(run_error(description))?;
    let asked = Monitor::begin(monitor).and_then(|mut qmp| Ok((Facts::of(&mut qmp)?, self::media(&mut qmp)?)));
    process.kill();
    let output = || rights.account.with_files(|| Ok(tail(&log))).unwrap_or_default();
    let (facts, has) = asked.map_err(|source| CloneError::Qmp { source, output: output() })?;
    let mut differences = description.facts.differences(&facts);
    if has != media {
        differences.push(format!("media: {} (the guest has {})", has.join(", "), media.join(", ")));
    }
    if differences.is_empty() { Ok(()) } else { Err(CloneError::Unlike(differences)) }
}

/// The words, with networks of the host replaced by one of QEMU's own: the guest has them now.
fn alone(words: &[String]) -> Vec<String> {
    let mut all = words.to_vec();
    for option in options(words) {
        if let (Some(value), Some(word)) = (without_host(&option), all.get_mut(option.at + 1)) {
            *word = value;
        }
    }
    all
}

fn without_host(option: &Opt<'_>) -> Option<String> {
    if !matches!(&*option.first(), "tap" | "bridge" | "l2tpv3" | "vde" | "netmap" | "af-xdp") {
        return None;
    }
    let kept = |keys: &[&str]| {
        let is_kept = |part: &str| part.split_once('=').is_some_and(|(key, _)| keys.contains(&key));
        parts(option.value)
            .skip(1)
            .filter(|part| is_kept(part))
            .map(|part| format!(",{}", written(&part)))
            .collect::<String>()
    };
    match option.name {
        "netdev" => Some(format!("hubport,hubid=0{}", kept(&["id"]))),
        "nic" | "net" => Some(format!("user{}", kept(&["id", "model", "mac", "netdev"]))),
        _ => None,
    }
}

/// The option by which QEMU connects to another program as it starts. A clone would find nobody in
/// its own directory, or another guest's partner.
pub(crate) fn connects(words: &[String]) -> Option<String> {
    let is_one = |option: &Opt<'_>| {
        let first = &*option.first();
        let names_socket = match option.name {
            "chardev" => first == "socket" && option.part("fd").is_none(),
            "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" => {
                let kind = first.strip_prefix("mon:").unwrap_or(first).split(':').next().unwrap_or_default();
                first.contains(':') && matches!(kind, "unix" | "tcp" | "telnet" | "websocket" | "tn3270")
            }
            _ => false,
        };
        let waits = |part: &str| {
            matches!(part, "server" | "server=on" | "server=yes" | "server=true")
                || part.starts_with("reconnect=")
                || part.starts_with("reconnect-ms=")
        };
        names_socket && !parts(option.value).any(|part| waits(&part))
    };
    options(words).find(is_one).map(|option| format!("-{} {}", option.name, option.value))
}

/// What `words` are with all values of JSON in QEMU's own form: `key=value,outer.inner=value`.
pub(crate) fn plain(mut words: Vec<String>) -> Vec<String> {
    let found: Vec<(usize, String)> =
        options(&words).filter_map(|option| Some((option.at + 1, flat(&option)?))).collect();
    for (at, value) in found {
        words[at] = value;
    }
    words
}

/// The first image that these words have QEMU write to though a snapshot has it: nobody may, as its
/// mode says, but root's QEMU does.
pub fn stored_image(words: &[String]) -> Option<PathBuf> {
    const KEPT: [&str; 6] = ["readonly", "readonly=on", "read-only=on", "snapshot=on", "media=cdrom", "if=pflash"];
    let words = plain(words.to_vec());
    let is_kept = |option: &Opt<'_>| parts(option.value).any(|part| KEPT.contains(&&*part));
    let is_stored =
        |image: &PathBuf| std::fs::metadata(image).is_ok_and(|meta| meta.is_file() && meta.mode() & WRITE == 0);
    let all = options(&words).any(|option| option.name == "snapshot");
    let mut written = options(&words).filter(|option| !all && !is_kept(option));
    written.find_map(|option| named(&option).map(|image| PathBuf::from(&*image)).filter(is_stored))
}

fn flat(option: &Opt<'_>) -> Option<String> {
    let kind = match option.name {
        "device" | "blockdev" | "audiodev" => "driver",
        "netdev" => "type",
        "object" => "qom-type",
        _ => return None,
    };
    let Value::Object(mut all) = option.value.starts_with('{').then(|| serde_json::from_str(option.value).ok())??
    else {
        return None;
    };
    let mut text = written(all.remove(kind)?.as_str()?).into_owned();
    all.iter().for_each(|(key, value)| add(key, value, &mut text));
    Some(text)
}

fn add(key: &str, value: &Value, text: &mut String) {
    match value {
        Value::Object(all) => all.iter().for_each(|(inner, value)| add(&format!("{key}.{inner}"), value, text)),
        Value::Array(all) => all.iter().enumerate().for_each(|(at, value)| add(&format!("{key}.{at}"), value, text)),
        Value::Null => {}
        Value::Bool(is_on) => *text += &format!(",{key}={}", if *is_on { "on" } else { "off" }),
        Value::String(value) => *text += &format!(",{key}={}", written(value)),
        Value::Number(number) => *text += &format!(",{key}={number}"),
    }
}

#[cfg(test)]
mod tests;
