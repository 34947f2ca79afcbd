//! The page.

use std::fmt::Write;
use std::time::Duration;

use control::units::{counted, length, size};
use control::{DomainSharing, Unit};

use super::data::{Data, Plotted, Series};
use super::plot::{Line, bars, class, escape, legend, lines, matrix, split_bars, stacked};
use crate::clock;
use crate::moment::{PAGE, bytes_of, total};
use crate::view::{Column, Row};

/// Guests with an area of their own.
const MOST_LAYERS: usize = 8;
/// Contents in a list.
const MOST_CONTENTS: usize = 16;
/// States of pages in the bars, with their colours.
const STATES: [(&str, &str); 5] = [
    ("pages_merged", "c1"),
    ("pages_zero", "c4"),
    ("pages_recycled", "c0"),
    ("pages_unshared", "c2"),
    ("pages_volatile", "c3"),
];
/// Guests in a list, and domains with a matrix.
const MOST_ROWS: usize = 64;

const STYLE: &str = include_str!("style.css");

/// The whole page.
pub(super) fn page(data: &Data, name: &str) -> String {
    let mut out = String::new();
    let title = escape(&format!("PageONE: {name}"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    head(&mut out, data, name);
    memory(&mut out, data);
    guests(&mut out, data);
    sharing(&mut out, data);
    costs(&mut out, data);
    out.push_str("</body>\n</html>\n");
    out
}

fn section(out: &mut String, title: &str, text: &str, body: &str) {
    let _ = write!(out, "<section>\n<h2>{title}</h2>\n<p>{text}</p>\n{body}\n</section>\n");
}

fn line<'a>(name: &'a str, class: &str, points: &'a Series) -> Line<'a> {
    Line { name, class: class.into(), points }
}

fn head(out: &mut String, data: &Data, name: &str) {
    let (first, last) = (data.times.first().copied().unwrap_or(0), data.times.last().copied().unwrap_or(0));
    let _ = write!(
        out,
        "<header>\n<h1>{}</h1>\n<p>{} to {} ({}), {} moments</p>\n</header>\n",
        escape(name),
        clock::date(first),
        clock::date(last),
        length(Duration::from_millis(last.saturating_sub(first).max(0) as u64)),
        data.moments
    );
    let mut note = |text: String| {
        let _ = writeln!(out, "<p class=\"warning\">{}</p>", escape(&text));
    };
    let lost: u64 = total(data.damage.iter().map(|damage| damage.bytes));
    if !data.damage.is_empty() {
        let moments: usize = data.damage.iter().map(|damage| damage.moments).sum();
        note(format!(
            "The recording is damaged in {}: {}, and {} behind them, could not be read.",
            counted(data.damage.len(), "place"),
            counted(lost as usize, "byte"),
            counted(moments, "moment")
        ));
    }
    let away = data[Plotted::Saved].iter().filter(|saved| saved.is_none()).count();
    if away > 0 {
        note(format!("No daemon answered at {} of the times that are shown.", away));
    }
    let Some(status) = &data.last else { return };
    let newest = |series: &Series| series.iter().rev().flatten().next().copied();
    let mean = |series: &Series| {
        let (sum, n) = series.iter().flatten().fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
        (n > 0).then(|| sum / f64::from(n))
    };
    let most = |series: &Series| series.iter().flatten().copied().reduce(f64::max);
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "?".into());
    let bytes = |value: Option<f64>| or_unknown(value.map(|bytes| size(bytes as i128)));
    let limit = newest(&data[Plotted::CpuLimit])
        .map_or("no limit".into(), |limit| format!("limit {} %", Unit::Percent.short(limit)));
    let cards = [
        ("Saved", bytes(newest(&data[Plotted::Saved])), format!("at most {}", bytes(most(&data[Plotted::Saved])))),
        ("Memory in use", bytes(newest(&data[Plotted::Used])), format!("of {}", bytes(newest(&data[Plotted::Total])))),
        ("Could be saved", bytes(newest(&data[Plotted::CouldBeSaved])), "and is not yet".into()),
        ("Headroom", bytes(newest(&data[Plotted::Headroom])), "if all shared pages were written".into()),
        ("CPU", or_unknown(mean(&data[Plotted::Cpu]).map(|cpu| format!("{} %", Unit::Percent.short(cpu)))), limit),
        ("Guests", status.clients().count().to_string(), format!("in {}", counted(status.domains.len(), "domain"))),
    ];
    out.push_str("<div class=\"cards\">\n");
    for (name, value, note) in cards {
        let (value, note) = (escape(&value), escape(&note));
        let _ = writeln!(out, "<div><span>{name}</span><b>{value}</b><small>{note}</small></div>");
    }
    out.push_str("</div>\n");
}

fn memory(out: &mut String, data: &Data) {
    let without: Series =
        data[Plotted::Used].iter().zip(&data[Plotted::Saved]).map(|(used, saved)| Some((*used)? + (*saved)?)).collect();
    let plotted = [
        line("the host's memory", "c7 dash", &data[Plotted::Total]),
        line("it would be without PageONE", "c3", &without),
        line("in use", "c0", &data[Plotted::Used]),
        line("saved", "c1", &data[Plotted::Saved]),
        line("could be saved", "c2", &data[Plotted::CouldBeSaved]),
    ];
    let body = legend(&plotted) + &lines("Memory over time", &data.times, &plotted, Unit::Bytes);
    section(out, "Memory over time", "What is saved is net: every cost of PageONE is taken off.", &body);
}

fn guests(out: &mut String, data: &Data) {
    let shown = &data.guests[..data.guests.len().min(MOST_LAYERS)];
    let others: Series = (0..data.times.len())
        .map(|at| {
            let rest = data.guests.iter().skip(MOST_LAYERS).filter_map(|(_, series)| series[at]);
            Some(rest.map(|value| value.max(0.0)).sum::<f64>() + data.others[at])
        })
        .collect();
    let mut layers: Vec<Line<'_>> =
        shown.iter().enumerate().map(|(at, (name, series))| line(name, &class(at), series)).collect();
    let rest = data.guests.len() - shown.len();
    let name = format!("{rest} others");
    if rest > 0 {
        layers.push(line(&name, &class(MOST_LAYERS), &others));
    }
    let body = legend(&layers) + &stacked("Saving by guest over time", &data.times, &layers, Unit::Bytes);
    section(out, "Saving by guest", "Each guest's net saving, on top of each other.", &body);

    let bar = |row: &Row| {
        let part = |(metric, class): (&str, &str)| {
            (class.to_owned(), row.value(metric).map_or(0.0, |pages| pages * PAGE as f64))
        };
        (row.name.clone(), STATES.map(part).to_vec())
    };
    let rows: Vec<_> = data.rows.iter().take(MOST_ROWS).map(bar).collect();
    let none = Vec::new();
    let keys = STATES.map(|(metric, class)| (metric.trim_start_matches("pages_"), class));
    let body = legend(&keys.map(|(name, class)| line(name, class, &none)))
        + &split_bars("Memory of the guests", &rows)
        + &table(data);
    let left_out = data.rows.len().saturating_sub(MOST_ROWS);
    let text =
        if left_out > 0 { format!("Left out: {} with less.", counted(left_out, "guest")) } else { String::new() };
    section(out, "Guests at the end", &text, &body);
}

fn table(data: &Data) -> String {
    let class = |column: Column| if column.is_text() { "" } else { " class=\"n\"" };
    let mut out = String::from("<table>\n<thead><tr>");
    for column in Column::all() {
        let (class, title) = (class(column), escape(&column.title().to_lowercase()));
        let _ = write!(out, "<th{class} title=\"{}\">{title}</th>", escape(column.meaning()));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in data.rows.iter().take(MOST_ROWS) {
        out.push_str("<tr>");
        for column in Column::all() {
            let text = match column {
                Column::Why if row.why == "-" => "nothing".into(),
                Column::Why => format!("{}: {}", row.why, row.sentence),
                column => column.cell(row),
            };
            let _ = write!(out, "<td{}>{}</td>", class(column), escape(&text));
        }
        out.push_str("</tr>\n");
    }
    out + "</tbody>\n</table>\n"
}

fn sharing(out: &mut String, data: &Data) {
    let domains = data.depth.iter().flat_map(|depth| &depth.sharing.domains);
    let mut domains: Vec<&DomainSharing> = domains.filter(|domain| !domain.clients.is_empty()).collect();
    domains.sort_by_key(|domain| std::cmp::Reverse(total(domain.clients.iter().map(|client| client.frames))));
    if domains.is_empty() {
        section(out, "Who shares with whom", "Nothing was shared, or the recording is shorter than a look at it.", "");
    }
    let left_out = domains.len().saturating_sub(MOST_ROWS);
    for domain in domains.into_iter().take(MOST_ROWS) {
        let title = format!("Who shares with whom: {}", escape(&domain.name));
        let mut text = String::from(
            "The darker, the more memory of the smaller of two guests is the same. On the diagonal: what a guest shares \
             with nobody else.",
        );
        if domain.sampled > 1 {
            let _ = write!(text, " Estimated from one of {} pages.", domain.sampled);
        }
        if domain.clients_unlisted > 0 {
            let _ = write!(text, " Left out: {} with less.", counted(domain.clients_unlisted, "guest"));
        }
        section(out, &title, &text, &(pairs(domain) + &contents(domain)));
    }
    if left_out > 0 {
        section(out, "Other domains", &format!("Left out: {} with less.", counted(left_out, "domain")), "");
    }
}

fn pairs(domain: &DomainSharing) -> String {
    let names: Vec<String> = domain.clients.iter().map(|client| client.name.clone()).collect();
    let count = names.len();
    let mut pages = vec![0; count * count];
    for pair in domain.pairs.iter().filter(|pair| pair.a < count && pair.b < count) {
        pages[pair.a * count + pair.b] = pair.pages;
        pages[pair.b * count + pair.a] = pair.pages;
    }
    let cell = |row: usize, column: usize| {
        let (a, b) = (&domain.clients[row], &domain.clients[column]);
        if row == column {
            let part = a.alone as f64 / a.frames.max(1) as f64;
            return (part, format!("{}: {} with nobody else", a.name, size(bytes_of(a.alone))));
        }
        let pages = pages[row * count + column];
        let part = pages as f64 / a.frames.min(b.frames).max(1) as f64;
        (part, format!("{} and {}: {}", a.name, b.name, size(bytes_of(pages))))
    };
    matrix("Who shares with whom", &names, &cell)
}

fn contents(domain: &DomainSharing) -> String {
    if domain.contents.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<h3>Pages that are shared most</h3>\n<table>\n<thead><tr><th>content</th><th class=\"n\">pages that have it</th>\
         <th class=\"n\">kept as</th><th class=\"n\">saves</th><th>one of them</th></tr></thead>\n<tbody>\n",
    );
    for content in domain.contents.iter().take(MOST_CONTENTS) {
        let example = content.example.map(|(pid, at)| format!("process {pid}, {at:x}")).unwrap_or_default();
        let saves = size(bytes_of(content.pages.saturating_sub(content.frames)));
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{saves}</td><td>{example}</td></tr>",
            escape(&content.hint),
            content.pages,
            content.frames
        );
    }
    out + "</tbody>\n</table>\n"
}

fn costs(out: &mut String, data: &Data) {
    let plotted =
        [line("limit", "c7 dash", &data[Plotted::CpuLimit]), line("daemon and agents", "c0", &data[Plotted::Cpu])];
    let mut body = legend(&plotted) + &lines("CPU time", &data.times, &plotted, Unit::Percent);
    if let Some(status) = &data.last {
        let _ = write!(body, "<p>The governor's last decision: {}.</p>", escape(&status.governor.reason));
    }
    section(out, "CPU time", "In percent of one CPU, over the ten seconds before each moment.", &body);
    let plotted =
        [line("memory", "c3", &data[Plotted::MemoryPressure]), line("CPU", "c0", &data[Plotted::CpuPressure])];
    let body = legend(&plotted) + &lines("Pressure", &data.times, &plotted, Unit::Percent);
    section(out, "Pressure", "The share of time in which some task of the host waited.", &body);
    let of_all = data.stalls.count().max(1) as f64;
    let mut below = 0.0;
    let stalls: Vec<_> = data
        .stalls
        .buckets()
        .map(|(bound, n)| {
            let label = if bound.is_finite() {
                format!("to {}", Unit::Seconds.short(bound))
            } else {
                format!("over {}", Unit::Seconds.short(below))
            };
            below = bound;
            let share = if n == 0 {
                "0".into()
            } else {
                format!("{} ({} %)", Unit::Count.short(n as f64), Unit::Percent.short(100.0 * n as f64 / of_all))
            };
            (label, n as f64, share)
        })
        .collect();
    let text = "How long a writer can have waited: each merge window within the recording, by its length. Heights are \
                square roots, so that rare ones are seen.";
    section(out, "Stalls", text, &bars("Stalls", &stalls));
}
