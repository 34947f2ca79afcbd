//! Colours, or none of them.

use ratatui::style::{Color, Modifier, Style};

use control::Cell;

/// Whether there are colours. Without them the screen says the same: by words, glyphs, bold and
/// reversed text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// The terminal's sixteen colours.
    Colour,
    /// Bold, reversed and dim text only.
    Plain,
}

impl Theme {
    /// Plain where `NO_COLOR` is set and not empty (no-color.org).
    pub fn of_environment() -> Self {
        match std::env::var_os("NO_COLOR") {
            Some(value) if !value.is_empty() => Theme::Plain,
            _ => Theme::Colour,
        }
    }

    fn colour(self, colour: Color) -> Style {
        match self {
            Theme::Colour => Style::new().fg(colour),
            Theme::Plain => Style::new(),
        }
    }

    /// Words that name a figure.
    pub(super) fn label(self) -> Style {
        self.colour(Color::Cyan)
    }

    pub(super) fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn dim(self) -> Style {
        match self {
            Theme::Colour => Style::new().fg(Color::DarkGray),
            Theme::Plain => Style::new().add_modifier(Modifier::DIM),
        }
    }

    /// Something is wrong.
    pub(super) fn warning(self) -> Style {
        match self {
            Theme::Colour => Style::new().fg(Color::Black).bg(Color::Yellow),
            Theme::Plain => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    /// The table's titles.
    pub(super) fn head(self) -> Style {
        match self {
            Theme::Colour => Style::new().fg(Color::Black).bg(Color::Green),
            Theme::Plain => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    /// The title of the column by which rows are sorted.
    pub(super) fn sorted(self) -> Style {
        match self {
            Theme::Colour => Style::new().fg(Color::Black).bg(Color::Cyan),
            Theme::Plain => Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        }
    }

    /// The row that is looked at.
    pub(super) fn selected(self) -> Style {
        match self {
            Theme::Colour => Style::new().fg(Color::Black).bg(Color::Cyan),
            Theme::Plain => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    /// The name of a key at the bottom, and what it does.
    pub(super) fn key(self) -> (Style, Style) {
        match self {
            Theme::Colour => (Style::new(), Style::new().fg(Color::Black).bg(Color::Cyan)),
            Theme::Plain => (self.strong(), Style::new()),
        }
    }

    /// The graphs: memory in use, saved, could be saved.
    pub(super) fn graph(self, at: usize) -> Style {
        self.colour([Color::Blue, Color::Green, Color::Yellow][at % 3])
    }

    /// The reason why not more of a guest is merged.
    pub(super) fn why(self) -> Style {
        self.colour(Color::Yellow)
    }

    pub(super) fn negative(self) -> Style {
        self.colour(Color::Red)
    }

    /// The style of a part of a map.
    pub(super) fn state(self, state: State) -> Style {
        match state {
            State::Merged => self.colour(Color::Green),
            State::Zero => self.colour(Color::Cyan),
            State::Recycled => self.colour(Color::Blue),
            State::Unshared => self.colour(Color::Yellow),
            State::Volatile => self.colour(Color::Red),
            State::Other => self.dim(),
        }
    }
}

/// The states of pages in a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Merged,
    Zero,
    Recycled,
    Unshared,
    Volatile,
    Other,
}

impl State {
    pub(super) const ALL: [State; 6] =
        [State::Merged, State::Zero, State::Recycled, State::Unshared, State::Volatile, State::Other];

    /// Different without colours too.
    pub(super) fn glyph(self) -> char {
        match self {
            State::Merged => '█',
            State::Zero => '▓',
            State::Recycled => '▒',
            State::Unshared => '░',
            State::Volatile => '~',
            State::Other => '·',
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            State::Merged => "merged",
            State::Zero => "zero",
            State::Recycled => "recycled",
            State::Unshared => "unshared",
            State::Volatile => "volatile",
            State::Other => "other",
        }
    }

    fn pages(self, cell: &Cell) -> u32 {
        match self {
            State::Merged => cell.merged,
            State::Zero => cell.zero,
            State::Recycled => cell.recycled,
            State::Unshared => cell.unshared,
            State::Volatile => cell.volatile,
            State::Other => cell.other,
        }
    }

    /// The state of most pages of a cell.
    pub(super) fn of(cell: &Cell) -> State {
        // Of equals the first, so the more telling one.
        State::ALL.into_iter().rev().max_by_key(|state| state.pages(cell)).unwrap_or(State::Other)
    }
}
