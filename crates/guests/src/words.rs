//! QEMU's command line: words that say how a guest is called, and what it is made of.
//!
//! QEMU's options begin with one or two dashes, and most have a value in the next word, which
//! consists of parts with commas between them. A comma in a part is written twice.

use std::borrow::Cow;

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
    pub fn part(&self, key: &str) -> Option<Cow<'a, str>> {
        parts(self.value).find_map(|part| behind(part, &format!("{key}=")))
    }

    /// The first part.
    pub fn first(&self) -> Cow<'a, str> {
        parts(self.value).next().unwrap_or_default()
    }
}

/// The parts of a value, as they are meant: with one comma where two are written.
pub fn parts(value: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let mut rest = Some(value);
    std::iter::from_fn(move || {
        let value = rest?;
        let (mut end, comma) = (0, |at| value.as_bytes().get(at) == Some(&b','));
        // From the left: of three commas in a row the first two are in a part, the third ends it.
        while end < value.len() && (!comma(end) || comma(end + 1)) {
            end += if comma(end) { 2 } else { 1 };
        }
        rest = value.get(end + 1..);
        let part = &value[..end];
        Some(if part.contains(',') { part.replace(",,", ",").into() } else { part.into() })
    })
}

/// A part, or the value of one, as it is written.
pub fn written(part: &str) -> Cow<'_, str> {
    if part.contains(',') { part.replace(',', ",,").into() } else { part.into() }
}

/// What follows in a part that begins so.
fn behind<'a>(part: Cow<'a, str>, start: &str) -> Option<Cow<'a, str>> {
    match part {
        Cow::Borrowed(part) => part.strip_prefix(start).map(Cow::Borrowed),
        Cow::Owned(part) => part.strip_prefix(start).map(|rest| rest.to_owned().into()),
    }
}

/// The options of a command line without its program.
pub fn options(words: &[String]) -> impl Iterator<Item = Opt<'_>> {
    words.iter().enumerate().filter_map(|(at, word)| {
        let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        let before = at.checked_sub(1).map(|at| words[at].as_str());
        // A value that begins with a dash belongs to the option before it.
        if before.is_some_and(|before| matches!(before, "-append" | "--append" | "-name" | "--name")) {
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
pub fn property<'a>(words: &'a [String], option: &str, key: &str) -> Option<Cow<'a, str>> {
    options(words).filter(|one| one.name == option).filter_map(|one| one.part(key)).last()
}

/// A guest's name: `-name web`, `-name guest=web,debug-threads=on`. Of several the last counts, as
/// QEMU has it.
pub fn name(words: &[String]) -> Option<Cow<'_, str>> {
    let values = options(words).filter(|option| option.name == "name").filter_map(|option| words.get(option.at + 1));
    values.filter_map(|all| in_value(all)).last()
}

/// The name in a value of `-name`.
fn in_value(all: &str) -> Option<Cow<'_, str>> {
    let named = parts(all).filter_map(|part| behind(part, "guest=")).last();
    // No key has a comma in it.
    let has_key = |part: &str| part.split_once('=').is_some_and(|(key, _)| !key.contains(','));
    named.or_else(|| parts(all).next().filter(|first| !has_key(first)))
}

/// A guest's UUID.
pub fn uuid(words: &[String]) -> Option<&str> {
    value(words, "uuid")
}

/// Whether QEMU has the machine `none`, as libvirt starts it to ask what it can do.
pub(crate) fn is_probe(words: &[String]) -> bool {
    let machines = options(words).filter(|option| matches!(option.name, "machine" | "M"));
    // Of several the last counts. A first part may be another property than the type.
    let types = machines.filter_map(|machine| {
        let first = machine.first();
        machine.part("type").or_else(|| (!first.contains('=')).then_some(first))
    });
    types.last().is_some_and(|last| last == "none")
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
    let start = format!("{key}=");
    let new = written(&format!("{start}{to}")).into_owned();
    let set = |part: Cow<'_, str>| if part.starts_with(&start) { new.clone() } else { written(&part).into_owned() };
    let mut all: Vec<String> = parts(value).map(set).collect();
    if !all.contains(&new) {
        all.push(new);
    }
    all.join(",")
}

/// Sets the first part of a value.
pub fn set_first(value: &str, to: &str) -> String {
    let others = parts(value).skip(1).map(|part| format!(",{}", written(&part)));
    std::iter::once(written(to).into_owned()).chain(others).collect()
}

#[cfg(test)]
mod tests;
