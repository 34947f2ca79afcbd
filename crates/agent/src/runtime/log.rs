//! Lines for people on standard error, written only when `PAGEONE_LOG` is set: standard error is
//! the program's.

use std::fmt::Arguments;
use std::sync::OnceLock;

use crate::runtime::lock::Blocked;

/// Writes one line. The caller holds no lock of the agent and has no window open: the reader of
/// standard error may be slow, or may wait for this program.
pub(crate) fn line(text: Arguments<'_>) {
    // A signal handler may make a call that logs too, or jump out of this one.
    let _signals = Blocked::all();
    static ENABLED: OnceLock<bool> = OnceLock::new();
    if *ENABLED.get_or_init(|| std::env::var_os("PAGEONE_LOG").is_some()) {
        let line = format!("pageone-agent[{}]: {text}\n", std::process::id());
        kmem::raw::print(line.as_bytes());
    }
}
