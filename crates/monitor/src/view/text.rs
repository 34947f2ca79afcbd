//! A moment as plain text: what `pageone top --batch` prints.

use std::fmt::Write;

use control::Unit;
use control::units::size;

use super::columns::{Column, layout, sort};
use super::host::Host;
use super::rows::{Row, rows};
use crate::clock;
use crate::moment::Moment;

/// Wide enough for every column.
const WIDTH: usize = 200;

/// The host, and a line for each guest, those with the most profit first. `before`: an earlier
/// moment, for rates.
pub fn text(moment: &Moment, before: Option<&Moment>) -> String {
    let mut out = format!("{}  ", clock::date(moment.time));
    let Some(status) = &moment.status else {
        let _ = writeln!(out, "NO DAEMON: {}", moment.away.as_deref().unwrap_or_default());
        return out;
    };
    let host = Host::new(status);
    let memory = host.memory.map_or_else(|| "?".into(), |(used, total)| format!("{} of {}", size(used), size(total)));
    let limit =
        if host.cpu_limit > 0.0 { format!(" of {} %", Unit::Percent.short(host.cpu_limit)) } else { String::new() };
    let _ = writeln!(
        out,
        "{}\nUsed {memory}   Saved {}   Could be saved {}   CPU {} %{limit}   Pressure {}\nStore {}\nGovernor {}",
        host.guests,
        size(host.saved),
        size(host.could_be_saved),
        Unit::Percent.short(host.cpu),
        host.pressure,
        host.store,
        host.governor
    );
    for warning in &host.warnings {
        let _ = writeln!(out, "! {warning}");
    }
    let mut rows = rows(moment, before);
    sort(&mut rows, Column::of("general_profit"), false);
    let (places, _) = layout(WIDTH, 0);
    let mut line = |cell: &dyn Fn(Column) -> String| {
        let mut line = String::new();
        for place in &places {
            let text = cell(place.column);
            match place.column {
                Column::Why => line.push_str(&text),
                column if column.is_text() => {
                    let _ = write!(line, "{text:<0$} ", place.width);
                }
                _ => {
                    let _ = write!(line, "{text:>0$} ", place.width);
                }
            }
        }
        let _ = writeln!(out, "{}", line.trim_end());
    };
    line(&Column::title);
    for row in &rows {
        line(&|column| cell(row, column));
    }
    out
}

fn cell(row: &Row, column: Column) -> String {
    match column {
        Column::Why if row.why != "-" => format!("{}: {}", row.why, row.sentence),
        column => column.cell(row),
    }
}
