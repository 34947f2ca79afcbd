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

    /// The style of a part of the screen.
    pub(super) fn style(self, of: Role) -> Style {
        let (plain, on) = (Style::new(), |colour| Style::new().fg(Color::Black).bg(colour));
        let (bold, reversed) = (plain.add_modifier(Modifier::BOLD), plain.add_modifier(Modifier::REVERSED));
        let (colour, without) = match of {
            Role::Label => (plain.fg(Color::Cyan), plain),
            Role::Strong => (bold, bold),
            Role::Dim => (plain.fg(Color::DarkGray), plain.add_modifier(Modifier::DIM)),
            Role::Warning => (on(Color::Yellow), reversed),
            Role::Head => (on(Color::Green), reversed),
            Role::Sorted => (on(Color::Cyan), bold.add_modifier(Modifier::UNDERLINED)),
            Role::Selected => (on(Color::Cyan), reversed),
            Role::Key => (plain, bold),
            Role::Does => (on(Color::Cyan), plain),
            Role::Why => (plain.fg(Color::Yellow), plain),
            Role::Negative => (plain.fg(Color::Red), plain),
            Role::Shown(colour) => (plain.fg(colour), plain),
        };
        match self {
            Theme::Colour => colour,
            Theme::Plain => without,
        }
    }
}

/// What a part of the screen is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    /// Words that name a figure.
    Label,
    Strong,
    Dim,
    /// Something is wrong.
    Warning,
    /// The table's titles.
    Head,
    /// The title of the column by which rows are sorted.
    Sorted,
    /// The row that is looked at.
    Selected,
    /// The name of a key at the bottom.
    Key,
    /// What it does.
    Does,
    /// The reason why not more of a guest is merged.
    Why,
    Negative,
    /// A graph, or a part of a map.
    Shown(Color),
}

/// A state of pages in a map; its glyph tells it from others without colours too.
pub(super) struct State {
    pub(super) glyph: char,
    pub(super) name: &'static str,
    pub(super) role: Role,
    pages: fn(&Cell) -> u32,
}

impl State {
    const fn new(glyph: char, name: &'static str, role: Role, pages: fn(&Cell) -> u32) -> Self {
        Self { glyph, name, role, pages }
    }

    /// All, the more telling ones first.
    pub(super) const ALL: [Self; 6] = [
        Self::new('█', "merged", Role::Shown(Color::Green), |cell| cell.merged),
        Self::new('▓', "zero", Role::Shown(Color::Cyan), |cell| cell.zero),
        Self::new('▒', "recycled", Role::Shown(Color::Blue), |cell| cell.recycled),
        Self::new('░', "unshared", Role::Shown(Color::Yellow), |cell| cell.unshared),
        Self::new('~', "volatile", Role::Shown(Color::Red), |cell| cell.volatile),
        Self::new('·', "other", Role::Dim, |cell| cell.other),
    ];

    /// The state of most pages of a cell; of equals the first.
    pub(super) fn of(cell: &Cell) -> Self {
        let [first, others @ ..] = Self::ALL;
        others.into_iter().fold(first, |most, one| if (one.pages)(cell) > (most.pages)(cell) { one } else { most })
    }
}
