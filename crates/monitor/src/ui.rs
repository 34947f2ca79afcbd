//! `pageone top` and `pageone replay`: the screen.
//!
//! ```text
//! keyboard ──▶ thread ──┐
//! daemon ──▶ sampler ───┴──▶ events ──▶ App ──▶ draw ──▶ terminal
//!               ▲                        │
//!               └── whose memory ────────┘
//! ```
//!
//! [`App`] is all state. It changes with keys and with what the sampler finds, and is drawn after
//! each of them; nothing wakes up in between.

mod app;
mod draw;
mod style;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event};

pub use app::App;
pub use style::Theme;

use crate::sampler::{self, Found};

/// What happens.
enum Happens {
    Typed(Event),
    Found(Found),
    End,
}

/// Why there can be no screen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Output goes elsewhere.
    #[error("this needs a terminal; `pageone top --batch` prints the same as plain text")]
    NoTerminal,
    /// The terminal cannot move its cursor.
    #[error("a terminal of type '{0}' cannot show it; set TERM, or use `pageone top --batch` for plain text")]
    Dumb(String),
    /// The terminal failed.
    #[error("cannot use the terminal")]
    Io(#[from] io::Error),
}

/// Whether there is a terminal that can show the screen.
///
/// # Errors
///
/// [`Error::NoTerminal`] and [`Error::Dumb`].
pub fn check_terminal() -> Result<(), Error> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::NoTerminal);
    }
    match std::env::var("TERM") {
        Ok(term) if !term.is_empty() && term != "dumb" => Ok(()),
        term => Err(Error::Dumb(term.unwrap_or_default())),
    }
}

/// Shows `app` until its user quits. `daemon`: where to ask, and how often.
///
/// # Errors
///
/// When there is no such terminal, or it fails.
pub fn run(mut app: App, daemon: Option<(Vec<PathBuf>, Duration)>) -> Result<(), Error> {
    check_terminal()?;
    let (events, happens) = mpsc::channel();
    let (wanted, whose) = mpsc::channel();
    if let Some((directories, every)) = daemon {
        let events = events.clone();
        std::thread::Builder::new().name("sampler".into()).spawn(move || {
            sampler::run(&directories, every, &whose, &mut |found| events.send(Happens::Found(found)).is_ok());
        })?;
    }
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP])?;
    let end = events.clone();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        signals.forever().next();
        let _ = end.send(Happens::End);
    })?;
    let mut terminal = ratatui::try_init()?;
    std::thread::Builder::new().name("keyboard".into()).spawn(move || {
        while let Ok(event) = event::read() {
            if events.send(Happens::Typed(event)).is_err() {
                return;
            }
        }
        let _ = events.send(Happens::End);
    })?;
    let mut looked_at = None;
    let outcome = loop {
        if let Err(error) = terminal.draw(|frame| draw::draw(&mut app, frame)) {
            break Err(error);
        }
        match happens.recv() {
            Ok(Happens::Typed(Event::Key(key))) => app.key(key),
            Ok(Happens::Typed(_)) => {}
            Ok(Happens::Found(found)) => app.found(found),
            Ok(Happens::End) | Err(_) => break Ok(()),
        }
        if app.is_over() {
            break Ok(());
        }
        if looked_at != app.whose_memory() {
            looked_at = app.whose_memory();
            let _ = wanted.send(looked_at);
        }
    };
    ratatui::try_restore()?;
    Ok(outcome?)
}
