//! All state of the screen, and what keys do to it.

use std::collections::HashMap;

use control::ClientMap;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::clock;
use crate::moment::Moment;
use crate::recording::Recording;
use crate::sampler::Found;
use crate::ui::style::Theme;
use crate::view::{self, Column, Row, Sort, Span};

/// A minute in milliseconds.
const MINUTE: i64 = 60_000;
/// How far back the moment is to which rates are compared, in milliseconds, at least.
const RATE_OVER: i64 = 900;
/// Characters of a filter or a time at most.
const MOST_TYPED: usize = 60;

/// What is typed in the last line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Prompt {
    /// Words of which rows must have all.
    Filter(String),
    /// A time to go to, and why the last one was not understood.
    Time(String, Option<String>),
}

/// The guests.
pub(super) struct Table {
    pub(super) rows: Vec<Row>,
    /// The guest that is looked at.
    pub(super) selected: Option<i32>,
    /// The first row on the screen, and how many fit: set while drawing.
    pub(super) first: usize,
    pub(super) page: usize,
    pub(super) sort: Sort,
    pub(super) filter: String,
    /// Columns that are scrolled out at the left, and those beyond the right edge.
    pub(super) skipped: usize,
    pub(super) hidden: usize,
}

/// What the screen shows.
pub struct App {
    pub(super) recording: Recording,
    /// The file that is replayed; `None`: live.
    pub(super) file: Option<String>,
    pub(super) theme: Theme,
    /// The time that is shown; `None`: the newest.
    frozen: Option<i64>,
    /// The moment that is shown: the last one at which a daemon answered.
    pub(super) shown: Option<Moment>,
    /// Why the moment asked for is not the one that is shown.
    pub(super) away: Option<(i64, String)>,
    pub(super) table: Table,
    pub(super) span: Span,
    /// Lines of the detail pane that are scrolled out; `None`: it is closed.
    pub(super) detail: Option<usize>,
    pub(super) has_help: bool,
    pub(super) prompt: Option<Prompt>,
    /// The memory of guests, live: the last answers.
    pub(super) maps: HashMap<i32, Result<ClientMap, String>>,
    is_over: bool,
}

impl App {
    /// Nothing yet, live.
    pub fn live(theme: Theme) -> Self {
        Self::new(Recording::live(), None, theme)
    }

    /// A recording, from `time` on.
    pub fn replay(recording: Recording, file: String, time: i64, theme: Theme) -> Self {
        let mut app = Self::new(recording, Some(file), theme);
        app.go_to(time);
        app
    }

    fn new(recording: Recording, file: Option<String>, theme: Theme) -> Self {
        Self {
            recording,
            file,
            theme,
            frozen: None,
            shown: None,
            away: None,
            table: Table {
                rows: Vec::new(),
                selected: None,
                first: 0,
                page: 1,
                sort: Sort::By(Column::of("general_profit")),
                filter: String::new(),
                skipped: 0,
                hidden: 0,
            },
            span: Span::default(),
            detail: None,
            has_help: false,
            prompt: None,
            maps: HashMap::new(),
            is_over: false,
        }
    }

    /// Whether the user has had enough.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The guest whose memory is looked at live.
    pub fn whose_memory(&self) -> Option<i32> {
        self.table.selected.filter(|_| self.detail.is_some() && self.file.is_none())
    }

    /// Whether the newest moment is shown.
    pub(super) fn is_live(&self) -> bool {
        self.file.is_none() && self.frozen.is_none()
    }

    /// The time at which the screen stands.
    pub(super) fn time(&self) -> i64 {
        let newest = self.recording.time(self.recording.len().saturating_sub(1)).unwrap_or(0);
        self.frozen.unwrap_or(newest)
    }

    /// First and last moment.
    pub(super) fn ends(&self) -> (i64, i64) {
        let time = |at| self.recording.time(at).unwrap_or(0);
        (time(0), time(self.recording.len().saturating_sub(1)))
    }

    /// Takes what the sampler found.
    pub fn found(&mut self, found: Found) {
        match found {
            Found::Moment(moment) => {
                self.recording.push(&moment);
                if self.frozen.is_none() {
                    self.show(Some(*moment));
                }
            }
            Found::Map(pid, map) => {
                self.maps.clear();
                self.maps.insert(pid, map);
            }
        }
    }

    /// Shows the moment at this time.
    fn go_to(&mut self, time: i64) {
        let (first, last) = self.ends();
        let time = time.clamp(first, last);
        self.frozen = Some(time);
        self.show(None);
    }

    /// Brings up to date what is computed from the moment that is shown. `newest`: the newest, if
    /// it is that.
    fn show(&mut self, newest: Option<Moment>) {
        if self.recording.is_empty() {
            return;
        }
        let at = self.recording.find(self.time());
        let Some(moment) = newest.or_else(|| self.recording.moment(at).ok()) else {
            self.away = Some((self.time(), "this moment cannot be read".into()));
            return;
        };
        // Live, the moment before is the one that was shown before.
        let before = match self.shown.take() {
            Some(shown) if shown.status.is_some() && (RATE_OVER..30_000).contains(&(moment.time - shown.time)) => {
                Some(shown)
            }
            _ => self.before(at, moment.time),
        };
        if moment.status.is_some() {
            self.away = None;
            self.table.rows = view::rows(&moment, before.as_ref());
            self.shown = Some(moment);
        } else {
            let why = moment.away.unwrap_or_default();
            let since = self.away_since(at);
            self.away = Some((since, why));
            self.shown = self.answered(at).and_then(|at| self.recording.moment(at).ok()).or(before);
            self.table.rows = self.shown.as_ref().map(|moment| view::rows(moment, None)).unwrap_or_default();
        }
        self.arrange();
    }

    /// An earlier moment to compare with.
    fn before(&mut self, at: usize, time: i64) -> Option<Moment> {
        let at =
            (0..at).rev().take(8).find(|&at| self.recording.time(at).is_some_and(|then| time - then >= RATE_OVER))?;
        self.recording.moment(at).ok()
    }

    /// When the daemon last stopped to answer.
    fn away_since(&self, at: usize) -> i64 {
        self.recording.time(self.answered(at).map_or(0, |last| last + 1)).unwrap_or(0)
    }

    /// The last moment up to this one at which a daemon answered.
    fn answered(&self, at: usize) -> Option<usize> {
        let answered = |at: &usize| self.recording.summary(*at).is_some_and(|summary| !summary.clients.is_nan());
        (0..=at).rev().find(answered)
    }

    /// Sorts and keeps the selection.
    fn arrange(&mut self) {
        self.table.sort.sort(&mut self.table.rows);
        let is_there = |pid| self.visible().any(|row| row.pid == pid);
        if !self.table.selected.is_some_and(is_there) {
            let first = self.visible().next().map(|row| row.pid);
            self.table.selected = first;
        }
    }

    /// The rows that the filter lets through.
    pub(super) fn visible(&self) -> impl Iterator<Item = &Row> {
        let filter = match &self.prompt {
            Some(Prompt::Filter(text)) => text,
            _ => &self.table.filter,
        };
        self.table.rows.iter().filter(move |row| row.matches(filter))
    }

    /// The row that is looked at, and its place.
    pub(super) fn looked_at(&self) -> Option<(usize, &Row)> {
        self.visible().enumerate().find(|(_, row)| Some(row.pid) == self.table.selected)
    }

    /// Takes a key.
    pub fn key(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            self.is_over = true;
        } else if self.prompt.is_some() {
            self.typed(key.code);
        } else if self.has_help {
            self.has_help = false;
            self.is_over = matches!(key.code, KeyCode::F(10));
        } else {
            self.command(key);
        }
    }

    fn typed(&mut self, code: KeyCode) {
        let Some(prompt) = &mut self.prompt else { return };
        let (Prompt::Filter(text) | Prompt::Time(text, _)) = prompt;
        match code {
            KeyCode::Char(c) if text.len() < MOST_TYPED => text.push(c),
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Esc => self.prompt = None,
            KeyCode::Enter => self.entered(),
            _ => {}
        }
        self.arrange();
    }

    fn entered(&mut self) {
        match self.prompt.take() {
            Some(Prompt::Filter(text)) => self.table.filter = text,
            Some(Prompt::Time(text, _)) if text.trim().is_empty() => {}
            Some(Prompt::Time(text, _)) => {
                let (first, last) = self.ends();
                match clock::parse(&text, first, last, self.time()) {
                    Ok(time) => self.go_to(time),
                    Err(why) => self.prompt = Some(Prompt::Time(text, Some(why))),
                }
            }
            None => {}
        }
    }

    fn command(&mut self, key: KeyEvent) {
        let sorted = self.table.sort.column();
        match key.code {
            KeyCode::Char('q') | KeyCode::F(10) => self.is_over = true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.has_help = true,
            KeyCode::Char('/' | '\\') | KeyCode::F(3 | 4) => {
                self.prompt = Some(Prompt::Filter(self.table.filter.clone()))
            }
            KeyCode::Enter | KeyCode::F(5) => self.toggle_detail(),
            KeyCode::Esc if self.detail.is_some() => self.toggle_detail(),
            KeyCode::Esc => self.table.filter.clear(),
            KeyCode::Up => self.select(-1),
            KeyCode::Down => self.select(1),
            KeyCode::PageUp => self.select(-(self.table.page as isize)),
            KeyCode::PageDown => self.select(self.table.page as isize),
            KeyCode::Home => self.select(isize::MIN / 2),
            KeyCode::End => self.select(isize::MAX / 2),
            KeyCode::Left => self.table.skipped = self.table.skipped.saturating_sub(1),
            KeyCode::Right if self.table.hidden > 0 => self.table.skipped += 1,
            KeyCode::Char('[') => self.scroll(-1),
            KeyCode::Char(']') => self.scroll(1),
            KeyCode::Char('>' | '.' | 's') | KeyCode::F(6) => self.table.sort = Sort::By(sorted.next(1)),
            KeyCode::Char('<' | ',') => self.table.sort = Sort::By(sorted.next(-1)),
            KeyCode::Char('I' | 'S') => {
                let is_reversed = matches!(self.table.sort, Sort::Reversed(_));
                self.table.sort = if is_reversed { Sort::By(sorted) } else { Sort::Reversed(sorted) };
            }
            KeyCode::Char('+' | '=') => self.span = self.span.change(1),
            KeyCode::Char('-') => self.span = self.span.change(-1),
            KeyCode::Char(' ' | 'Z') => self.freeze(),
            KeyCode::Char('t') => self.step(1),
            KeyCode::Char('T') => self.step(-1),
            KeyCode::Char('j') => self.go_to(self.time() + MINUTE),
            KeyCode::Char('J') => self.go_to(self.time() - MINUTE),
            KeyCode::Char('g') => self.prompt = Some(Prompt::Time(String::new(), None)),
            KeyCode::Char('B') => self.go_to(i64::MIN),
            KeyCode::Char('L') => self.newest(),
            KeyCode::Char(letter) if !key.modifiers.contains(KeyModifiers::CONTROL) => self.sort_by(letter),
            _ => {}
        }
        self.arrange();
    }

    fn sort_by(&mut self, letter: char) {
        let column = match letter {
            'M' => Column::of("region_bytes"),
            'P' => Column::of("general_profit"),
            'D' => Column::of("dirty_pages_per_second"),
            'C' => Column::of("agent_cpu_seconds"),
            'N' => Column::Name,
            'W' => Column::Why,
            _ => return,
        };
        self.table.sort = Sort::By(column);
    }

    fn toggle_detail(&mut self) {
        self.detail = if self.detail.is_some() { None } else { Some(0) };
    }

    fn scroll(&mut self, step: isize) {
        self.detail = self.detail.map(|lines| lines.saturating_add_signed(step));
    }

    fn freeze(&mut self) {
        match self.frozen {
            None => self.go_to(self.time()),
            Some(_) => self.newest(),
        }
    }

    /// Live again, or to the end of a recording.
    fn newest(&mut self) {
        self.frozen = None;
        if self.file.is_some() {
            self.go_to(i64::MAX);
        } else {
            self.shown = None;
            self.show(None);
        }
    }

    fn step(&mut self, step: isize) {
        let at = self.recording.find(self.time()).saturating_add_signed(step);
        let at = at.min(self.recording.len().saturating_sub(1));
        if let Some(time) = self.recording.time(at) {
            self.go_to(time);
        }
    }

    fn select(&mut self, step: isize) {
        let rows: Vec<i32> = self.visible().map(|row| row.pid).collect();
        let at = rows.iter().position(|&pid| Some(pid) == self.table.selected).unwrap_or(0);
        let at = at.saturating_add_signed(step).min(rows.len().saturating_sub(1));
        self.table.selected = rows.get(at).copied();
        self.detail = self.detail.map(|_| 0);
    }
}
