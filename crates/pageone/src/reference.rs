//! The pages in `docs/reference`, made from the definitions that the program itself uses.
//!
//! The tests here compare the pages with the definitions. `UPDATE_REFERENCE=1 cargo test -p pageone
//! reference` writes them anew.

mod commands;
mod configuration;
mod errors;
mod links;
mod metrics;

use std::path::{Path, PathBuf};

/// The longest line of prose, in characters.
const WIDTH: usize = 120;

/// The root of the project.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(Path::to_path_buf).unwrap_or_default()
}

/// A page's head: its title and where it comes from.
fn head(title: &str, source: &str) -> String {
    let note = format!(
        "This page is generated from {source}. Change it there, then run `UPDATE_REFERENCE=1 cargo test -p pageone reference`."
    );
    format!("# {title}\n\n{}\n", wrap(&note, "", ""))
}

/// Breaks text into lines; `first` stands before the first line, `rest` before the others.
fn wrap(text: &str, first: &str, rest: &str) -> String {
    crate::reflow(text, first, rest, WIDTH)
}

/// Compares a page with what the definitions give, or writes it.
fn compare(name: &str, page: &str) {
    let path = root().join("docs/reference").join(name);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, page).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = found.lines().zip(page.lines()).find(|(found, page)| found != page);
    assert!(
        found == page,
        "{name} is not what the definitions give, first at {differs:?}; \
         `UPDATE_REFERENCE=1 cargo test -p pageone reference` writes it anew"
    );
}

#[test]
fn the_page_of_commands_is_current() {
    compare("commands.md", &commands::page());
}

#[test]
fn the_page_of_the_configuration_is_current() {
    compare("configuration.md", &configuration::page());
}

#[test]
fn the_page_of_metrics_is_current() {
    compare("metrics.md", &metrics::page());
}

#[test]
fn the_page_of_errors_is_current() {
    compare("errors.md", &errors::page());
}

#[test]
fn text_is_broken_between_words() {
    let text = wrap(&"word ".repeat(40), "- ", "  ");
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
    assert!(text.starts_with("- word word") && text.lines().skip(1).all(|line| line.starts_with("  word")));
}
