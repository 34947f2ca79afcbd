//! QEMU's command line: words that say how a guest is called, and what it is made of.
//!
//! QEMU's options begin with one or two dashes, and most have a value in the next word, which
//! consists of parts with commas between them. A comma in a part is written twice.

/// Bytes of memory that QEMU gives a guest without `-m`.
pub const DEFAULT_MEMORY: u64 = 128 << 20;

/// An option of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opt<'a> {
    /// The position of its name among the words.
    pub at: usize,
    /// Its name, without dashes.
    pub name: &'a str,
    /// Its value, or nothing.
    pub value: &'a str,
}

impl<'a> Opt<'a> {
    /// The value of a part `key=value`.
    pub fn part(&self, key: &str) -> Option<&'a str> {
        parts(self.value).find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
    }

    /// The first part.
    pub fn first(&self) -> &'a str {
        parts(self.value).next().unwrap_or_default()
    }
}

/// The parts of a value.
pub fn parts(value: &str) -> impl Iterator<Item = &str> {
    value.split(',')
}

/// The options of a command line without its program.
pub fn options(words: &[String]) -> impl Iterator<Item = Opt<'_>> {
    words.iter().enumerate().filter_map(|(at, word)| {
        let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        let before = at.checked_sub(1).map(|at| words[at].as_str());
        // A value that begins with a dash belongs to the option before it.
        if before.is_some_and(|before| matches!(before.trim_start_matches('-'), "append" | "name")) {
            return None;
        }
        let value = words.get(at + 1).filter(|value| !value.starts_with('-')).map_or("", String::as_str);
        Some(Opt { at, name, value })
    })
}

/// The value of an option; of several the last counts. Some begin with a dash.
pub fn value<'a>(words: &'a [String], name: &str) -> Option<&'a str> {
    let at = options(words).filter(|option| option.name == name).last()?.at;
    words.get(at + 1).map(String::as_str)
}

/// The value of a part `key=value` of an option: `-machine q35,mem-merge=off`. Of several the last
/// counts.
pub fn property<'a>(words: &'a [String], option: &str, key: &str) -> Option<&'a str> {
    options(words).filter(|one| one.name == option).filter_map(|one| one.part(key)).last()
}

/// A guest's name: `-name web`, `-name guest=web,debug-threads=on`.
pub fn name(words: &[String]) -> Option<&str> {
    let all = value(words, "name")?;
    let named = parts(all).filter_map(|part| part.strip_prefix("guest=")).last();
    named.or_else(|| parts(all).next().filter(|first| !first.contains('=')))
}

/// A guest's UUID.
pub fn uuid(words: &[String]) -> Option<&str> {
    value(words, "uuid")
}

/// Whether QEMU has the machine `none`, as libvirt starts it to ask what it can do.
pub(crate) fn is_probe(words: &[String]) -> bool {
    let machines = options(words).filter(|option| matches!(option.name, "machine" | "M"));
    machines.map(|machine| machine.first()).any(|first| matches!(first, "none" | "type=none"))
}

/// A size as QEMU reads it: MiB, or with a suffix.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "m" => 20,
        "b" => 0,
        "k" => 10,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let whole: u64 = whole.parse().ok()?;
    // A fraction is rounded up to the next unit.
    (whole + u64::from(!part.is_empty())).checked_mul(1 << shift)
}

/// Sets a part of a value to `key=value`, or adds it.
pub fn set_part(value: &str, key: &str, to: &str) -> String {
    let is_it = |part: &str| part.strip_prefix(key).is_some_and(|rest| rest.starts_with('='));
    let new = format!("{key}={to}");
    let mut found = false;
    let mut all: Vec<&str> = Vec::new();
    for part in parts(value) {
        found |= is_it(part);
        all.push(if is_it(part) { &new } else { part });
    }
    if !found {
        all.push(&new);
    }
    all.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn words(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    #[test]
    fn options_have_values() {
        let line = words("-m 512 -S --cpu qemu64,-cx16 -append -x -device virtio-net-pci,mac=1,netdev=n");
        let all: Vec<_> = options(&line).map(|o| (o.name, o.value)).collect();
        let net = "virtio-net-pci,mac=1,netdev=n";
        assert_eq!(all, [("m", "512"), ("S", ""), ("cpu", "qemu64,-cx16"), ("append", ""), ("device", net)]);
        let device = options(&line).last().unwrap();
        assert_eq!((device.first(), device.part("mac"), device.part("ma")), ("virtio-net-pci", Some("1"), None));
        assert_eq!(set_part(net, "mac", "2"), "virtio-net-pci,mac=2,netdev=n");
        assert_eq!(set_part("a", "mac", "2"), "a,mac=2");
    }

    #[test]
    fn the_last_of_several_properties_counts() {
        let line = words("qemu -machine q35,mem-merge=on --machine mem-merge=off -name guest=web,debug-threads=on");
        assert_eq!(
            (property(&line, "machine", "mem-merge"), property(&line, "name", "guest")),
            (Some("off"), Some("web"))
        );
        assert_eq!((property(&line, "m", "size"), name(&line), uuid(&line)), (None, Some("web"), None));
    }
}
