//! The checkpoints in a pool, some of them compressed, as they lie there, after damage: they are
//! listed, read, one is added, one removed, and what is left is repacked.
//!
//! The first byte says how. *Files*: bytes of the pool's files are not what was written. Whatever
//! is still given out must be the memory that was stored. *Records*: whole records that nobody
//! wrote are in the list. They may say what they like; nothing panics, takes memory without bounds,
//! or makes what is stored afterwards wrong.

#![no_main]

mod memory;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::Result;
use checkpoint::{Catalog, Checkpoint, Store, hash};
use memory::{Directory, Memory};
use mpool::{Access, BLOCK, Mcache, OpenOptions, Pool, ROOT_MDC, Settings};
use serde::Serialize;

const PATH: &str = "/pool";

/// Contents of the pages of each checkpoint; 0: zeros.
const STORED: [(&str, &[u8]); 3] = [("one", &[1, 2, 0, 1, 3]), ("two", &[3, 2, 4, 0, 0, 1]), ("three", &[5, 1, 6])];
/// Of the one that is added.
const ADDED: &[u8] = &[1, 9, 0, 4, 9, 6, 2];

/// A record, laid out as the catalogue's own.
#[derive(Serialize)]
enum Entry {
    Format(u32),
    Data(Vec<(u64, u32)>),
    Checkpoint {
        name: String,
        created: u64,
        source: String,
        regions: Vec<(u64, u64)>,
        new_pages: u64,
        map_pages: u64,
        root: u64,
        number: u64,
        /// Data mblocks, first and count; and those with leaves of its map.
        needs: (Vec<(u64, u32)>, Vec<u64>),
    },
    Gone(String),
    DataGone(Vec<u64>),
    Index(Vec<Run>, u64),
    /// Mblocks and bytes beside the checkpoint with a number.
    Attached(u64, (Vec<u64>, u64)),
    Compressed(Vec<(u64, u32)>),
}

/// A run of the index.
#[derive(Serialize)]
struct Run {
    shift: u8,
    /// Identity, entries, first key.
    parts: Vec<(u64, u32, u64)>,
}

struct Whole {
    files: Directory,
    /// Of every mblock.
    ids: Vec<u64>,
    cache: Mcache,
}

fn page(content: u8) -> Vec<u8> {
    (0..BLOCK).map(|i| if content == 0 { 0 } else { content.wrapping_mul(31).wrapping_add((i / 7) as u8) }).collect()
}

fn memory(contents: &[u8]) -> Vec<u8> {
    contents.iter().flat_map(|&content| page(content)).collect()
}

fn store(catalog: Catalog, name: &str, contents: &[u8]) -> Result<Checkpoint> {
    let store = Store::new(catalog);
    let mut writer = store.begin(name)?;
    writer.set_pages(contents.len());
    let bytes = memory(contents);
    let hashes: Vec<_> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
    writer.put(&(0..contents.len() as u64).collect::<Vec<_>>(), &bytes, &hashes)?;
    let off = writer.put_off();
    let again: Vec<u8> = off.iter().flat_map(|off| &bytes[off.page as usize * BLOCK..][..BLOCK]).copied().collect();
    writer.put_again(&off, &again)?;
    Ok(writer.commit("fuzzed".into(), vec![(1 << 30, bytes.len() as u64)])?)
}

/// The memory of a checkpoint, unless it is too much for a test.
fn load(catalog: &Catalog, checkpoint: &Checkpoint) -> Option<Vec<u8>> {
    let len = checkpoint.bytes();
    let mut all = vec![0; if len < 1 << 20 { len as usize } else { 0 }];
    let read = catalog.each_run(&whole().cache, checkpoint, |offset, bytes| {
        if !all.is_empty() {
            all[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    });
    read.is_ok().then_some(all)
}

fn open(memory: &Memory, access: Access) -> Option<(Pool, Catalog)> {
    let options = OpenOptions { access, ..OpenOptions::default() };
    let pool = Pool::open_on(Arc::new(memory.clone()), Path::new(PATH), options).ok()?;
    let catalog = Catalog::open(&pool).ok()?;
    Some((pool, catalog))
}

/// A pool with some checkpoints.
fn whole() -> &'static Whole {
    static WHOLE: OnceLock<Whole> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let memory = Memory::default();
        drop(Pool::create_on(Arc::new(memory.clone()), Path::new(PATH), "fuzzed").expect("a pool"));
        for (name, contents) in STORED {
            let (_, catalog) = open(&memory, Access::Exclusive).expect("a catalogue");
            store(catalog, name, contents).expect("stored");
        }
        let (_, mut catalog) = open(&memory, Access::Exclusive).expect("a catalogue");
        assert!(catalog.repack(Some(1)).expect("repacked").compressed > 0);
        drop(catalog);
        let ids = open(&memory, Access::Shared).expect("a pool").0.mblocks().iter().map(|m| m.id).collect();
        Whole { files: memory.files(), ids, cache: Mcache::new(Settings::default()).expect("a cache") }
    })
}

/// 8 bytes a hit: the file (1), the way (1: cut there; the file's end written there; two bytes
/// changed), an offset (4), a value (2).
fn damage(files: &mut Directory, input: &[u8]) {
    for hit in input.chunks_exact(8).take(8) {
        let count = files.len();
        let Some(file) = files.values_mut().nth(usize::from(hit[0]) % count) else { return };
        let at = u32::from_le_bytes([hit[2], hit[3], hit[4], hit[5]]) as usize % file.len.max(1);
        match hit[1] % 4 {
            0 => file.set_len(at),
            1 => {
                let end: Vec<u8> = file.read(file.len - at.min(file.len), at.min(file.len));
                file.write(at / 2, &end);
            }
            _ => file.write(at, &hit[6..8]),
        }
    }
}

/// 12 bytes a record: the kind (1), which name (1), which mblock (1), a shift (1), a number (8).
fn add_records(memory: &Memory, input: &[u8]) {
    let (whole, path) = (whole(), Path::new(PATH));
    let pool = Pool::open_on(Arc::new(memory.clone()), path, OpenOptions::default()).expect("a whole pool");
    let mut list = pool.mdc_open(ROOT_MDC).expect("its list");
    for bytes in input.chunks_exact(12).take(16) {
        let number = u64::from_le_bytes(bytes[4..12].try_into().expect("8 bytes")) >> (bytes[3] % 64);
        let name = STORED.get(usize::from(bytes[1])).map_or_else(|| format!("name-{}", bytes[1]), |(name, _)| (*name).into());
        let id = whole.ids.get(usize::from(bytes[2])).copied().unwrap_or(number);
        let regions = vec![(number, u64::from(bytes[1]) * BLOCK as u64), (1 << 40, number)];
        let entry = match bytes[0] % 9 {
            0 => Entry::Format(number as u32),
            1 => Entry::Data(vec![(id, number as u32)]),
            2 => {
                let needs = (vec![(number, u32::from(bytes[1])), (id, number as u32)], vec![id, number, id.wrapping_add(1)]);
                let (new_pages, map_pages, source) = (number, number, String::new());
                Entry::Checkpoint { name, created: 0, source, regions, new_pages, map_pages, root: id, number, needs }
            }
            3 => Entry::Gone(name),
            4 => Entry::DataGone(vec![id]),
            5 => Entry::Index(vec![Run { shift: bytes[1], parts: vec![(id, number as u32, 0), (number, 1, number)] }], id),
            6 => Entry::Attached(id, (vec![id, number], number)),
            7 => Entry::Compressed(vec![(id, number as u32)]),
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
    let files = how % 2 == 0;
    let mut there = whole().files.clone();
    if files {
        damage(&mut there, input);
    }
    let storage = &Memory::of(there);
    if !files {
        add_records(storage, input);
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
    if let Some((_, catalog)) = open(storage, Access::Shared) {
        is_right(&catalog);
    }
    if let Some((_, catalog)) = open(storage, Access::Exclusive)
        && store(catalog, "added", ADDED).is_ok()
        && let Some((_, catalog)) = open(storage, Access::Exclusive)
    {
        let added = catalog.find("added").expect("it was stored");
        let is = load(&catalog, added);
        assert!(!files || is.is_some(), "what was stored just now can be read");
        is_right(&catalog);
    }
    if let Some((_, mut catalog)) = open(storage, Access::Exclusive) {
        let _ = catalog.remove("one");
        is_right(&catalog);
        let _ = catalog.repack(Some(1));
        let _ = catalog.check_compressed();
        is_right(&catalog);
    }
});
