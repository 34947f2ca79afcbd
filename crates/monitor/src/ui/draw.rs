//! Draws the screen.
//!
//! ```text
//! what, when, whom                                one line
//! graphs: in use, saved, could be saved           4 to 8 lines
//! CPU, pressure, stores, governor, warnings       4 lines and more
//! a row for each guest                            the rest
//! the guest that is looked at, if asked for       half of the rest
//! keys, or what is typed                          one line
//! ```

mod detail;
mod help;

use control::units::{length, size};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Sparkline, SparklineBar, Wrap};

use crate::clock;
use crate::moment::Summary;
use crate::ui::app::{App, Prompt};
use crate::ui::style::Role;
use crate::view::{Column, Host, Place, Row, Sort, graph, layout};

/// The least screen, in characters.
const LEAST: (u16, u16) = (40, 12);
/// From this height on there is room for everything.
const TALL: u16 = 34;

/// Draws everything.
pub(super) fn draw(app: &mut App, frame: &mut Frame<'_>) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("{} by {} is too small: make it {} by {}", area.width, area.height, LEAST.0, LEAST.1);
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let host = app.shown.as_ref().and_then(|moment| moment.status.as_ref()).map(Host::new);
    let is_tall = area.height >= TALL;
    let graphs = match (is_tall, app.detail.is_some()) {
        (true, _) => (area.height / 6).min(8),
        (false, false) => 4,
        (false, true) => 0,
    };
    let facts = host.as_ref().map_or_else(Vec::new, |host| facts(app, host, area.width as usize, graphs));
    let facts_height = (facts.len() as u16).min(area.height / 3);
    let detail = if app.detail.is_some() { (area.height - 2 - graphs - facts_height) * 2 / 3 } else { 0 };
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(graphs),
        Constraint::Length(facts_height),
        Constraint::Min(3),
        Constraint::Length(detail),
        Constraint::Length(1),
    ]);
    let [top, graphs, middle, table, detail, bottom] = areas.areas(area);
    frame.render_widget(title(app, host.as_ref()), top);
    if graphs.height > 0 {
        draw_graphs(app, host.as_ref(), frame, graphs);
    }
    frame.render_widget(Paragraph::new(facts), middle);
    draw_table(app, frame, table);
    if detail.height > 0 {
        detail::draw(app, frame, detail);
    }
    frame.render_widget(keys(app), bottom);
    if app.has_help {
        frame.render_widget(Clear, area);
        help::draw(app.theme, frame, area);
    }
}

/// The first line.
fn title(app: &App, host: Option<&Host>) -> Line<'static> {
    let theme = app.theme;
    let mut parts = vec![Span::styled("pageone ", theme.style(Role::Strong))];
    match (&app.file, app.is_live()) {
        (Some(file), _) => {
            let (first, last) = app.ends();
            parts.push(Span::raw(format!("{file} ")));
            let place = format!("{} ", clock::date(app.time()));
            parts.push(Span::styled(place, theme.style(Role::Strong)));
            parts.push(Span::raw(format!("of {} to {} ", clock::clock(first), clock::clock(last))));
        }
        (None, true) => parts.push(Span::raw(format!("{} ", clock::clock(app.time())))),
        (None, false) => {
            let text = format!(" FROZEN at {}; Space goes on ", clock::clock(app.time()));
            parts.push(Span::styled(text, theme.style(Role::Warning)));
            parts.push(Span::raw(" "));
        }
    }
    if let Some((since, why)) = &app.away {
        let again = if app.file.is_none() { "; trying again" } else { "" };
        let text = format!(" NO DAEMON since {}{again}: {why} ", clock::clock(*since));
        parts.push(Span::styled(text, theme.style(Role::Warning)));
    } else if let Some(host) = host {
        parts.push(Span::raw(host.guests.clone()));
    } else if app.recording.is_empty() {
        parts.push(Span::raw("asking the daemon"));
    }
    Line::from(parts)
}

type Graph = (&'static str, fn(&Summary) -> f64, Color);

fn draw_graphs(app: &App, host: Option<&Host>, frame: &mut Frame<'_>, area: Rect) {
    let graphs: [Graph; 3] = [
        ("Used", |summary| summary.used, Color::Blue),
        ("Saved", |summary| summary.saved, Color::Green),
        ("Could be saved", |summary| summary.could_be_saved, Color::Yellow),
    ];
    let total = host.and_then(|host| host.total).map(|total| total as f64);
    for (at, (area, (name, of, colour))) in
        Layout::horizontal([Constraint::Fill(1); 3]).spacing(1).split(area).iter().zip(graphs).enumerate()
    {
        let points = graph(&app.recording, app.time(), app.span, area.width as usize, of);
        let most = points.iter().flatten().fold(0.0f64, |most, &value| most.max(value));
        let value = host.map_or_else(|| "?".into(), |host| host.memory[at].clone());
        let mut title = vec![
            Span::styled(format!("{name} "), app.theme.style(Role::Label)),
            Span::styled(value, app.theme.style(Role::Strong)),
        ];
        let more = match at {
            0 => format!("  last {}", length(app.span.length())),
            _ if most > 0.0 => format!("  max {}", size(most as u64)),
            _ => String::new(),
        };
        let length: usize = title.iter().map(Span::width).sum();
        if length + more.len() <= area.width as usize {
            title.push(Span::styled(more, app.theme.style(Role::Dim)));
        }
        let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(*area);
        frame.render_widget(Line::from(title), head);
        let top = if at == 0 { total.unwrap_or(most) } else { most };
        let bars = points.iter().map(|point| SparklineBar::from(point.map(|value| value.max(0.0) as u64)));
        let line = Sparkline::default().data(bars).max(top.max(1.0) as u64).style(app.theme.style(Role::Shown(colour)));
        frame.render_widget(line.absent_value_symbol(" "), body);
    }
}

/// The host's figures below `graphs` lines of graphs.
fn facts(app: &App, host: &Host, width: usize, graphs: u16) -> Vec<Line<'static>> {
    let theme = app.theme;
    let label = |text: &str| Span::styled(format!("{text} "), theme.style(Role::Label));
    let mut lines = Vec::new();
    if graphs == 0 {
        let named = ["Used", "Saved", "Could be saved"].into_iter().zip(&host.memory);
        lines.push(named.flat_map(|(name, text)| [label(name), Span::raw(format!("{text}   "))]).collect());
    }
    let bar = host.cpu_part.map(|part| format!("{} ", bar(part, 10))).unwrap_or_default();
    let mut cpu = Line::from(vec![label("CPU"), Span::raw(format!("{} {bar}", host.cpu))]);
    let pressure = [label("Pressure"), Span::raw(host.pressure.clone())];
    if cpu.width() + 11 + host.pressure.chars().count() <= width {
        cpu.push_span("  ");
        cpu.spans.extend(pressure);
        lines.push(cpu);
    } else {
        lines.extend([cpu, Line::from_iter(pressure)]);
    }
    lines.push(Line::from(vec![label("Store"), Span::raw(host.store.clone())]));
    for (at, text) in wrap(&host.governor, width.saturating_sub(9)).into_iter().take(2).enumerate() {
        lines.push(Line::from(vec![label(if at == 0 { "Governor" } else { "        " }), Span::raw(text)]));
    }
    for warning in host.warnings.iter().take(2) {
        lines.extend(
            wrap(&format!("! {warning}"), width)
                .into_iter()
                .take(2)
                .map(|text| Line::styled(text, theme.style(Role::Warning))),
        );
    }
    lines
}

/// `[||||    ]`.
fn bar(part: f64, width: usize) -> String {
    let full = ((part.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
    format!("[{}{}]", "|".repeat(full), " ".repeat(width - full))
}

/// Breaks text into lines of at most `width` characters, between words where that is possible.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let used = lines.last().map_or(0, |line| line.chars().count());
        let room = used == 0 || used + 1 + word.chars().count() <= width;
        match lines.last_mut().filter(|_| room) {
            Some(line) if used > 0 => *line = format!("{line} {word}"),
            Some(line) => line.push_str(word),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn draw_table(app: &mut App, frame: &mut Frame<'_>, area: Rect) {
    let (places, hidden) = layout(area.width as usize, app.table.skipped);
    app.table.hidden = hidden;
    app.table.page = (area.height as usize).saturating_sub(1).max(1);
    let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    frame.render_widget(head_line(app, &places), head);
    let at = app.looked_at().map_or(0, |(at, _)| at);
    let count = app.visible().count();
    app.table.first =
        app.table.first.clamp((at + 1).saturating_sub(app.table.page), at).min(count.saturating_sub(app.table.page));
    let rows = app.visible().skip(app.table.first).take(app.table.page).map(|row| row_line(app, row, &places));
    let mut lines: Vec<Line<'_>> = rows.collect();
    if lines.is_empty() {
        lines.push(Line::styled(nothing(app), app.theme.style(Role::Dim)));
    }
    frame.render_widget(Paragraph::new(lines), body);
}

/// Why there is no row.
fn nothing(app: &App) -> String {
    match (&app.shown, app.table.rows.is_empty()) {
        (None, _) => String::new(),
        (Some(_), true) => "no guest yet: start one with `pageone run -- PROGRAM`, or `pageone attach PID`".into(),
        (Some(_), false) => format!("no guest matches '{}': Esc shows all", app.table.filter),
    }
}

fn head_line(app: &App, places: &[Place]) -> Line<'static> {
    let theme = app.theme;
    let cells = places.iter().enumerate().flat_map(|(at, place)| {
        let is_sorted = place.column == app.table.sort.column();
        let mark = match app.table.sort {
            _ if !is_sorted => "",
            Sort::By(_) => "▼",
            Sort::Reversed(_) => "▲",
        };
        let is_last = at + 1 == places.len();
        let title = place.column.title();
        let text = if is_last { format!("{title}{mark}") } else { title };
        // The mark stands in the gap behind its column, where it takes no room.
        let gap = match at {
            _ if is_last => "",
            _ if is_sorted => mark,
            0 if app.table.skipped > 0 => "‹",
            at if at + 2 == places.len() && app.table.hidden > 0 => "›",
            _ => " ",
        };
        let style = if is_sorted { theme.style(Role::Sorted) } else { theme.style(Role::Head) };
        [
            Span::styled(place.fit(&text), style),
            Span::styled(gap, if is_sorted { style } else { theme.style(Role::Head) }),
        ]
    });
    Line::from(cells.collect::<Vec<_>>())
}

fn row_line(app: &App, row: &Row, places: &[Place]) -> Line<'static> {
    let theme = app.theme;
    let is_selected = Some(row.pid) == app.table.selected;
    let cells = places.iter().enumerate().flat_map(|(at, place)| {
        let mut text = place.column.cell(row);
        // Where there is room the sentence follows the word.
        if place.column == Column::Why && place.width > 30 && row.why != "-" {
            text = format!("{text}: {}", row.sentence);
        }
        let style = match place.column {
            _ if is_selected => Style::new(),
            Column::Name => theme.style(Role::Strong),
            column if column.number(row).is_some_and(|number| number < 0.0) => theme.style(Role::Negative),
            Column::Why if row.why != "-" => theme.style(Role::Why),
            _ => Style::new(),
        };
        let gap = if at + 1 < places.len() { " " } else { "" };
        [Span::styled(place.fit(&text), style), Span::raw(gap)]
    });
    let line = Line::from(cells.collect::<Vec<_>>());
    if is_selected { line.style(theme.style(Role::Selected)) } else { line }
}

/// The last line.
fn keys(app: &App) -> Line<'static> {
    let theme = app.theme;
    match &app.prompt {
        Some(Prompt::Filter(text)) => {
            return Line::from(vec![Span::styled("Filter: ", theme.style(Role::Label)), Span::raw(format!("{text}_"))]);
        }
        Some(Prompt::Time(text, why)) => {
            let mut parts = vec![Span::styled("Go to: ", theme.style(Role::Label)), Span::raw(format!("{text}_ "))];
            let help = why.clone().unwrap_or_else(|| "14:05, 14:05:09, -10m, +30s".into());
            parts.push(Span::styled(
                help,
                if why.is_some() { theme.style(Role::Warning) } else { theme.style(Role::Dim) },
            ));
            return Line::from(parts);
        }
        None => {}
    }
    let mut parts = Vec::new();
    if !app.table.filter.is_empty() {
        // First: on a narrow screen the last keys are cut off.
        parts.push(Span::styled(format!("filter: {}", app.table.filter), theme.style(Role::Warning)));
        parts.push(Span::raw(" "));
    }
    let words: [(&str, &str); 8] = [
        ("F1", "Help "),
        ("/", "Filter "),
        ("Enter", "Detail "),
        ("F6", "Sort "),
        ("Space", "Freeze "),
        ("t/T", "Step "),
        ("g", "Go "),
        ("q", "Quit "),
    ];
    for (name, does) in words {
        parts.push(Span::styled(format!("{name} "), theme.style(Role::Key)));
        parts.push(Span::styled(does, theme.style(Role::Does)));
        parts.push(Span::raw(" "));
    }
    Line::from(parts)
}

#[cfg(test)]
mod tests;
