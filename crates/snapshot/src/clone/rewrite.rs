//! The source's words, in which all that two guests cannot both have is made new.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::disks::named;
use crate::record::{Description, Disk};
use guests::words::{Opt, name, options, parts, set_first, set_part, written};

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
    words.chain(named).collect()
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
        let (host, _) = first.rsplit_once(':').filter(|_| matches!(kind, "tcp" | "telnet" | "websocket" | "tn3270"))?;
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
        "netdev" | "nic" | "net" if value.contains("hostfwd=") || option.part("mac").is_some() => {
            let value = parts(value).map(|part| written(&any_port(&part)).into_owned()).collect::<Vec<_>>().join(",");
            Some(if option.part("mac").is_some() { set_part(&value, "mac", &new_mac()) } else { value })
        }
        "device" if is_network_card(&option.first()) => Some(set_part(value, "mac", &new_mac())),
        "device" if option.part("guest-cid").is_some() => Some(set_part(value, "guest-cid", &new_cid().to_string())),
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

/// An address for sockets between host and guest (vsock(7)) that hardly another guest has.
fn new_cid() -> u32 {
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // The smallest and the largest are the host's and the kernel's.
    u32::from_ne_bytes(bytes) >> 1 | 1 << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> String {
        rewritten_in("/c", line)
    }

    fn rewritten_in(own: &str, line: &str) -> String {
        let words = line.split(' ').map(String::from).collect();
        let disks = vec![
            Disk { word: "a/d.qcow2".into(), image: "/x.qcow2".into(), ..Disk::default() },
            Disk { word: "r.img".into(), image: "/r.one.raw".into(), raw: true, ..Disk::default() },
            Disk { word: "a,b".into(), image: "/y.qcow2".into(), ..Disk::default() },
        ];
        let description = Description { words, disks, ..Description::default() };
        let mut words = rewrite(&description, Path::new(own));
        let named = words.split_off(words.len() - 2);
        assert_eq!(name(&named).as_deref(), own.strip_prefix('/'));
        words.join(" ")
    }

    #[test]
    fn each_clone_has_a_name_of_its_own() {
        for (line, want) in [
            ("-m 1", "one-7-1"),
            ("-name web,debug-threads=on -m 1", "web-one-7-1"),
            ("-name guest=shop,,two", "shop,two-one-7-1"),
            ("-name a -name guest=b", "b-one-7-1"),
        ] {
            let words = line.split(' ').map(String::from).collect();
            let description = Description { words, ..Description::default() };
            let clone = rewrite(&description, Path::new("/clones/one-7-1"));
            assert_eq!(name(&clone).as_deref(), Some(want), "{line}");
            let of_clone = Description { words: clone, ..description.clone() };
            assert_ne!(of_clone.guest(), description.guest(), "prune counts each for itself");
        }
    }

    #[test]
    fn what_two_guests_cannot_both_have_is_made_new() {
        for (line, want) in [
            ("-drive file=a/d.qcow2,if=virtio -m 1", "-drive file=/c/disk-0.qcow2,if=virtio -m 1"),
            ("-hda a/d.qcow2", "-hda /c/disk-0.qcow2"),
            (
                "-blockdev qcow2,node-name=n,file.filename=a/d.qcow2",
                "-blockdev qcow2,node-name=n,file.filename=/c/disk-0.qcow2",
            ),
            ("-drive file=r.img,if=none,format=raw", "-drive file=/c/disk-1.qcow2,if=none,format=qcow2"),
            ("-drive file=other.iso,media=cdrom", "-drive file=other.iso,media=cdrom"),
            ("-daemonize -pidfile /run/x.pid", "-pidfile /c/x.pid"),
            (
                "-chardev socket,id=a,path=/run/a.sock,server=on",
                "-chardev socket,id=a,path=/c/a.sock,server=on,wait=off",
            ),
            ("-chardev stdio,id=a -serial chardev:a", "-chardev stdio,id=a -serial chardev:a"),
            ("-serial unix:/t/s,server=on,wait=off", "-serial unix:/c/s,server=on,wait=off"),
            ("-vnc :1", "-vnc :1,to=999"),
            ("-netdev user,id=n,hostfwd=tcp:127.0.0.1:2222-:22", "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22"),
            ("-device vmgenid,guid=1", "-device vmgenid,guid=auto"),
            ("-qmp tcp:127.0.0.1:4444,server=on,wait=off", "-qmp tcp:127.0.0.1:0,server=on,wait=off"),
            ("-serial telnet::5555,server", "-serial telnet::0,server,wait=off"),
            ("-serial tcp::5555,server,nowait", "-serial tcp::0,server,nowait"),
            ("-gdb tcp::1234 -s -runas bin -m 1", "-gdb tcp::0 -m 1"),
            ("-chardev socket,id=a,host=h,port=1,server=on", "-chardev socket,id=a,host=h,port=0,server=on,wait=off"),
            ("-chardev socket,id=a,host=h,port=1,reconnect=1", "-chardev socket,id=a,host=h,port=1,reconnect=1"),
            ("-chardev null,id=a,logfile=/var/log/x", "-chardev null,id=a,logfile=/c/x"),
        ] {
            assert_eq!(rewritten(line), want);
        }
        for (line, want) in [
            ("-drive id=a,,b,file=a,,b", "-drive id=a,,b,file=/c,,d/disk-2.qcow2"),
            ("-hda a,b", "-hda /c,d/disk-2.qcow2"),
            ("-chardev socket,id=a,path=/r/a,,b", "-chardev socket,id=a,path=/c,,d/a,,b"),
            ("-serial unix:/t/s,,t,server=on", "-serial unix:/c,,d/s,,t,server=on,wait=off"),
            ("-serial file:/t/s,t", "-serial file:/c,d/s,t"),
            ("-vnc unix:/t/s,,t,password=on", "-vnc unix:/c,,d/s,,t,password=on"),
            ("-netdev user,hostfwd=tcp::22-:22,tftp=/a,,b", "-netdev user,hostfwd=tcp::0-:22,tftp=/a,,b"),
        ] {
            assert_eq!(rewritten_in("/c,d", line), want);
        }
        assert_ne!(rewritten("-device vhost-vsock-pci,guest-cid=3"), rewritten("-device vhost-vsock-pci,guest-cid=3"));
        let card = rewritten("-device virtio-net-pci,netdev=n,mac=52:54:00:12:34:56");
        assert!(card.starts_with("-device virtio-net-pci,netdev=n,mac=52:54:00:") && !card.ends_with("12:34:56"));
        assert_ne!(rewritten("-device e1000,netdev=n"), rewritten("-device e1000,netdev=n"));
    }
}
