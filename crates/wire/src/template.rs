//! What a copy of a loaded program is to be: what `pageone snapshot run` asks of the library in the
//! program (`crates/template`).
//!
//! A packet of one byte, [`COPY`], has descriptors: a file with a [`Start`], a socket for the
//! answer, and those that the copy has. The answer is [`RUNS`], with a descriptor of the copy
//! (pidfd_open(2)), or [`FAILED`] and a sentence.

use serde::{Deserialize, Serialize};

/// Number of the socket's descriptor, in the environment of the program that is to be copied.
pub const ENV_TEMPLATE: &str = "PAGEONE_TEMPLATE";

/// Sent by the program once it is loaded.
pub const LOADED: u8 = 0;
/// Asks for a copy.
pub const COPY: u8 = 1;
/// There is a copy.
pub const RUNS: u8 = 2;
/// There is no copy; a sentence says why.
pub const FAILED: u8 = 3;
/// Bytes of an answer at most.
pub const MAX_ANSWER: usize = 256;

/// A copy's words, environment and descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The words, the first of which is the program's name.
    pub words: Vec<Vec<u8>>,
    /// The variables, each with its value (`NAME=value`).
    pub environment: Vec<Vec<u8>>,
    /// The numbers that the descriptors in the packet have in the copy.
    pub numbers: Vec<u32>,
}

impl Start {
    /// What these bytes stand for. `None`: they do not decode, there is no word, or a word or a
    /// variable has a zero in it.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let start: Self = postcard::from_bytes(bytes).ok()?;
        let is_whole = start.words.iter().chain(&start.environment).all(|text| !text.contains(&0));
        (is_whole && !start.words.is_empty()).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode;

    #[test]
    fn what_is_no_start_is_refused() {
        let text = |all: &[&str]| all.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>();
        let start = Start { words: text(&["qemu", "-m", "1G"]), environment: text(&["A=b"]), numbers: vec![2, 40] };
        assert_eq!(Start::decode(&encode(&start)), Some(start.clone()));
        assert_eq!(Start::decode(&encode(&start)[1..]), None);
        assert_eq!(Start::decode(&[]), None);
        for wrong in [Start { words: text(&[]), ..start.clone() }, Start { words: text(&["a\0b"]), ..start.clone() }] {
            assert_eq!(Start::decode(&encode(&wrong)), None, "{wrong:?}");
        }
        // A count that no bytes follow.
        assert_eq!(Start::decode(&[0xff, 0xff, 0xff, 0xff, 0x0f]), None);
    }
}
