//! The checkpoints in a pool, as they lie there, after damage: they are listed, read, one is added, one removed.
//!
//! The first byte says how. *Files*: bytes of the pool's files are not what was written. Whatever is still given out must be the memory
//! that was stored. *Records*: whole records that nobody wrote are in the list. They may say what they like; nothing panics, takes memory
//! without bounds, or makes what is stored afterwards wrong.

#![no_main]

#[path = "../../src/checkpoint/catalog.rs"]
#[allow(dead_code)]
mod catalog;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use catalog::{Catalog, Checkpoint, hash};
use mpool::{Access, BLOCK, OpenOptions, Pool, ROOT_MDC};
use serde::Serialize;

/// Contents of the pages of each checkpoint; 0: zeros.
const STORED: [(&str, &[u8]); 3] = [("one", &[1, 2, 0, 1, 3]), ("two", &[3, 2, 4, 0, 0, 1]), ("three", &[5, 1, 6])];
/// Of the one that is added.
const ADDED: &[u8] = &[1, 9, 0, 4, 9, 6, 2];

/// A record, laid out as the catalogue's own.
#[derive(Serialize)]
enum Entry {
    Format(u32),
    Data { id: u64, pages: u32 },
    Checkpoint { name: String, created: u64, source: String, regions: Vec<(u64, u64)>, new_pages: u64, map: u64 },
    Gone(String),
    DataGone(u64),
}

struct Whole {
    files: Vec<(PathBuf, Vec<u8>)>,
    /// Of every mblock.
    ids: Vec<u64>,
    directory: tempfile::TempDir,
}

fn page(content: u8) -> Vec<u8> {
    (0..BLOCK).map(|i| if content == 0 { 0 } else { content.wrapping_mul(31).wrapping_add((i / 7) as u8) }).collect()
}

fn memory(contents: &[u8]) -> Vec<u8> {
    contents.iter().flat_map(|&content| page(content)).collect()
}

fn store(catalog: Catalog, name: &str, contents: &[u8]) -> Result<Checkpoint> {
    let mut writer = catalog.begin(name)?;
    writer.set_pages(contents.len());
    let bytes = memory(contents);
    let hashes: Vec<_> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
    writer.put(&(0..contents.len() as u64).collect::<Vec<_>>(), &bytes, &hashes)?;
    let off = writer.put_off();
    let again: Vec<u8> = off.iter().flat_map(|(_, page)| &bytes[*page as usize * BLOCK..][..BLOCK]).copied().collect();
    writer.put_again(&off, &again)?;
    writer.commit("fuzzed".into(), vec![(1 << 30, bytes.len() as u64)])
}

/// The memory of a checkpoint, unless it is too much for a test.
fn load(catalog: &Catalog, checkpoint: &Checkpoint) -> Option<Vec<u8>> {
    let len = checkpoint.bytes();
    let mut all = vec![0; if len < 1 << 20 { len as usize } else { 0 }];
    let read = catalog.each_run(checkpoint, |offset, bytes| {
        if !all.is_empty() {
            all[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    });
    read.is_ok().then_some(all)
}

fn open(directory: &Path, access: Access) -> Option<(Pool, Catalog)> {
    let pool = Pool::open(directory, OpenOptions { access, ..OpenOptions::default() }).ok()?;
    let catalog = Catalog::open(&pool).ok()?;
    Some((pool, catalog))
}

/// A pool with some checkpoints, and the bytes of its files.
fn whole() -> &'static Whole {
    static WHOLE: OnceLock<Whole> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        drop(Pool::create(directory.path(), "fuzzed").expect("a pool"));
        for (name, contents) in STORED {
            let (_, catalog) = open(directory.path(), Access::Exclusive).expect("a catalogue");
            store(catalog, name, contents).expect("stored");
        }
        let ids = open(directory.path(), Access::Shared).expect("a pool").0.mblocks().iter().map(|m| m.id).collect();
        let files = fs::read_dir(directory.path()).expect("files").flatten();
        let mut files: Vec<_> = files.map(|file| (file.path(), fs::read(file.path()).expect("a file"))).collect();
        files.sort();
        Whole { files, ids, directory }
    })
}

/// 8 bytes a hit: the file (1), the way (1: cut there; the file's end written there; two bytes changed), an offset (4), a value (2).
fn damage(whole: &Whole, input: &[u8]) {
    for hit in input.chunks_exact(8).take(8) {
        let (path, bytes) = &whole.files[usize::from(hit[0]) % whole.files.len()];
        let at = u32::from_le_bytes([hit[2], hit[3], hit[4], hit[5]]) as usize % bytes.len().max(1);
        let file = fs::OpenOptions::new().write(true).open(path).expect("open");
        match hit[1] % 4 {
            0 => file.set_len(at as u64).expect("cut"),
            1 => file.write_all_at(&bytes[bytes.len() - at.min(bytes.len())..], at as u64 / 2).expect("moved"),
            _ => file.write_all_at(&hit[6..8], at as u64).expect("hit"),
        }
    }
}

/// 12 bytes a record: the kind (1), which name (1), which mblock (1), a shift (1), a number (8).
fn add_records(whole: &Whole, input: &[u8]) {
    let pool = Pool::open(whole.directory.path(), OpenOptions::default()).expect("a whole pool");
    let mut list = pool.mdc_open(ROOT_MDC).expect("its list");
    for bytes in input.chunks_exact(12).take(16) {
        let number = u64::from_le_bytes(bytes[4..12].try_into().expect("8 bytes")) >> (bytes[3] % 64);
        let name = STORED.get(usize::from(bytes[1])).map_or_else(|| format!("name-{}", bytes[1]), |(name, _)| (*name).into());
        let id = whole.ids.get(usize::from(bytes[2])).copied().unwrap_or(number);
        let regions = vec![(number, u64::from(bytes[1]) * BLOCK as u64), (1 << 40, number)];
        let entry = match bytes[0] % 6 {
            0 => Entry::Format(number as u32),
            1 => Entry::Data { id, pages: number as u32 },
            2 => Entry::Checkpoint { name, created: 0, source: "".into(), regions, new_pages: number, map: id },
            3 => Entry::Gone(name),
            4 => Entry::DataGone(id),
            _ => {
                list.append(&[&bytes[1..]], true).expect("appended");
                continue;
            }
        };
        list.append(&[&postcard::to_allocvec(&entry).expect("encoded")], true).expect("appended");
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let (whole, files) = (whole(), how % 2 == 0);
    let directory = whole.directory.path();
    if files {
        damage(whole, input);
    } else {
        add_records(whole, input);
    }
    let is_right = |catalog: &Catalog| {
        for checkpoint in catalog.checkpoints() {
            let stored = STORED.iter().chain(&[("added", ADDED)]).find(|(name, _)| *name == checkpoint.name);
            let memory_of = |checkpoint| load(catalog, checkpoint).zip(stored.map(|(_, contents)| memory(contents)));
            if let Some((is, want)) = memory_of(checkpoint)
                && (files || checkpoint.name == "added")
            {
                assert!(is == want, "{} is not what was stored", checkpoint.name);
            }
        }
    };
    if let Some((_, catalog)) = open(directory, Access::Shared) {
        is_right(&catalog);
    }
    if let Some((_, catalog)) = open(directory, Access::Exclusive)
        && store(catalog, "added", ADDED).is_ok()
        && let Some((_, catalog)) = open(directory, Access::Exclusive)
    {
        let added = catalog.find("added").expect("it was stored");
        let is = load(&catalog, added);
        assert!(!files || is.is_some(), "what was stored just now can be read");
        is_right(&catalog);
    }
    if let Some((_, mut catalog)) = open(directory, Access::Exclusive) {
        let _ = catalog.remove("one");
        is_right(&catalog);
    }
    let there = fs::read_dir(directory).expect("files").flatten().map(|file| file.path());
    there.filter(|path| !whole.files.iter().any(|(known, _)| known == path)).for_each(|path| fs::remove_file(path).expect("removed"));
    whole.files.iter().for_each(|(path, bytes)| fs::write(path, bytes).expect("written"));
});
