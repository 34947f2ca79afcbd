//! Text of others: names, paths and messages that guests, files and peers have chosen.
//!
//! A terminal obeys control characters and shows text in another order after bidirectional
//! overrides, so neither reaches it as it is. Whatever a command prints or says goes through
//! [`shown`] in [`crate::stdout`], which cannot be forgotten. Only [`crate::stdout::control`]
//! writes the program's own sequences. What has to stay on one line goes through [`printable`].
//!
//! Sources: Unicode Standard Annex #9; ECMA-48.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a terminal shows a character where it stands, and does nothing else.
pub fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A text of others on one line: what is not [plain](is_plain) is left out.
pub fn printable(text: &str) -> String {
    text.chars().filter(|&c| is_plain(c)).collect()
}

/// A text of several lines: what is neither [plain](is_plain) nor a line feed or tabulator is
/// written as `\u001b`, as JSON has it.
pub fn shown(text: &str) -> Cow<'_, str> {
    let stays = |c: char| is_plain(c) || matches!(c, '\n' | '\t');
    if text.chars().all(stays) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match stays(c) {
            true => out.push(c),
            false => drop(write!(out, "\\u{:04x}", u32::from(c))),
        }
    }
    Cow::Owned(out)
}

/// Breaks the lines that are longer than `width` characters, where there are dots between parts,
/// else between words. What goes on is indented by two characters more.
pub fn fit(text: &str, width: usize) -> String {
    let mut out = String::with_capacity(text.len() + 64);
    for line in text.lines() {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        let gap = if words.contains(" · ") { " · " } else { " " };
        let mut column = 0;
        for word in words.split(gap) {
            let length = word.chars().count();
            if column == 0 {
                column = indent + length;
                let _ = write!(out, "{:indent$}{word}", "");
            } else if line.chars().count() > width && column + gap.chars().count() + length > width {
                column = indent + 2 + length;
                let _ = write!(out, "\n{:1$}{word}", "", indent + 2);
            } else {
                column += gap.chars().count() + length;
                let _ = write!(out, "{gap}{word}");
            }
        }
        out.push('\n');
    }
    out
}

/// A message, as [`shown`]. A line that is not its first is indented: a name with a line feed in it
/// begins no message of its own.
pub fn note(text: &str) -> String {
    shown(text.trim_end()).replace('\n', "\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_words_stay() {
        assert!(matches!(shown("größe\t7\n"), Cow::Borrowed("größe\t7\n")));
        assert_eq!(shown("a\x1b[2Jb\rc\u{9b}d\u{202e}e"), "a\\u001b[2Jb\\u000dc\\u009bd\\u202ee");
        assert_eq!(printable("a\x1b[2J\nb\u{7f}\u{2066}c"), "a[2Jbc");
        assert_eq!(note("no web\npageone: all is well\n"), "no web\n  pageone: all is well");
    }

    #[test]
    fn long_lines_are_broken_between_their_parts_and_short_ones_stay() {
        assert_eq!(fit("a  b\n\n    c   d\n", 9), "a  b\n\n    c   d\n");
        assert_eq!(fit("  one two three\n", 9), "  one two\n    three\n");
        assert_eq!(fit(" a 1 · b 2 · c 3\n", 10), " a 1 · b 2\n   c 3\n");
        assert_eq!(fit("überlang\n", 3), "überlang\n");
    }

    #[test]
    fn escaped_json_is_the_same_json() {
        let text = "\"a\u{9b}31m\u{202e}\u{7f}\"";
        assert_eq!(
            serde_json::from_str::<String>(&shown(text)).unwrap(),
            serde_json::from_str::<String>(text).unwrap()
        );
    }
}
