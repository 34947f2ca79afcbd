//! The source's words, in which all that two guests cannot both have is made new.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::disks::named;
use crate::record::{Description, Disk};
use guests::words::{Opt, options, parts, set_first, set_part, written};

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
/// sockets and files lie in the directory, forwarded ports are any that are free, network cards
/// have new addresses, and the guest is told that it is a clone.
pub(super) fn rewrite(description: &Description, directory: &Path) -> Vec<String> {
    let mut words = description.words.clone();
    let mut gone = Vec::new();
    for option in options(&description.words) {
        if option.name == "daemonize" {
            gone.push(option.at);
        } else if let Some(value) = fresh(&option, &description.disks, directory)
            && let Some(word) = words.get_mut(option.at + 1)
        {
            *word = value;
        }
    }
    let kept = |at: &usize| !gone.contains(at);
    words.into_iter().enumerate().filter(|(at, _)| kept(at)).map(|(_, word)| word).collect()
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
    let unix = |first: &str| Some(set_first(value, &format!("unix:{}", own(first.strip_prefix("unix:")?))));
    match option.name {
        "pidfile" | "D" => Some(own(value)),
        "chardev" if matches!(&*option.first(), "socket" | "file" | "pipe") => {
            Some(set_part(value, "path", &own(&option.part("path")?)))
        }
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" => {
            // Behind `file:` all is the path.
            let file = value.strip_prefix("file:").map(|path| format!("file:{}", own(path)));
            file.or_else(|| unix(&option.first()))
        }
        "vnc" if value.starts_with("unix:") => unix(&option.first()),
        "vnc" if option.part("to").is_none() && value != "none" => Some(format!("{value},to=999")),
        "netdev" | "nic" | "net" if value.contains("hostfwd=") || option.part("mac").is_some() => {
            let value = parts(value).map(|part| written(&any_port(&part)).into_owned()).collect::<Vec<_>>().join(",");
            Some(if option.part("mac").is_some() { set_part(&value, "mac", &new_mac()) } else { value })
        }
        "device" if is_network_card(&option.first()) => Some(set_part(value, "mac", &new_mac())),
        "device" if option.first() == "vmgenid" => Some(set_part(value, "guid", "auto")),
        _ => None,
    }
}

fn is_network_card(device: &str) -> bool {
    ["virtio-net", "e1000", "rtl8139", "vmxnet3", "igb", "ne2k_pci", "pcnet"]
        .iter()
        .any(|kind| device.starts_with(kind))
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

/// An address of QEMU's range for guests.
fn new_mac() -> String {
    let mut bytes = [0; 3];
    // Without random bytes the addresses of all clones would be one.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let [a, b, c] = bytes;
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

#[cfg(test)]
mod tests;
