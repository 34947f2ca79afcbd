//! A terminal: a session of tmux.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use e2e::eventually;

static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
static NEXT: AtomicU32 = AtomicU32::new(0);

/// tmux, if it is installed.
pub fn find() -> Option<&'static Path> {
    let look = || {
        let out = Command::new("tmux").arg("-V").output().ok()?;
        out.status.success().then(|| PathBuf::from("tmux"))
    };
    FOUND.get_or_init(look).as_deref()
}

/// A session of a server of its own, which ends with this value.
pub struct Terminal {
    tmux: &'static Path,
    server: String,
}

impl Terminal {
    /// Runs a command on a terminal of this size; `ended CODE` follows its output. `variables`:
    /// assignments for its environment.
    pub fn start(tmux: &'static Path, size: (u16, u16), command: &Command, variables: &str) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let terminal = Self { tmux, server: format!("pageone-test-{}-{number}", std::process::id()) };
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
        let line = format!("env {variables} {}; echo ended $?; sleep 1000", words.join(" "));
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let out = terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, &line]);
        assert!(out.status.success(), "{out:?}");
        terminal.tmux(&["set-option", "-g", "escape-time", "0"]);
        terminal
    }

    fn tmux(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.tmux);
        command.args(["-u", "-L", &self.server]).args(args);
        command.env_remove("NO_COLOR").env_remove("TMUX").env("TERM", "xterm-256color").output().unwrap()
    }

    /// What the screen shows.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.tmux(&["capture-pane", "-p"]).stdout).into_owned()
    }

    /// The same with escape sequences for colours and the like.
    pub fn colours(&self) -> String {
        String::from_utf8_lossy(&self.tmux(&["capture-pane", "-p", "-e"]).stdout).into_owned()
    }

    /// Types keys, by tmux's names for them.
    pub fn keys(&self, keys: &[&str]) {
        for key in keys {
            self.tmux(&["send-keys", "--", key]);
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Changes its size.
    pub fn resize(&self, width: u16, height: u16) {
        self.tmux(&["resize-window", "-x", &width.to_string(), "-y", &height.to_string()]);
    }

    /// Waits until the screen is so; gives it.
    pub fn wait(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let last = std::cell::RefCell::new(String::new());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually(what, Duration::from_secs(20), || {
                let text = self.text();
                last.replace(text.clone());
                is_so(&text).then_some(text)
            })
        }));
        outcome.unwrap_or_else(|_| panic!("not on the screen: {what}\n{}", last.borrow()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}
