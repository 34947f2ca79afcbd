//! Links between documents lead somewhere: in the tree, in the book that `docs` builds as, and in
//! the packages.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use super::root;

/// All Markdown files at the root, and below these folders.
fn documents() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["docs", "packaging", "crates"].iter().map(|folder| root().join(folder)).collect();
    let mut found: Vec<PathBuf> = files(&root()).collect();
    while let Some(folder) = folders.pop() {
        found.extend(files(&folder));
        folders.extend(entries(&folder).filter(|path| path.is_dir()));
    }
    found.retain(|path| path.extension().is_some_and(|end| end == "md"));
    found
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    entries(folder).filter(|path| path.is_file())
}

/// The text without code: blocks between fences, and what stands between backquotes.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_fence && !is_code
    });
    let lines: Vec<&str> = lines.collect();
    lines.join("\n").split('`').step_by(2).collect()
}

/// What the links of a document lead to, but for other hosts.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The anchors of a document's headings, as mdBook and the repository's host make them.
fn anchors(text: &str) -> Vec<String> {
    let mut seen = HashMap::<String, usize>::new();
    let mut is_code = false;
    let mut anchors = Vec::new();
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !is_code) else { continue };
        let heading = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        let anchor: String = heading.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
        let count = seen.entry(anchor.clone()).or_default();
        anchors.push(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

/// A path from the root, without `..`.
fn resolve(document: &Path, target: &str) -> PathBuf {
    let mut path = document.parent().unwrap().to_owned();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    path
}

#[test]
fn every_link_of_the_documents_leads_to_a_file_and_a_heading() {
    let mut dead = Vec::new();
    for document in documents() {
        for link in links(&std::fs::read_to_string(&document).unwrap()) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let path = if file.is_empty() { document.clone() } else { resolve(&document, file) };
            let is_there = path.exists()
                && (anchor.is_empty()
                    || anchors(&std::fs::read_to_string(&path).unwrap()).iter().any(|heading| heading == anchor));
            if !is_there {
                dead.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(dead.is_empty(), "dead links: {dead:#?}");
}

/// The book has nothing but `docs`, and no page that its summary does not name.
#[test]
fn the_book_has_every_page_and_no_link_out_of_it() {
    let docs = root().join("docs");
    let summary = docs.join("SUMMARY.md");
    let chapters: Vec<PathBuf> =
        links(&std::fs::read_to_string(&summary).unwrap()).iter().map(|link| resolve(&summary, link)).collect();
    for page in documents().into_iter().filter(|page| page.starts_with(&docs) && *page != summary) {
        assert!(chapters.contains(&page), "docs/SUMMARY.md does not name {}", page.display());
        for link in links(&std::fs::read_to_string(&page).unwrap()) {
            let out = resolve(&page, link.split('#').next().unwrap_or_default());
            assert!(out.starts_with(&docs), "{}: {link} leads out of the book", page.display());
        }
    }
}

/// The packages' script names what is packed with the program; links of these lead to each other.
#[test]
fn links_of_packaged_documents_lead_to_packaged_documents() {
    let script = std::fs::read_to_string(root().join("packaging/deb.sh")).unwrap();
    let line = script.lines().find_map(|line| line.strip_prefix("documents=(")).expect("deb.sh lists the documents");
    let packed: Vec<PathBuf> = line.trim_end_matches(')').split(' ').map(|path| root().join(path)).collect();
    assert!(packed.iter().all(|path| path.exists()), "{packed:?}");
    for document in documents().into_iter().filter(|path| packed.iter().any(|packed| path.starts_with(packed))) {
        for link in links(&std::fs::read_to_string(&document).unwrap()) {
            let path = resolve(&document, link.split('#').next().unwrap_or_default());
            let is_packed = link.starts_with('#') || packed.iter().any(|packed| path.starts_with(packed));
            assert!(is_packed, "{}: {link} is not packed", document.display());
        }
    }
}

#[test]
fn links_and_anchors_are_found() {
    let text = "# One `two`\n\n[a](b.md#c) `[no](x)` [d\ne](f)\n```\n[no](y)\n# no\n```\n## One two\n[g](https://h)\n";
    assert_eq!(links(text), ["b.md#c", "f"]);
    assert_eq!(anchors(text), ["one-two", "one-two-1"]);
}
