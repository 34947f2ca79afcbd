//! The source's words, in which all that two guests cannot both have is made new.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::cards;
use crate::disks::named;
use crate::record::{Description, Disk};
use guests::words::{Opt, name, options, parts, set_first, set_part, written};

/// What begins with these is a TCP socket.
const SOCKETS: [&str; 4] = ["tcp", "telnet", "websocket", "tn3270"];
/// The address that this host alone reaches.
const HERE: &str = "127.0.0.1";

/// A clone's own image over a disk's.
pub(super) fn overlay(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("disk-{number}.qcow2"))
}

/// Whether a file of a clone's directory is an image that it was started with.
pub fn is_own_image(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix("disk-")?.strip_suffix(".qcow2"));
    number.is_some_and(|number| number.parse::<usize>().is_ok())
}

/// The source's words for a clone, whose files are in `directory`: disks have images of their own,
/// sockets and files lie in the directory, ports are any that are free, network cards have new
/// addresses, the name has the directory's behind it, and the guest is told that it is a
/// clone.
pub(super) fn rewrite(description: &Description, directory: &Path) -> Vec<String> {
    let mut words = description.words.clone();
    let mut gone = Vec::new();
    for option in options(&description.words) {
        match option.name {
            // `-s` is a port for debuggers that cannot be another.
            "daemonize" | "s" => gone.push(option.at),
            // It has that account already.
            "runas" => gone.extend([option.at, option.at + 1]),
            _ => {}
        }
        if let Some(value) = fresh(&option, &description.disks, directory)
            && let Some(word) = words.get_mut(option.at + 1)
        {
            *word = value;
        }
    }
    let kept = |at: &usize| !gone.contains(at);
    let own = directory.file_name().unwrap_or_default().to_string_lossy();
    let all = name(&words).map_or_else(|| own.clone().into_owned(), |name| format!("{name}-{own}"));
    // Of several the last counts, part by part.
    let named = ["-name".to_owned(), format!("guest={}", written(&all))];
    let words = words.iter().enumerate().filter(|(at, _)| kept(at)).map(|(_, word)| word.clone());
    let mut words: Vec<String> = words.collect();
    cards::renew(&mut words, &description.facts.machine);
    words.extend(named);
    words
}

/// The words, with all that listens reached from this host alone: where they say nothing QEMU
/// listens on all addresses, and asks nobody for a password.
pub(super) fn reached_from_here(words: &[String]) -> Vec<String> {
    let mut all = words.to_vec();
    for option in options(words) {
        if let (Some(value), Some(word)) = (here(&option), all.get_mut(option.at + 1)) {
            *word = value;
        }
    }
    all
}

fn here(option: &Opt<'_>) -> Option<String> {
    let is_elsewhere = |host: &str| !host.starts_with("127.") && !matches!(host, "localhost" | "[::1]" | "::1");
    let (value, first) = (option.value, &*option.first());
    let has = |key: &str| parts(value).any(|part| part == key || part.strip_prefix(key).is_some_and(|to| to == "=on"));
    match option.name {
        "vnc" if !has("reverse") => {
            let (host, number) = first.rsplit_once(':')?;
            let is_address = number.parse::<u16>().is_ok() && is_elsewhere(host);
            is_address.then(|| set_first(value, &format!("{HERE}:{number}")))
        }
        "netdev" | "nic" | "net" => {
            let forwarded = |part: &str| {
                let (host, guest) = part.strip_prefix("hostfwd=")?.split_once('-')?;
                let (from, port) = host.rsplit_once(':')?;
                let (protocol, host) = from.split_once(':').unwrap_or((from, ""));
                is_elsewhere(host).then(|| format!("hostfwd={protocol}:{HERE}:{port}-{guest}"))
            };
            let all = parts(value).map(|part| forwarded(&part).unwrap_or_else(|| part.into_owned()));
            Some(all.map(|part| written(&part).into_owned()).collect::<Vec<_>>().join(","))
        }
        "chardev" if has("server") && option.part("port").is_some() => Some(set_part(value, "host", HERE)),
        "gdb" | "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" if option.name == "gdb" || has("server") => {
            let (kind, rest) = first.split_once(':')?;
            let (host, port) = rest.rsplit_once(':')?;
            let is_address = SOCKETS.contains(&kind) && is_elsewhere(host);
            is_address.then(|| set_first(value, &format!("{kind}:{HERE}:{port}")))
        }
        _ => None,
    }
}

/// An option's value for a clone, if it is not the source's.
fn fresh(option: &Opt<'_>, disks: &[Disk], directory: &Path) -> Option<String> {
    let own = |path: &str| directory.join(Path::new(path).file_name().unwrap_or_default()).display().to_string();
    let value = option.value;
    if let Some(path) = named(option) {
        let number = disks.iter().position(|disk| disk.word == path)?;
        let image = overlay(directory, number).display().to_string();
        let key =
            ["filename", "file.filename", "file"].into_iter().find(|key| option.part(key).as_ref() == Some(&path));
        let value = key.map_or_else(|| image.clone(), |key| set_part(value, key, &image));
        // The image over a raw one is qcow2.
        let keys = ["format", "driver"].into_iter().filter(|key| disks[number].raw && option.part(key).is_some());
        return Some(keys.fold(value, |value, key| set_part(&value, key, "qcow2")));
    }
    let listens = parts(value).any(|part| matches!(&*part, "server" | "server=on"));
    // Nobody may be there who connects.
    let unattended = |value: String| match listens && !parts(&value).any(|part| part == "nowait") {
        true => set_part(&value, "wait", "off"),
        false => value,
    };
    let tcp = |first: &str| {
        let kind = first.split(':').next().unwrap_or_default();
        let (host, _) = first.rsplit_once(':').filter(|_| SOCKETS.contains(&kind))?;
        Some(set_first(value, &format!("{host}:0")))
    };
    let unix = |first: &str| Some(set_first(value, &format!("unix:{}", own(first.strip_prefix("unix:")?))));
    match option.name {
        "pidfile" | "D" => Some(own(value)),
        "chardev" => {
            let mut new = value.to_owned();
            if let Some(path) = option.part("path").filter(|_| matches!(&*option.first(), "socket" | "file" | "pipe")) {
                new = set_part(&new, "path", &own(&path));
            }
            if let Some(log) = option.part("logfile") {
                new = set_part(&new, "logfile", &own(&log));
            }
            if listens && option.part("port").is_some() {
                new = set_part(&new, "port", "0");
            }
            Some(unattended(new))
        }
        "gdb" => tcp(&option.first()),
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" => {
            // Behind `file:` all is the path.
            let file = value.strip_prefix("file:").map(|path| format!("file:{}", own(path)));
            let first = option.first();
            file.or_else(|| unix(&first).or_else(|| tcp(&first)).map(unattended))
        }
        "vnc" if value.starts_with("unix:") => unix(&option.first()),
        "vnc" if option.part("to").is_none() && value != "none" => Some(format!("{value},to=999")),
        "netdev" | "nic" | "net" if value.contains("hostfwd=") => {
            Some(parts(value).map(|part| written(&any_port(&part)).into_owned()).collect::<Vec<_>>().join(","))
        }
        "device" if option.part("guest-cid").is_some() => Some(set_part(value, "guest-cid", &new_cid().to_string())),
        "device" if option.first() == "vmgenid" => Some(set_part(value, "guid", "auto")),
        _ => None,
    }
}

/// A forwarded port as any that is free: `hostfwd=tcp:ADDRESS:PORT-ADDRESS:PORT`.
fn any_port(part: &str) -> String {
    let rule = part.strip_prefix("hostfwd=");
    let forward = rule.and_then(|rule| rule.split_once('-'));
    match forward.and_then(|(host, guest)| Some((host.rsplit_once(':')?.0, guest))) {
        Some((host, guest)) => format!("hostfwd={host}:0-{guest}"),
        None => part.to_owned(),
    }
}

/// An address for sockets between host and guest (vsock(7)) that hardly another guest has.
fn new_cid() -> u32 {
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // The smallest and the largest are the host's and the kernel's.
    u32::from_ne_bytes(bytes) >> 1 | 1 << 20
}

#[cfg(test)]
mod tests;
