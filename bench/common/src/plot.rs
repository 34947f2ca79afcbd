//! Line plots as SVG, for `docs/`: axes with round ticks, one coloured line for each series, a
//! legend.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Of the whole picture, in SVG's units.
const SIZE: (f64, f64) = (860.0, 420.0);
/// Around the axes: left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (80.0, 40.0, 190.0, 55.0);
/// Told apart by people with the usual kinds of colour blindness too (Okabe and Ito).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

/// A series: its name, and its points in the order of x.
pub type Series<'a> = (&'a str, Vec<(f64, f64)>);

/// Writes a plot of `series` to `path`. Both axes begin at 0 unless there are values below; a value
/// that is not finite breaks its line.
///
/// # Errors
///
/// When the file cannot be written.
pub fn lines(path: &Path, title: &str, x_label: &str, y_label: &str, series: &[Series<'_>]) -> Result<()> {
    std::fs::write(path, svg(title, x_label, y_label, series))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// One axis: values from `low` to `high`, drawn from `from` to `to`, a tick every `step`.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (least, most) =
            values.filter(|v| v.is_finite()).fold((0.0f64, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        let step = round_step((most - least).max(1e-9) / 6.0);
        Self { low: (least / step).floor() * step, high: (most / step).ceil().max(1.0) * step, step, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + '_ {
        let count = ((self.high - self.low) / self.step).round() as usize;
        (0..=count).map(|i| self.low + i as f64 * self.step)
    }
}

/// The next 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power).find(|&step| step >= least * 0.999).unwrap_or(10.0 * power)
}

fn label(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn svg(title: &str, x_label: &str, y_label: &str, series: &[Series<'_>]) -> String {
    let (left, top, right, bottom) = (MARGIN.0, MARGIN.1, SIZE.0 - MARGIN.2, SIZE.1 - MARGIN.3);
    let x = Axis::new(series.iter().flat_map(|(_, points)| points).map(|p| p.0), left, right);
    let y = Axis::new(series.iter().flat_map(|(_, points)| points).map(|p| p.1), bottom, top);
    let mut out = String::new();
    // Writing into a string has no way to fail.
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>"##,
        SIZE.0, SIZE.1
    );
    let mut text = |x: f64, y: f64, anchor: &str, more: &str, words: &str| {
        let _ = writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}"{more}>{}</text>"#, escaped(words));
    };
    text(left, top - 15.0, "start", r#" font-weight="bold""#, title);
    text((left + right) / 2.0, SIZE.1 - 12.0, "middle", "", x_label);
    let middle = (top + bottom) / 2.0;
    text(18.0, middle, "middle", &format!(r#" transform="rotate(-90 18 {middle:.1})""#), y_label);
    x.ticks().for_each(|tick| text(x.at(tick), bottom + 20.0, "middle", "", &label(tick, x.step)));
    y.ticks().for_each(|tick| text(left - 8.0, y.at(tick) + 4.0, "end", "", &label(tick, y.step)));
    for (n, (name, _)) in series.iter().enumerate() {
        text(right + 38.0, top + 14.0 + 20.0 * n as f64, "start", "", name);
    }
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = writeln!(out, r##"<path d="M{left:.1} {at:.1}H{right:.1}" stroke="#ddd"/>"##);
    }
    let _ = writeln!(out, r##"<path d="M{left:.1} {top:.1}V{bottom:.1}H{right:.1}" fill="none" stroke="#444"/>"##);
    for (n, (_, points)) in series.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let mut path = format!("M{:.1} {:.1}h22", right + 10.0, top + 10.0 + 20.0 * n as f64);
        let mut pen_up = true;
        for &(a, b) in points {
            if !(a.is_finite() && b.is_finite()) {
                pen_up = true;
                continue;
            }
            let _ = write!(path, "{}{:.1} {:.1}", if pen_up { 'M' } else { 'L' }, x.at(a), y.at(b));
            pen_up = false;
        }
        let _ = writeln!(out, r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>"#);
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests;
