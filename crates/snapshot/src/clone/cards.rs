//! Network cards: a clone's have addresses of their own.
//!
//! QEMU numbers cards whose words name no address from 52:54:00:12:34:56 on, past those that are
//! named: without words the first one's is the same in all guests. Some models store their address
//! where a guest with another one is refused when it is loaded. These keep the source's; if the
//! words do not name it, all cards keep theirs, so that QEMU gives it again.

use guests::words::{Opt, options, set_part};

/// What the names of network cards begin with: those of QEMU for PCs, by `-device help`.
const CARDS: [&str; 11] =
    ["virtio-net", "e1000", "rtl8139", "vmxnet3", "igb", "ne2k_", "pcnet", "i8255", "i82562", "i82801", "tulip"];
/// Models that have the address in the PCI configuration, as a serial number.
const KEPT: [&str; 3] = ["e1000e", "igb", "vmxnet3"];

/// A card that words describe.
struct Card {
    /// Where its value is among the words.
    at: usize,
    /// The key of its address.
    key: &'static str,
    /// Whether it keeps the source's.
    keeps: bool,
    /// Whether the words name its address.
    is_named: bool,
}

impl Card {
    /// `model`: that of a card for which the words name none.
    fn of(option: &Opt<'_>, model: &str) -> Option<Self> {
        let kind = |key: &str| option.part(key).unwrap_or_else(|| option.first());
        let (key, model) = match (option.name, &*kind("type")) {
            ("nic", kind) if kind != "none" => ("mac", option.part("model").unwrap_or_else(|| model.into())),
            ("net", "nic") => ("macaddr", option.part("model").unwrap_or_else(|| model.into())),
            ("device", _) => ("mac", Some(kind("driver")).filter(|kind| is_card(kind, option))?),
            _ => return None,
        };
        let (keeps, is_named) = (KEPT.contains(&&*model), option.part(key).is_some());
        Some(Self { at: option.at + 1, key, keeps, is_named })
    }
}

/// Whether a device has the property `mac`. One of a kind that is not listed has if it says so, or
/// leads to a network.
fn is_card(kind: &str, device: &Opt<'_>) -> bool {
    let is_one = |card: &&str| kind.starts_with(card);
    CARDS.iter().any(is_one) || ["mac", "netdev"].iter().any(|key| device.part(key).is_some())
}

/// Gives each card that takes it a new address; also the one that QEMU makes unasked, with its
/// network. `machine`: its type.
pub(super) fn renew(words: &mut Vec<String>, machine: &str) {
    let model = if machine.contains("q35") { "e1000e" } else { "e1000" };
    let is_unasked = !options(words).any(|option| matches!(option.name, "nodefaults" | "netdev" | "nic" | "net"));
    let cards: Vec<Card> = options(words).filter_map(|option| Card::of(&option, model)).collect();
    if cards.iter().any(|card| card.keeps && !card.is_named) || is_unasked && KEPT.contains(&model) {
        return;
    }
    for card in cards.iter().filter(|card| !card.keeps) {
        if let Some(word) = words.get_mut(card.at) {
            *word = set_part(word, card.key, &new_mac());
        }
    }
    if is_unasked {
        words.extend(["-net".into(), format!("nic,macaddr={}", new_mac()), "-net".into(), "user".into()]);
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
