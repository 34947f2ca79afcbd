//! The options of QEMU that are taken from anybody: they name kinds of devices, sizes, and files
//! that each clone has for itself ([`rewrite`](crate::clone)).
//!
//! All else is refused, unknown options too. Words are read more strictly than QEMU does, so that
//! all who read them see the same options: no value begins with a dash. A file without a slash in
//! its name lies in the clone's directory, where QEMU is started.

use std::collections::HashSet;

use crate::disks::named;
use crate::record::Disk;
use guests::words::{Opt, parts};

/// Options without a value.
const FLAGS: [&str; 11] = [
    "nodefaults",
    "no-user-config",
    "nographic",
    "enable-kvm",
    "no-reboot",
    "no-shutdown",
    "no-hpet",
    "no-acpi",
    "usb",
    "S",
    "daemonize",
];
/// Options whose value may be all that has no slash in it.
const PLAIN: [&str; 20] = [
    "m",
    "smp",
    "cpu",
    "uuid",
    "rtc",
    "k",
    "boot",
    "vga",
    "d",
    "action",
    "watchdog",
    "watchdog-action",
    "msg",
    "overcommit",
    "smbios",
    "global",
    "accel",
    "machine",
    "M",
    "mon",
];
/// Devices, without the kind of bus at the end.
const DEVICES: &str = "virtio-blk virtio-net virtio-scsi virtio-serial virtio-rng virtio-balloon virtio-gpu virtio-vga \
     virtio-keyboard virtio-mouse virtio-tablet virtserialport virtconsole vmgenid vmcoreinfo pvpanic e1000 e1000e \
     igb rtl8139 vmxnet3 ne2k_pci pcnet ide-hd ide-cd scsi-hd scsi-cd nvme ahci ich9-ahci piix3-ide piix4-ide \
     lsi53c895a megasas pvscsi pcie-root-port pcie-pci-bridge pci-bridge ioh3420 i82801b11-bridge qemu-xhci \
     nec-usb-xhci usb-ehci ich9-usb-ehci1 ich9-usb-uhci1 ich9-usb-uhci2 ich9-usb-uhci3 piix3-usb-uhci piix4-usb-uhci \
     usb-tablet usb-mouse usb-kbd usb-storage VGA qxl qxl-vga cirrus-vga bochs-display ramfb secondary-vga i6300esb \
     ib700 isa-serial pci-serial floppy";
const BUSES: [&str; 5] = ["-pci", "-pci-transitional", "-pci-non-transitional", "-device", "-isa"];
/// Parts that options may have besides the first.
const NETWORK: &str =
    "id hubid restrict net host dns dhcpstart hostname domainname hostfwd ipv4 ipv6 model mac macaddr netdev addr";
const CHARACTERS: &str = "id path server wait nowait mux size signal append cols rows width height";
const SOCKET: &str = "server wait nowait";
const DRIVE: &str = "file if id format media index bus unit cache aio discard detect-zeroes readonly read-only werror rerror \
     serial snapshot copy-on-read";
const NODE: &str = "driver node-name file filename file.driver file.filename file.aio file.locking locking aio read-only \
     auto-read-only discard detect-zeroes cache.direct cache.no-flush";

/// The first option that is not taken.
pub(super) fn refused(words: &[String], disks: &[Disk]) -> Option<String> {
    let mut at = 0;
    while let Some(word) = words.get(at) {
        let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else { return Some(word.clone()) };
        if FLAGS.contains(&name) {
            at += 1;
            continue;
        }
        let value = words.get(at + 1).map_or("", String::as_str);
        if value.starts_with('-') || !is_taken(&Opt { at, name, value }, disks) {
            return Some(format!("{word} {value}"));
        }
        at += 2;
    }
    None
}

fn is_taken(option: &Opt<'_>, disks: &[Disk]) -> bool {
    let (name, value, first) = (option.name, option.value, &*option.first());
    let has = |list: &str, one: &str| list.split_whitespace().any(|word| word == one);
    // Of a key that is there twice QEMU takes the last one, and others the first.
    let keys = |skipped: usize, list: &str| {
        let mut seen = HashSet::new();
        parts(value).skip(skipped).all(|part| {
            let key = part.split('=').next().unwrap_or_default();
            has(list, key) && (seen.insert(key.to_owned()) || key == "hostfwd")
        })
    };
    // The first part is the kind, and no other one may name another.
    let is_kind = |list: &str, key: &str| has(list, first) && option.part(key).is_none();
    let listens = |path: &str| {
        let server = |part: std::borrow::Cow<'_, str>| matches!(&*part, "server" | "server=on");
        !path.is_empty() && parts(value).any(server)
    };
    let is_disk = || named(option).is_none_or(|path| disks.iter().any(|disk| disk.word == path));
    match name {
        _ if PLAIN.contains(&name) => !value.contains('/'),
        "name" | "append" | "pidfile" | "D" => true,
        "display" => matches!(value, "none" | "gtk" | "sdl" | "curses"),
        "vnc" => {
            // Without an address it gets this host's own (`reached_from_here`).
            let display = ["127.0.0.1", "localhost", "[::1]", ""].iter().find_map(|host| {
                let number = value.strip_prefix(host)?.strip_prefix(':')?;
                number.parse::<u16>().ok()
            });
            value == "none" || display.is_some() || (first.starts_with("unix:") && keys(1, ""))
        }
        "device" => {
            let bus = BUSES.iter().find_map(|bus| first.strip_suffix(bus));
            let is_known = has(DEVICES, first) || bus.is_some_and(|kind| has(DEVICES, kind));
            is_known && option.part("driver").is_none() && !value.contains('/')
        }
        // Newer QEMUs forward files, too.
        "netdev" | "nic" | "net" if parts(value).any(|part| part.starts_with("hostfwd=") && part.contains('/')) => {
            false
        }
        "netdev" => is_kind("user hubport", "type") && keys(1, NETWORK),
        "nic" | "net" => is_kind("user none nic", "type") && keys(1, NETWORK),
        "chardev" => {
            let path = option.part("path").unwrap_or_default();
            let is_own = match first {
                "socket" => listens(&path),
                "file" => !path.is_empty(),
                _ => has("null stdio ringbuf vc pty", first),
            };
            is_own && option.part("backend").is_none() && keys(1, CHARACTERS)
        }
        "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" => {
            let is_socket = first.strip_prefix("unix:").is_some_and(listens) && keys(1, SOCKET);
            let is_plain = has("none null stdio vc pty mon:stdio", value) || value.starts_with("chardev:");
            is_plain || is_socket || value.starts_with("file:")
        }
        "drive" => keys(0, DRIVE) && is_disk(),
        "blockdev" => {
            let below = option.part("file.driver");
            let is_one = option.part("filename").is_none() || option.part("file.filename").is_none();
            let is_file = below.is_none_or(|driver| driver == "file");
            is_kind("qcow2 raw file", "driver") && is_one && is_file && keys(1, NODE) && is_disk()
        }
        "hda" | "hdb" | "hdc" | "hdd" => is_disk(),
        "object" if first == "rng-random" => {
            let file = option.part("filename");
            let is_random = file.is_none_or(|file| matches!(&*file, "/dev/urandom" | "/dev/random"));
            is_random && keys(1, "id filename")
        }
        "object" => is_kind("rng-builtin iothread", "qom-type") && !value.contains('/'),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
