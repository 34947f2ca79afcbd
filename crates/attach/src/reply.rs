//! What the agent answers, in a buffer on the stack of the thread that calls it.
//!
//! The first byte says what became of it ([`ATTACHED`] and the following), a sentence comes after,
//! and a zero. The text is another program's: what is not printable is left out.

use crate::{AttachError, Request};

/// Bytes of the buffer.
pub(crate) const LEN: usize = 1024;
/// The program's memory is managed.
const ATTACHED: u8 = 1;
/// It was before.
const ALREADY: u8 = 2;
/// It is not.
const REFUSED: u8 = 3;
/// It is not, and could be if the program stood still.
const MUST_STAND: u8 = 4;
/// The first byte of the buffer before the call: the program stands still. It is no answer.
const STANDS: u8 = 0xff;

/// What became of a process that was to be attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attached {
    /// Its memory is managed from now on: how much of it.
    Now(String),
    /// It was attached before.
    Already,
}

pub(crate) fn empty(request: &Request) -> [u8; LEN] {
    let mut buffer = [0; LEN];
    if request.stands {
        buffer[0] = STANDS;
    }
    buffer
}

pub(crate) fn read(pid: i32, buffer: &[u8]) -> Result<Attached, AttachError> {
    let (code, text) = buffer.split_first().unwrap_or((&0, &[]));
    match *code {
        ATTACHED => Ok(Attached::Now(printable(text))),
        ALREADY => Ok(Attached::Already),
        MUST_STAND => Err(AttachError::MustStand { pid, reason: printable(text) }),
        REFUSED => Err(AttachError::Refused { pid, reason: printable(text) }),
        _ => Err(AttachError::Strange { pid, what: "the agent in it gave no answer" }),
    }
}

/// The text up to the first zero, without control characters.
pub(crate) fn printable(text: &[u8]) -> String {
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    output::text::printable(&String::from_utf8_lossy(&text[..end]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_answer_is_a_code_and_a_sentence_without_control_characters() {
        assert!(matches!(read(1, b"\x01192 MiB\0rest"), Ok(Attached::Now(text)) if text == "192 MiB"));
        assert_eq!(read(1, &[ALREADY, 0]).ok(), Some(Attached::Already));
        let refused = read(7, b"\x03no \x1b[31mroom\xff").unwrap_err().to_string();
        assert_eq!(refused, "process 7 is not attached: no [31mroom\u{fffd}");
        assert!(matches!(read(1, b"\x04a file"), Err(AttachError::MustStand { pid: 1, .. })));
        // What the agent leaves as it was is no answer.
        for stands in [true, false] {
            let (none, timeout, guard) = (Path::new("/"), Duration::ZERO, &guard::Guard::thread());
            let request = Request { pid: 1, library: none, socket: none, timeout, guard, stands };
            assert!(matches!(read(1, &empty(&request)), Err(AttachError::Strange { .. })));
        }
        assert!(matches!(read(1, &[0; LEN]), Err(AttachError::Strange { .. })));
        assert!(matches!(read(1, &[]), Err(AttachError::Strange { .. })));
    }
}
