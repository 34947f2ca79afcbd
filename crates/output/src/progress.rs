//! How far a long command is: a line on standard error, if that is a terminal and nobody asked for
//! quiet.

use indicatif::{ProgressBar, ProgressStyle};

/// Whether the line is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// On a terminal.
    OnTerminal,
    /// Never.
    Never,
}

/// The line where the end is known, and where it is not.
const KNOWN: &str = "{wide_msg} {bar:24} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";
const UNKNOWN: &str = "{wide_msg} {bytes}, {binary_bytes_per_sec}";

/// The line. It is gone with this.
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows nothing before something [begins](Self::begin).
    pub fn new(shown: Shown) -> Self {
        let bar = Self(if shown == Shown::Never { ProgressBar::hidden() } else { ProgressBar::new(0) });
        bar.set_template(UNKNOWN);
        bar
    }

    fn set_template(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
    }

    /// What is done from now on, and how many bytes that is, if it is known.
    pub fn begin(&self, what: &str, bytes: Option<u64>) {
        self.0.reset();
        self.0.set_length(bytes.unwrap_or(0));
        self.set_template(if bytes.is_some() { KNOWN } else { UNKNOWN });
        self.name(what);
    }

    /// What is being done.
    pub fn name(&self, what: &str) {
        self.0.set_message(crate::text::printable(what));
    }
}

impl std::ops::Deref for Progress {
    type Target = ProgressBar;

    fn deref(&self) -> &ProgressBar {
        &self.0
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
