//! A line for people on standard error, only when `PAGEONE_LOG` is set: the program's output is not
//! ours.

use std::fmt::Arguments;
use std::sync::OnceLock;

/// Writes one line. Not to be called with the agent's lock held, nor inside a merge window: the
/// reader of standard error may be slow, or may wait for this program.
pub fn line(text: Arguments<'_>) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("PAGEONE_LOG").is_some()) {
        let line = format!("pageone-agent[{}]: {text}\n", std::process::id());
        kmem::raw::print(line.as_bytes());
    }
}
