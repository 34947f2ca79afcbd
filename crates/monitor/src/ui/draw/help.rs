//! The page of help.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::ui::style::{Role, Theme};
use crate::view::Column;

const KEYS: [(&str, &str); 19] = [
    ("↑ ↓ PgUp PgDn", "choose a guest"),
    ("← →", "more columns"),
    ("Enter, F5", "detail of a guest"),
    ("[ ]", "scroll its text"),
    ("/, F4", "filter by words; Esc: all"),
    ("> < F6", "sort by next, last column"),
    ("M P D C W N", "by memory, profit, dirty,"),
    ("", "CPU, why, name"),
    ("I", "sort the other way"),
    ("+ -", "graphs over more, less time"),
    ("Space, Z", "freeze, go on"),
    ("t T", "a moment on, back"),
    ("j J", "a minute on, back"),
    ("g", "go to a time"),
    ("B L", "first moment, newest"),
    ("F1, ?, h", "this help"),
    ("q, F10", "quit"),
    ("", ""),
    ("", "any key closes this"),
];

pub(super) fn draw(theme: Theme, frame: &mut Frame<'_>, area: Rect) {
    let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    frame.render_widget(Line::styled("pageone: keys, and what the columns mean", theme.style(Role::Strong)), head);
    let [keys, columns] = Layout::horizontal([Constraint::Length(42), Constraint::Fill(1)]).areas(body);
    let line = |name: &str, width: usize, text: &str| {
        Line::from(vec![Span::styled(format!("{name:<width$} "), theme.style(Role::Label)), Span::raw(text.to_owned())])
    };
    let lines: Vec<_> = KEYS.iter().map(|(key, does)| line(key, 13, does)).collect();
    frame.render_widget(Paragraph::new(lines), keys);
    // On a narrow screen the title of the last column would leave no room for its meaning.
    let title = |column: Column| column.title().split(' ').next().unwrap_or_default().to_owned();
    let lines: Vec<_> = Column::all().map(|column| line(&title(column), 8, column.meaning())).collect();
    frame.render_widget(Paragraph::new(lines), columns);
}
