//! Tables for people: columns as wide as their longest cell. On a terminal that is too narrow the
//! last ones give way, as those of `status` do, and longer lines are broken.

use std::fmt::Write;

use output::text::{fit, printable};

use super::Json;

/// Characters between two columns.
const GAP: usize = 2;

/// The options of each command that answers with a table, or in JSON.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Tabular {
    #[command(flatten)]
    json: Json,
    /// Show all columns on a narrow terminal
    #[arg(long)]
    wide: bool,
}

impl Tabular {
    /// Prints a value as JSON where that is asked for, and else the text, which gets the width that
    /// columns have to fit. `None`: any.
    pub(crate) fn print(
        self,
        value: &impl serde::Serialize,
        text: impl FnOnce(Option<usize>) -> String,
    ) -> anyhow::Result<()> {
        let width = output::width().filter(|_| !self.wide);
        self.json.print(value, || {
            let text = text(width);
            width.map_or_else(|| text.clone(), |width| fit(&text, width))
        })
    }
}

/// A column's title, and where its cells begin.
#[derive(Clone, Copy)]
pub(crate) enum Column {
    /// At the left.
    Text(&'static str),
    /// They end at the right.
    Number(&'static str),
}

use Column::{Number, Text};

/// What stands in a line.
enum Line<const N: usize> {
    Cells([String; N]),
    Remark(String),
}

/// A table of so many columns.
pub(crate) struct Table<const N: usize> {
    columns: [Column; N],
    lines: Vec<Line<N>>,
}

impl<const N: usize> Table<N> {
    /// One without rows.
    pub(crate) fn new(columns: [Column; N]) -> Self {
        let titles = columns.map(|(Text(title) | Number(title))| title.to_owned());
        Self { columns, lines: vec![Line::Cells(titles)] }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: [String; N]) {
        self.lines.push(Line::Cells(cells.map(|cell| printable(&cell))));
    }

    /// Adds a line about the row before.
    pub(crate) fn remark(&mut self, text: &str) {
        self.lines.push(Line::Remark(format!("  {}", printable(text))));
    }

    /// The text, with the columns that this width has room for; the first is always shown.
    pub(crate) fn within(&self, width: Option<usize>) -> String {
        let mut widths = [0; N];
        for line in &self.lines {
            let Line::Cells(cells) = line else { continue };
            widths.iter_mut().zip(cells).for_each(|(width, cell)| *width = cell.chars().count().max(*width));
        }
        let ends = widths.iter().scan(0, |end, width| {
            *end += width + GAP;
            Some(*end - GAP)
        });
        let shown = ends.take_while(|&end| width.is_none_or(|width| end <= width)).count().max(1);
        let mut out = String::new();
        for line in &self.lines {
            let text = match line {
                Line::Remark(text) => text.clone(),
                Line::Cells(cells) => {
                    let each = cells.iter().zip(self.columns).zip(widths).take(shown);
                    let padded = each.map(|((cell, column), width)| match column {
                        Text(_) => format!("{cell:<width$}"),
                        Number(_) => format!("{cell:>width$}"),
                    });
                    padded.collect::<Vec<_>>().join(&" ".repeat(GAP))
                }
            };
            // Writing into a string cannot fail.
            let _ = writeln!(out, "{}", text.trim_end());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_columns_give_way_to_a_narrow_terminal_and_the_first_never() {
        let mut table = Table::new([Text("name"), Number("memory"), Text("source")]);
        table.row(["webserver\u{1b}\n".into(), "7 MiB".into(), "process 42".into()]);
        table.remark("q35");
        let whole = "name       memory  source\nwebserver   7 MiB  process 42\n  q35\n";
        assert_eq!(table.within(None), whole);
        assert_eq!(table.within(Some(29)), whole);
        let narrow = "name       memory\nwebserver   7 MiB\n  q35\n";
        assert_eq!(table.within(Some(28)), narrow);
        assert_eq!(table.within(Some(17)), narrow);
        for width in [0, 16] {
            assert_eq!(table.within(Some(width)), "name\nwebserver\n  q35\n");
        }
    }
}
