//! Plots as SVG: lines over time, stacked areas, bars, matrices.

use std::fmt::Write;

use control::Unit;
use control::units::size;

use super::data::Series;
use crate::clock;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 250.0;
/// Room for labels at the left, and below.
const LEFT: f64 = 64.0;
const BELOW: f64 = 24.0;
const TOP: f64 = 8.0;
const RIGHT: f64 = 12.0;
/// Labels on an axis, about.
const TICKS: f64 = 5.0;

/// Text for HTML.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if !output::text::is_plain(c) => {}
            c => out.push(c),
        }
    }
    out
}

/// One line or area.
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    /// Its class in the style sheet: `c0` to `c8`, with `dash` for limits.
    pub(super) class: String,
    pub(super) points: &'a Series,
}

/// The style of the n-th of several lines.
pub(super) fn class(at: usize) -> String {
    format!("c{}", at % 9)
}

/// A value in a sentence: bytes or percent.
fn text(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Bytes => size(value as i128),
        unit => format!("{} %", unit.short(value)),
    }
}

/// A label on an axis whose labels are `step` apart.
fn tick(unit: Unit, value: f64, step: f64) -> String {
    if unit == Unit::Bytes {
        return text(unit, value);
    }
    let places = (-step.log10().floor()).clamp(0.0, 3.0) as usize;
    format!("{value:.places$} %")
}

/// Distance of the labels on the axis of values.
fn step(unit: Unit, range: f64) -> f64 {
    let about = (range / TICKS).max(1e-9);
    if unit != Unit::Bytes {
        return nice(about);
    }
    let unit = 1024f64.powf((about.max(1.0).ln() / 1024f64.ln()).floor());
    nice(about / unit) * unit
}

/// 1, 2 or 5 times a power of ten, not below this.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= value * 0.999);
    digit.map_or(10.0 * power, |digit| digit * power)
}

/// The axes of a plot over time.
struct Axes {
    first: i64,
    span: f64,
    low: f64,
    high: f64,
}

impl Axes {
    fn new(times: &[i64], low: f64, high: f64, unit: Unit) -> Self {
        let first = times.first().copied().unwrap_or(0);
        let span = (times.last().copied().unwrap_or(first) - first).max(1) as f64;
        // A little below 0, as while a domain is new, is not worth half of the plot.
        let low = if low > -0.02 * high { 0.0 } else { low };
        let high = high.max(if unit == Unit::Bytes { 4.0 } else { 0.5 });
        let step = step(unit, high - low);
        Self { first, span, low: (low / step).floor() * step, high: (high / step).ceil().max(1.0) * step }
    }

    fn x(&self, time: i64) -> f64 {
        LEFT + (time - self.first) as f64 / self.span * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let part = ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        HEIGHT - BELOW - part * (HEIGHT - BELOW - TOP)
    }

    fn draw(&self, out: &mut String, unit: Unit) {
        let step = step(unit, self.high - self.low);
        let mut value = self.low;
        while value <= self.high + step / 2.0 {
            let y = self.y(value);
            let _ =
                write!(out, r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}"/>"#, WIDTH - RIGHT);
            let label = escape(&tick(unit, value, step));
            let _ = write!(out, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#, LEFT - 6.0, y + 4.0);
            value += step;
        }
        const LABELS: i64 = 6;
        for at in 0..=LABELS {
            let time = self.first + (self.span as i64) * at / LABELS;
            let anchor = if at == 0 {
                "start"
            } else if at == LABELS {
                "end"
            } else {
                "middle"
            };
            let label = if self.span < 600_000.0 { clock::clock(time) } else { clock::minute(time) };
            let (x, y) = (self.x(time), HEIGHT - 6.0);
            let _ = write!(out, r#"<text x="{x:.1}" y="{y}" text-anchor="{anchor}">{label}</text>"#);
        }
    }
}

fn begin(name: &str, height: f64) -> String {
    let name = escape(name);
    format!(r#"<svg class="plot" role="img" aria-label="{name}" viewBox="0 0 {WIDTH} {height}">"#)
}

/// Lines over time.
pub(super) fn lines(name: &str, times: &[i64], lines: &[Line<'_>], unit: Unit) -> String {
    let values = || lines.iter().flat_map(|line| line.points.iter().flatten().copied());
    let axes = Axes::new(times, values().fold(0.0, f64::min), values().fold(0.0, f64::max), unit);
    let mut out = begin(name, HEIGHT);
    axes.draw(&mut out, unit);
    for line in lines {
        let mut path = String::new();
        let mut is_down = false;
        for (&time, point) in times.iter().zip(line.points) {
            if let Some(value) = point {
                let _ = write!(path, "{}{:.1} {:.1}", if is_down { "L" } else { "M" }, axes.x(time), axes.y(*value));
            }
            is_down = point.is_some();
        }
        let last = line.points.iter().rev().flatten().next().map(|&value| text(unit, value)).unwrap_or_default();
        let (class, title) = (&line.class, escape(&format!("{}: {last} at the end", line.name)));
        let _ = write!(out, r#"<path class="line {class}" d="{path}"><title>{title}</title></path>"#);
    }
    out + "</svg>"
}

/// Areas on top of each other; what is below 0 counts as 0.
pub(super) fn stacked(name: &str, times: &[i64], layers: &[Line<'_>], unit: Unit) -> String {
    let value = |points: &Series, at: usize| points.get(at).copied().flatten().unwrap_or(0.0).max(0.0);
    let sums = times.iter().enumerate().map(|(at, _)| layers.iter().map(|layer| value(layer.points, at)).sum::<f64>());
    let axes = Axes::new(times, 0.0, sums.fold(0.0, f64::max), unit);
    let mut out = begin(name, HEIGHT);
    axes.draw(&mut out, unit);
    let mut floor = vec![0.0; times.len()];
    for layer in layers {
        let top: Vec<f64> = floor.iter().enumerate().map(|(at, floor)| floor + value(layer.points, at)).collect();
        let mut path = String::new();
        for (at, (&time, &top)) in times.iter().zip(&top).enumerate() {
            let _ = write!(path, "{}{:.1} {:.1}", if at == 0 { "M" } else { "L" }, axes.x(time), axes.y(top));
        }
        for (&time, &floor) in times.iter().zip(&floor).rev() {
            let _ = write!(path, "L{:.1} {:.1}", axes.x(time), axes.y(floor));
        }
        let last = text(unit, value(layer.points, times.len().saturating_sub(1)));
        let (class, title) = (&layer.class, escape(&format!("{}: {last} at the end", layer.name)));
        let _ = write!(out, r#"<path class="area {class}" d="{path}Z"><title>{title}</title></path>"#);
        floor = top;
    }
    out + "</svg>"
}

/// What the colours of a plot mean.
pub(super) fn legend(lines: &[Line<'_>]) -> String {
    let items = lines
        .iter()
        .map(|line| format!(r#"<span class="key"><i class="{}"></i>{}</span>"#, line.class, escape(line.name)));
    format!(r#"<p class="legend">{}</p>"#, items.collect::<String>())
}

/// Vertical bars with a label below each, and their values above.
pub(super) fn bars(name: &str, bars: &[(String, f64, String)]) -> String {
    let most = bars.iter().fold(1.0f64, |most, bar| most.max(bar.1));
    let mut out = begin(name, HEIGHT);
    let wide = (WIDTH - LEFT - RIGHT) / bars.len().max(1) as f64;
    for (at, (label, value, text)) in bars.iter().enumerate() {
        // Counts differ by powers of ten: the root shows small ones too.
        let height = (value / most).sqrt() * (HEIGHT - BELOW - TOP - 16.0);
        let (x, y) = (LEFT + at as f64 * wide, HEIGHT - BELOW - height);
        let middle = x + wide / 2.0;
        let (label, text) = (escape(label), escape(text));
        let bar = wide * 0.8;
        let _ = write!(
            out,
            r#"<rect class="c0" x="{:.1}" y="{y:.1}" width="{bar:.1}" height="{height:.1}"/>"#,
            x + wide * 0.1
        );
        let _ = write!(out, r#"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">{text}</text>"#, y - 4.0);
        let _ = write!(out, r#"<text x="{middle:.1}" y="{}" text-anchor="middle">{label}</text>"#, HEIGHT - 6.0);
    }
    out + "</svg>"
}

/// Horizontal bars of several parts. `parts`: the classes' values.
pub(super) fn split_bars(name: &str, rows: &[(String, Vec<(String, f64)>)]) -> String {
    const ROW: f64 = 18.0;
    const NAME: f64 = 190.0;
    let sum = |parts: &[(String, f64)]| parts.iter().map(|part| part.1.max(0.0)).sum::<f64>();
    let most = rows.iter().fold(1.0f64, |most, row| most.max(sum(&row.1)));
    let mut out = begin(name, ROW * rows.len() as f64 + 4.0);
    for (at, (name, parts)) in rows.iter().enumerate() {
        let y = at as f64 * ROW + 2.0;
        let short: String = name.chars().take(28).collect();
        let _ = write!(
            out,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            NAME - 6.0,
            y + 12.0,
            escape(&short)
        );
        let mut x = NAME;
        for (class, value) in parts {
            let wide = value.max(0.0) / most * (WIDTH - NAME - 90.0);
            let title = escape(&format!("{name}: {}", size(*value as i128)));
            let _ = write!(
                out,
                r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{wide:.1}" height="{:.1}"><title>{title}</title></rect>"#,
                ROW - 4.0
            );
            x += wide;
        }
        let _ =
            write!(out, r#"<text x="{:.1}" y="{:.1}">{}</text>"#, x + 6.0, y + 12.0, escape(&size(sum(parts) as i128)));
    }
    out + "</svg>"
}

/// A matrix: `cell(row, column)` gives a part from 0 to 1 and what it says.
pub(super) fn matrix(name: &str, names: &[String], cell: &dyn Fn(usize, usize) -> (f64, String)) -> String {
    const NAME: f64 = 190.0;
    let count = names.len().max(1) as f64;
    let side = ((WIDTH - NAME - RIGHT) / count).clamp(9.0, 34.0);
    let head = 20.0;
    let mut out = begin(name, head + side * count + 4.0);
    for (row, name) in names.iter().enumerate() {
        let y = head + row as f64 * side;
        let short: String = name.chars().take(24).collect();
        let size = if side < 13.0 { "small" } else { "label" };
        let label = escape(&format!("{short} {}", row + 1));
        let _ = write!(
            out,
            r#"<text class="{size}" x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
            NAME - 5.0,
            y + side * 0.7
        );
        if side >= 13.0 || row % 5 == 4 {
            let x = NAME + (row as f64 + 0.5) * side;
            let _ = write!(
                out,
                r#"<text class="{size}" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                head - 6.0,
                row + 1
            );
        }
        for column in 0..names.len() {
            let (part, title) = cell(row, column);
            let x = NAME + column as f64 * side;
            let class = if row == column { "own" } else { "pair" };
            // The root, so that few pages are seen too.
            let shade = if part > 0.0 { 0.12 + 0.88 * part.clamp(0.0, 1.0).sqrt() } else { 0.0 };
            let _ = write!(
                out,
                r#"<rect class="cell" x="{x:.1}" y="{y:.1}" width="{0:.1}" height="{0:.1}"/><rect class="{class}" x="{x:.1}" y="{y:.1}" width="{0:.1}" height="{0:.1}" fill-opacity="{shade:.2}"><title>{1}</title></rect>"#,
                side - 1.0,
                escape(&title)
            );
        }
    }
    out + "</svg>"
}
