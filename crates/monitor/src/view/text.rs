//! A moment as plain text: what `pageone top --batch` prints.

use std::fmt::Write;

use super::columns::{Column, Sort, layout};
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
    let Host { memory: [used, saved, more], cpu, pressure, store, governor, warnings, guests, .. } = Host::new(status);
    let _ = writeln!(
        out,
        "{guests}\nUsed {used}   Saved {saved}   Could be saved {more}   CPU {cpu}   Pressure {pressure}\n\
         Store {store}\nGovernor {governor}"
    );
    for warning in &warnings {
        let _ = writeln!(out, "! {warning}");
    }
    let mut rows = rows(moment, before);
    Sort::By(Column::of("general_profit")).sort(&mut rows);
    let (places, _) = layout(WIDTH, 0);
    let mut line = |cell: &dyn Fn(Column) -> String| {
        let mut line = String::new();
        for place in &places {
            match place.column {
                Column::Why => line.push_str(&cell(place.column)),
                column => line.extend([&place.fit(&cell(column)), " "]),
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
