//! The guest that is looked at: what keeps it from being merged, and where its memory is.

use control::units::size;
use control::{Cell, ClientMap, ClientStatus, Kind, Metric, Unit};
use output::text::printable;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph};

use super::wrap;
use crate::moment::{PAGE, bytes_of, sum};
use crate::ui::app::App;
use crate::ui::style::{Role, State, Theme};
use crate::view::Row;

/// From this width on the map stands beside the text.
const WIDE: u16 = 120;
/// Metrics of a client in lines: memory at present, what was counted, what else there is.
type Group = (&'static str, fn(&Metric) -> bool);
const GROUPS: [Group; 3] = [
    ("Memory", |metric| metric.kind == Kind::Gauge && is_memory(metric)),
    ("So far", |metric| metric.kind == Kind::Counter),
    ("Now", |metric| metric.kind == Kind::Gauge && !is_memory(metric)),
];
/// Hot ranges that are listed.
const HOTTEST: usize = 4;

fn is_memory(metric: &Metric) -> bool {
    matches!(metric.unit, Unit::Pages | Unit::Bytes)
}

pub(super) fn draw(app: &App, frame: &mut Frame<'_>, area: Rect) {
    let Some((_, row)) = app.looked_at() else { return };
    let client =
        app.shown.as_ref().and_then(|moment| moment.status.as_ref()?.clients().find(|client| client.pid == row.pid));
    let block = Block::new().borders(Borders::TOP).title(format!(" {} (process {}) ", row.name, row.pid));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let (text, map) = if area.width >= WIDE {
        let [text, map] = Layout::horizontal([Constraint::Fill(1); 2]).spacing(2).areas(inner);
        (text, map)
    } else {
        let [map, text] =
            Layout::vertical([Constraint::Length((inner.height / 2).max(3)), Constraint::Fill(1)]).areas(inner);
        (text, map)
    };
    let lines: Vec<_> = text_lines(app.theme, row, client, text.width as usize);
    let skip = app.detail.unwrap_or(0).min(lines.len().saturating_sub(1));
    frame.render_widget(Paragraph::new(lines.into_iter().skip(skip).collect::<Vec<_>>()), text);
    let lines = match find(app, row.pid) {
        Ok(found) => map_lines(app.theme, &found, map.width as usize, map.height as usize),
        Err(why) => wrap(&why, map.width as usize)
            .into_iter()
            .map(|text| Line::styled(text, app.theme.style(Role::Dim)))
            .collect(),
    };
    frame.render_widget(Paragraph::new(lines), map);
}

/// The map that belongs to what is shown.
fn find(app: &App, pid: i32) -> Result<ClientMap, String> {
    if app.file.is_none() && app.is_live() {
        return app.maps.get(&pid).cloned().unwrap_or_else(|| Err("asking for a map of its memory".into()));
    }
    let depth = app.recording.depth(app.time()).ok().flatten();
    let found = depth.and_then(|mut depth| depth.maps.remove(&pid));
    found
        .or_else(|| app.maps.get(&pid)?.clone().ok())
        .ok_or_else(|| "no map of its memory was recorded before this moment".into())
}

fn text_lines(theme: Theme, row: &Row, client: Option<&ClientStatus>, width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut say = |label: &str, text: &str| {
        for (at, part) in wrap(text, width.saturating_sub(label.chars().count() + 2)).into_iter().enumerate() {
            let label = if at == 0 { format!("{label}:") } else { " ".repeat(label.chars().count() + 1) };
            lines.push(Line::from(vec![Span::styled(format!("{label} "), theme.style(Role::Label)), Span::raw(part)]));
        }
    };
    let word = if row.why == "-" { String::new() } else { format!("{}: ", row.why) };
    say("Why not more", &format!("{word}{}", row.sentence));
    if let Some(client) = client {
        for (label, text) in remarks(client) {
            // The reason is one of these; it need not be read twice.
            if text != row.sentence {
                say(label, &printable(&text));
            }
        }
        for (label, is_in) in GROUPS {
            let mut parts = Vec::new();
            client.metrics.for_each_metric(&mut |metric, value| {
                if is_in(metric) {
                    parts.push(format!("{} {}", metric.words(), metric.unit.short(value.real())));
                }
            });
            say(label, &parts.join(" · "));
        }
        let within = |part| match client.writer_stall.quantile(part) {
            Some(bound) if bound.is_finite() => format!("within {}", Unit::Seconds.short(bound)),
            Some(_) => "over 1s".into(),
            None => "-".into(),
        };
        say("Stalls", &format!("half {} · 99 of 100 {}", within(0.5), within(0.99)));
    }
    lines
}

/// Who it is, and what else there is to say of it.
fn remarks(client: &ClientStatus) -> Vec<(&'static str, String)> {
    let mut remarks = Vec::new();
    let manager = client.manager.as_deref().unwrap_or("no manager");
    let guest = client.identity().map(|guest| format!(" {guest}")).unwrap_or_default();
    let rule = if client.rule.is_empty() { String::new() } else { format!(" · domain by {}", client.rule) };
    let who = format!("{} · user {} · {manager}{guest}{rule} · {}", client.name, client.uid, client.state);
    remarks.push(("Who", who));
    remarks.extend(client.remarks.told().map(|(about, text)| (about, text.to_owned())));
    if let Some(recycling) = &client.recycling {
        let why = recycling.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        remarks.push(("free pages", format!("{}{why}", recycling.state)));
    }
    remarks
}

fn map_lines(theme: Theme, map: &ClientMap, width: usize, height: usize) -> Vec<Line<'static>> {
    let legend = State::ALL.into_iter().flat_map(|state| {
        [Span::styled(state.glyph.to_string(), theme.style(state.role)), Span::raw(format!(" {}  ", state.name))]
    });
    let mut lines = vec![Line::from(legend.collect::<Vec<_>>())];
    let hottest = hottest(theme, map, if height >= 8 { HOTTEST } else { 1 });
    let rows = height.saturating_sub(lines.len() + hottest.len()).max(1);
    let width = width.saturating_sub(ADDRESS + 1).max(8);
    // Regions follow each other; a line has the address of its first cell.
    let cells: Vec<(u64, u64, Cell)> = map
        .regions
        .iter()
        .flat_map(|region| {
            region.cells.iter().enumerate().map(move |(at, cell)| {
                let first = at as u64 * u64::from(map.cell_pages);
                let pages = u64::from(map.cell_pages).min(u64::from(region.pages).saturating_sub(first));
                (region.start.saturating_add(first.saturating_mul(PAGE)), pages, *cell)
            })
        })
        .collect();
    let together = cells.len().div_ceil(rows * width).max(1);
    for line in cells.chunks(together * width).take(rows) {
        let mut parts = vec![Span::styled(format!("{:>ADDRESS$x} ", line[0].0), theme.style(Role::Dim))];
        parts.extend(line.chunks(together).map(|cells| {
            let all: Vec<Cell> = cells.iter().map(|(_, _, cell)| *cell).collect();
            let state = State::of(&sum(&all));
            Span::styled(state.glyph.to_string(), theme.style(state.role))
        }));
        lines.push(Line::from(parts));
    }
    if cells.is_empty() {
        lines.push(Line::styled("no region yet", theme.style(Role::Dim)));
    } else {
        let pages: u64 = cells.iter().take(together).map(|(_, pages, _)| pages).sum();
        let each = format!("each {}", size(bytes_of(pages)));
        lines[0].push_span(Span::styled(each, theme.style(Role::Dim)));
    }
    lines.extend(hottest);
    lines
}

/// Characters of an address.
const ADDRESS: usize = 12;

fn hottest(theme: Theme, map: &ClientMap, most: usize) -> Vec<Line<'static>> {
    let line = |(at, range): (usize, &control::HotRange)| {
        let label = if at == 0 { "Hottest:" } else { "        " };
        let text =
            format!(" {:x}  {}, written {} times", range.start, size(bytes_of(u64::from(range.pages))), range.writes);
        Line::from(vec![Span::styled(label, theme.style(Role::Label)), Span::raw(text)])
    };
    map.hottest.iter().take(most).enumerate().map(line).collect()
}
