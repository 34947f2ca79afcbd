//! The table's columns: titles, widths, order, and which of them a screen has room for.

use std::cmp::Ordering;

use control::{Metric, columns};

use super::rows::Row;

/// From this width on a screen is wide.
const WIDE: usize = 120;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The guest's name.
    Name,
    /// A metric: its place among [`control::columns`].
    Metric(usize),
    /// The process.
    Pid,
    /// The sharing domain.
    Domain,
    /// Why not more.
    Why,
}

impl Column {
    /// All, from left to right. The last is always shown.
    pub fn all() -> impl DoubleEndedIterator<Item = Column> {
        let metrics = (0..columns().count()).map(Column::Metric);
        [Column::Name].into_iter().chain(metrics).chain([Column::Pid, Column::Domain, Column::Why])
    }

    /// The column of a metric. A name without a column gives that of the guest's name.
    pub fn of(name: &str) -> Column {
        columns().position(|metric| metric.name == name).map_or(Column::Name, Column::Metric)
    }

    fn metric(self) -> Option<&'static Metric> {
        match self {
            Column::Metric(at) => columns().nth(at),
            _ => None,
        }
    }

    /// Its title, what it means, and its width on a narrow and on a wide screen.
    fn look(self) -> (String, &'static str, [usize; 2]) {
        match self {
            Column::Name => ("GUEST".into(), "its name, or its program's", [15, 20]),
            Column::Pid => ("PID".into(), "its process", [7, 7]),
            Column::Domain => ("DOMAIN".into(), "it shares in this only", [12, 13]),
            Column::Why => ("WHY NOT MORE".into(), "why not more is merged", [12, 12]),
            Column::Metric(_) => self
                .metric()
                .map_or_else(Default::default, |metric| (metric.heading(), metric.brief, [metric.width; 2])),
        }
    }

    /// Its title.
    pub fn title(self) -> String {
        self.look().0
    }

    /// What it means, for the help.
    pub fn meaning(self) -> &'static str {
        self.look().1
    }

    /// Its width in a screen of this width.
    pub(super) fn width(self, screen: usize) -> usize {
        self.look().2[usize::from(screen >= WIDE)]
    }

    /// Whether its cells begin at the left.
    pub fn is_text(self) -> bool {
        matches!(self, Column::Name | Column::Domain | Column::Why)
    }

    /// A cell, in no more characters than the column is wide, but for texts.
    pub fn cell(self, row: &Row) -> String {
        match self {
            Column::Name => row.name.clone(),
            Column::Pid => row.pid.to_string(),
            Column::Domain => row.domain.clone(),
            Column::Why => row.why.clone(),
            Column::Metric(_) => self
                .number(row)
                .zip(self.metric())
                .map_or_else(|| "-".into(), |(value, metric)| metric.rate().unwrap_or(metric.unit).short(value)),
        }
    }

    /// The value of a metric's column.
    pub fn number(self, row: &Row) -> Option<f64> {
        match self {
            Column::Metric(at) => *row.values.get(at)?,
            _ => None,
        }
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        match self {
            Column::Name => a.name.cmp(&b.name),
            Column::Pid => a.pid.cmp(&b.pid),
            Column::Domain => a.domain.cmp(&b.domain),
            // Those that nothing keeps come last.
            Column::Why => (a.why == "-", &a.why).cmp(&(b.why == "-", &b.why)),
            // The largest first, what is not known last.
            Column::Metric(_) => {
                let number = |row| self.number(row).unwrap_or(f64::NEG_INFINITY);
                number(b).total_cmp(&number(a))
            }
        }
    }

    /// The column `step` further on, around the end.
    pub fn next(self, step: isize) -> Column {
        let all: Vec<Column> = Column::all().collect();
        let at = all.iter().position(|&column| column == self).unwrap_or(0) as isize;
        all[(at + step).rem_euclid(all.len() as isize) as usize]
    }
}

/// In which order rows stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// By a column, the largest first; names and words from A to Z.
    By(Column),
    /// The other way.
    Reversed(Column),
}

impl Sort {
    /// The column.
    pub fn column(self) -> Column {
        let (Sort::By(column) | Sort::Reversed(column)) = self;
        column
    }

    /// Sorts rows.
    pub fn sort(self, rows: &mut [Row]) {
        rows.sort_by(|a, b| {
            let order = self.column().compare(a, b).then_with(|| a.name.cmp(&b.name)).then(a.pid.cmp(&b.pid));
            if matches!(self, Sort::By(_)) { order } else { order.reverse() }
        });
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

impl Place {
    /// Text in exactly this width; what is cut ends in `…`.
    pub fn fit(&self, text: &str) -> String {
        let width = self.width;
        if text.chars().count() > width {
            let kept: String = text.chars().take(width.saturating_sub(1)).collect();
            return format!("{kept}…");
        }
        if self.column.is_text() { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

/// The columns that a screen of this width shows: the first and the last always, of the others as
/// many as fit, from number `skipped` on. And how many are hidden at the right.
pub fn layout(screen: usize, skipped: usize) -> (Vec<Place>, usize) {
    let place = |column: Column| Place { column, width: column.width(screen) };
    let mut places = vec![place(Column::Name)];
    let why = place(Column::Why);
    let mut left = screen.saturating_sub(places[0].width + why.width + 1);
    let middle: Vec<Column> = Column::all().skip(1).collect();
    let middle = &middle[..middle.len() - 1];
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
