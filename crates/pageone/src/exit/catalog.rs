//! A stable code, and what to do, for each sentence that an error can say.
//!
//! The sentences are the `#[error("…")]` attributes and the `bail!`, `ensure!` and `context` texts
//! of the sources. `codes.txt` beside this file gives each its code, a line each: code, crate,
//! sentence, with `…` for what is filled in, and what to do about it, `-` where the sentence says
//! that itself. `UPDATE_REFERENCE=1 cargo test -p pageone reference` adds a line for a sentence
//! that is new; what to do is then written by hand. When a sentence is reworded its line is changed
//! by hand, so that the code stays. A code is never used again: the line of a sentence that is gone
//! has `-` for its crate.
//!
//! An error's code is found by its text: the sentence that equals it but for what is filled in, and
//! that has the most words of its own. So no library needs to know of codes.

use super::Code;

/// The lines of `codes.txt`.
const CODES: &str = include_str!("codes.txt");

/// One sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    /// `P`, two digits of the crate from 01, two of the sentence.
    pub(crate) code: &'a str,
    /// The crate that says it; `-`: none does any more.
    pub(crate) origin: &'a str,
    pub(crate) sentence: &'a str,
    /// What to do; `-`: the sentence says it.
    pub(crate) remedy: &'a str,
}

impl<'a> Entry<'a> {
    /// What to do, where the sentence does not say it.
    pub(crate) fn to_do(self) -> Option<&'a str> {
        Some(self.remedy).filter(|remedy| *remedy != "-")
    }
}

/// All sentences.
pub(crate) fn entries() -> impl Iterator<Item = Entry<'static>> {
    parse(CODES)
}

/// The sentences in the lines of such a file.
pub(crate) fn parse(codes: &str) -> impl Iterator<Item = Entry<'_>> {
    codes.lines().filter_map(|line| {
        let mut parts = line.split('\t');
        let mut next = || parts.next();
        Some(Entry { code: next()?, origin: next()?, sentence: next()?, remedy: next()? })
    })
}

/// The code of an error and what to do. The code is that of the first text in its chain which has
/// one: what the command could not do. What to do is that of the last: the cause. Without such a
/// text both are those of its exit code.
pub(crate) fn of(error: &anyhow::Error) -> (String, Option<&'static str>) {
    let found: Vec<Entry<'_>> = error.chain().filter_map(|cause| find(&cause.to_string())).collect();
    match (found.first(), found.last()) {
        (Some(first), Some(last)) => (first.code.to_owned(), last.to_do()),
        _ => (of_exit(Code::of(error)), Code::of(error).remedy()),
    }
}

/// The code of what only the exit code tells apart: the text is the system's, or names a setting.
pub(crate) fn of_exit(code: Code) -> String {
    format!("P00{:02}", code as u8)
}

/// What is known of a text.
fn find(text: &str) -> Option<Entry<'static>> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let matching = entries().filter(|entry| entry.origin != "-" && matches(entry.sentence, &text));
    matching.max_by_key(|entry| entry.sentence.len())
}

/// Whether a text is a sentence, with anything where that has `…`.
fn matches(sentence: &str, text: &str) -> bool {
    let mut parts = sentence.split('…');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        rest = match (is_last, part) {
            (true, _) => return rest.ends_with(part),
            (false, part) => match rest.split_once(part) {
                Some((_, behind)) => behind,
                None => return false,
            },
        };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_its_sentence_but_for_what_is_filled_in() {
        assert!(matches("there is no process …", "there is no process 7"));
        assert!(matches("… is used by …; end it", "/x is used by 7; end it"));
        assert!(!matches("… is used by …; end it", "/x is used by 7; end them"));
        assert!(matches("done", "done") && !matches("done", "done so") && !matches("all …", "none"));
    }

    #[test]
    fn every_sentence_is_found_again_whatever_is_filled_in() {
        for entry in entries().filter(|entry| entry.origin != "-") {
            for filled in ["/run/x-7", "a: b", "17"] {
                let text = entry.sentence.replace('…', filled);
                let sentence = find(&text).map(|found| found.sentence);
                assert_eq!(sentence, Some(entry.sentence), "{} for {text}", entry.code);
            }
        }
    }

    #[test]
    fn an_error_has_the_code_of_the_first_sentence_in_its_chain() {
        let of = |error: anyhow::Error| of(&error.context("while it did something that no sentence says"));
        let inner = control::client::Error::NoDaemon(vec!["/run/pageone".into()]);
        let (code, remedy) = of(inner.into());
        let entry = entries().find(|entry| entry.code == code).unwrap();
        assert!(entry.origin == "control" && entry.sentence.starts_with("no daemon answers in …"), "{entry:?}");
        assert_eq!(remedy, None, "the sentence says it");
        assert_eq!(of(anyhow::anyhow!("what nobody ever says")).0, "P0001");
    }

    #[test]
    fn what_to_do_is_said_for_every_sentence() {
        for entry in entries().filter(|entry| entry.origin != "-") {
            assert!(entry.remedy == "-" || entry.remedy.contains(' '), "{}: what to do about it?", entry.code);
            assert!(!entry.remedy.ends_with(' ') && entry.remedy.len() < 300, "{}", entry.code);
        }
    }
}
