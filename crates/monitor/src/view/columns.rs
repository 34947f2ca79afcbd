//! The table's columns: titles, widths, order, and which of them a screen has room for.

use std::cmp::Ordering;

use super::units::{count, percent, rate, size, size_signed, stall};
use super::{Row, descending};

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The guest's name.
    Name,
    /// Memory under management.
    Memory,
    /// Memory that maps frames.
    Shared,
    /// Memory given back as zero pages.
    Zero,
    /// Freed by the guest and taken back.
    Recycled,
    /// Changes too fast.
    Volatile,
    /// Written a second.
    Dirty,
    /// Saved less every cost.
    Profit,
    /// Mappings of the limit.
    Maps,
    /// Page faults a second.
    Faults,
    /// The longest stall.
    Stall,
    /// The agent's CPU time.
    Cpu,
    /// Unique so far.
    Unshared,
    /// Could be merged.
    Possible,
    /// The process.
    Pid,
    /// The sharing domain.
    Domain,
    /// Why not more.
    Why,
}

impl Column {
    /// All, from left to right. The last is always shown.
    pub const ALL: [Column; 17] = [
        Column::Name,
        Column::Memory,
        Column::Shared,
        Column::Zero,
        Column::Recycled,
        Column::Volatile,
        Column::Dirty,
        Column::Profit,
        Column::Maps,
        Column::Faults,
        Column::Stall,
        Column::Cpu,
        Column::Unshared,
        Column::Possible,
        Column::Pid,
        Column::Domain,
        Column::Why,
    ];

    /// Its title.
    pub fn title(self) -> &'static str {
        match self {
            Column::Name => "GUEST",
            Column::Memory => "MEM",
            Column::Shared => "SHARE",
            Column::Zero => "ZERO",
            Column::Recycled => "RECYC",
            Column::Volatile => "VOLAT",
            Column::Dirty => "DIRTY/s",
            Column::Profit => "PROFIT",
            Column::Maps => "MAPS",
            Column::Faults => "FAULT/s",
            Column::Stall => "STALL",
            Column::Cpu => "CPU%",
            Column::Unshared => "UNIQUE",
            Column::Possible => "MORE",
            Column::Pid => "PID",
            Column::Domain => "DOMAIN",
            Column::Why => "WHY NOT MORE",
        }
    }

    /// What it means, for the help.
    pub fn meaning(self) -> &'static str {
        match self {
            Column::Name => "its name, or its program's",
            Column::Memory => "may be merged",
            Column::Shared => "maps a shared page",
            Column::Zero => "given back as zeros",
            Column::Recycled => "freed by it, taken back",
            Column::Volatile => "changes too fast",
            Column::Dirty => "written a second",
            Column::Profit => "saved, less every cost",
            Column::Maps => "mappings, of their limit",
            Column::Faults => "page faults a second",
            Column::Stall => "longest wait of a writer",
            Column::Cpu => "CPU of the agent in it",
            Column::Unshared => "unique so far",
            Column::Possible => "could be merged, is not yet",
            Column::Pid => "its process",
            Column::Domain => "it shares in this only",
            Column::Why => "why not more is merged",
        }
    }

    /// Its width in a screen of this width.
    pub(super) fn width(self, screen: usize) -> usize {
        let wide = screen >= 120;
        match self {
            Column::Name => {
                if wide {
                    22
                } else {
                    15
                }
            }
            Column::Dirty | Column::Faults => 7,
            Column::Maps if wide => 12,
            Column::Profit | Column::Stall | Column::Unshared => 6,
            Column::Pid => 7,
            Column::Domain => {
                if wide {
                    16
                } else {
                    12
                }
            }
            Column::Why => 12,
            _ => 5,
        }
    }

    /// Whether its cells begin at the left.
    pub fn is_text(self) -> bool {
        matches!(self, Column::Name | Column::Domain | Column::Why)
    }

    /// A cell, in at most `width` characters, but for texts.
    pub fn cell(self, row: &Row, width: usize) -> String {
        let optional = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(|| "-".into(), text);
        match self {
            Column::Name => row.name.clone(),
            Column::Memory => size(row.memory),
            Column::Shared => size(row.shared),
            Column::Zero => size(row.zero),
            Column::Recycled => size(row.recycled),
            Column::Volatile => size(row.volatile),
            Column::Dirty => rate(row.dirty),
            Column::Profit => size_signed(row.profit),
            Column::Maps if row.mappings_limit == 0 => count(f64::from(row.mappings)),
            Column::Maps if width >= 12 => format!("{}/{}", row.mappings, row.mappings_limit),
            Column::Maps => format!("{}%", percent(100.0 * row.mappings_used())),
            Column::Faults => optional(row.faults, count),
            Column::Stall => stall(row.stall),
            Column::Cpu => optional(row.cpu, percent),
            Column::Unshared => size(row.unshared),
            Column::Possible => size(row.possible),
            Column::Pid => row.pid.to_string(),
            Column::Domain => row.domain.clone(),
            Column::Why => row.why.clone(),
        }
    }

    pub(super) fn compare(self, a: &Row, b: &Row) -> Ordering {
        let value = |row: &Row| match self {
            Column::Memory => row.memory as f64,
            Column::Shared => row.shared as f64,
            Column::Zero => row.zero as f64,
            Column::Recycled => row.recycled as f64,
            Column::Volatile => row.volatile as f64,
            Column::Dirty => row.dirty,
            Column::Profit => row.profit as f64,
            Column::Maps => row.mappings_used(),
            Column::Faults => row.faults.unwrap_or(f64::NAN),
            Column::Stall => row.stall,
            Column::Cpu => row.cpu.unwrap_or(f64::NAN),
            Column::Unshared => row.unshared as f64,
            Column::Possible => row.possible as f64,
            Column::Name | Column::Pid | Column::Domain | Column::Why => 0.0,
        };
        match self {
            Column::Name => a.name.cmp(&b.name),
            Column::Pid => a.pid.cmp(&b.pid),
            Column::Domain => a.domain.cmp(&b.domain),
            // Those that nothing keeps come last.
            Column::Why => (a.why == "-", &a.why).cmp(&(b.why == "-", &b.why)),
            _ => descending(value(a), value(b)),
        }
    }

    /// The column `step` further on, around the end.
    pub fn next(self, step: isize) -> Column {
        let at = Column::ALL.iter().position(|&column| column == self).unwrap_or(0) as isize;
        Column::ALL[(at + step).rem_euclid(Column::ALL.len() as isize) as usize]
    }
}

/// A column on a screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub column: Column,
    /// Its width in characters. One character is between two columns.
    pub width: usize,
}

/// The columns that a screen of this width shows: the first and the last always, of the others as
/// many as fit, from number `skipped` on. And how many are hidden at the right.
pub fn layout(screen: usize, skipped: usize) -> (Vec<Place>, usize) {
    let place = |column: Column| Place { column, width: column.width(screen) };
    let mut places = vec![place(Column::Name)];
    let why = place(Column::Why);
    let mut left = screen.saturating_sub(places[0].width + why.width + 1);
    let middle = &Column::ALL[1..Column::ALL.len() - 1];
    let from = &middle[skipped.min(middle.len() - 1)..];
    for &column in from {
        let width = column.width(screen) + 1;
        if width > left {
            break;
        }
        left -= width;
        places.push(place(column));
    }
    let hidden = from.len() + 1 - places.len();
    places.push(Place { column: Column::Why, width: why.width + left });
    (places, hidden)
}
