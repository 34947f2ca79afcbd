//! Nothing goes round the gate: every place in the agent that calls what can take memory away is
//! named here, with the reason why it may.

#![allow(clippy::unwrap_used)] // In tests.

use std::collections::BTreeMap;
use std::path::Path;

/// What replaces, discards or moves pages: as code calls it.
const CALLS: [&str; 15] = [
    "raw::mmap(",
    "raw::munmap(",
    "raw::mremap(",
    "raw::madvise(",
    "raw::madvise_many(",
    "libc::mmap",
    "libc::munmap",
    "libc::mremap",
    "libc::madvise",
    "mm::map_fixed",
    "mm::remap_fixed(",
    "mm::remap_and_keep(",
    "mm::unmap(",
    "mm::advise(",
    ".move_pages(",
];

/// Files of the agent, how many calls each has, and why they may.
const ALLOWED: [(&str, usize, &str); 17] = [
    ("window/gate.rs", 6, "the gate"),
    ("window/anonymous.rs", 1, "advice that changes no bytes (dump, fork, huge pages)"),
    ("window/map.rs", 1, "MADV_POPULATE_READ: changes no bytes"),
    ("window/safe_read.rs", 1, "MADV_POPULATE_READ: changes no bytes"),
    ("window/pins.rs", 1, "MADV_POPULATE_WRITE: changes no bytes"),
    ("runtime/state/window_uffd.rs", 7, "UFFDIO_MOVE, which refuses pinned pages, and its scratch area"),
    ("runtime/state/segments.rs", 1, "MADV_DONTFORK on the agent's own mapping of a segment"),
    ("runtime/state/bitmap.rs", 1, "the agent's own bitmap"),
    ("runtime/lineage.rs", 2, "the agent's own page, wiped in children"),
    ("runtime/heap.rs", 1, "the agent's own heap"),
    ("daemon/detach.rs", 1, "MADV_MERGEABLE: changes no bytes"),
    ("intercept/loading.rs", 1, "a mapping that the loader alone knows"),
    (
        "intercept/loading/replace.rs",
        4,
        "memory that is not managed yet, of a guest that stands still and has nothing pinned: it is moved as a whole",
    ),
    ("intercept/attach.rs", 1, "MADV_MERGEABLE and MADV_UNMERGEABLE: change no bytes"),
    (
        "intercept/guard.rs",
        6,
        "the program's own calls, after the gate made them safe; advice on no bytes; MADV_COLD, which changes none",
    ),
    (
        "intercept/without_tables.rs",
        2,
        "the program's own calls, in a child whose tables cannot be used: no window is open there",
    ),
    ("intercept/interpose.rs", 5, "the program's own calls on memory that is not managed"),
];

fn sources(directory: &Path, into: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.ends_with("tests.rs") {
            // Unit tests have memory of their own.
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn nothing_goes_round_the_gate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 30, "{} files", files.len());
    let mut found = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let code = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        let calls: usize = CALLS.iter().map(|call| code.matches(call).count()).sum();
        if calls > 0 {
            found.insert(file.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), calls);
        }
    }
    let allowed: BTreeMap<String, usize> =
        ALLOWED.iter().map(|(file, calls, _)| ((*file).to_owned(), *calls)).collect();
    assert_eq!(found, allowed, "what takes memory of the program away belongs into window/gate.rs");
}
