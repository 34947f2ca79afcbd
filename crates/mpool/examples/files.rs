//! A store of files: the bytes of each lie in an mblock, and the root MDC says which mblock is
//! which file. A crash at any moment leaves the file before or the new one.
//!
//! ```text
//! cargo run -p mpool --example files -- put DIRECTORY FILE     stores a file, or replaces it
//! cargo run -p mpool --example files -- get DIRECTORY NAME     prints it
//! cargo run -p mpool --example files -- rm DIRECTORY NAME      removes it
//! cargo run -p mpool --example files -- ls DIRECTORY           lists them, with their lengths
//! ```

#![allow(clippy::print_stdout, reason = "prints for who runs it")]

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{IoSlice, Write};
use std::path::Path;

use mpool::{AlignedBuf, Allocation, Mdc, OpenOptions, Pool, ROOT_MDC};

/// A record of the catalogue: the mblock of a file, 0 if it is gone, and the file's name.
fn record(mblock: u64, name: &str) -> Vec<u8> {
    [&mblock.to_le_bytes()[..], name.as_bytes()].concat()
}

/// A pool, its catalogue, and what that adds up to.
struct Files {
    pool: Pool,
    catalogue: Mdc,
    files: BTreeMap<String, u64>,
}

impl Files {
    /// Opens the store in a directory, or makes it.
    fn open(directory: &Path) -> Result<Self, Box<dyn Error>> {
        let pool = match directory.join("superblock").exists() {
            true => Pool::open(directory, OpenOptions::default())?,
            false => Pool::create(directory, "files")?,
        };
        let mut catalogue = pool.mdc_open(ROOT_MDC)?;
        let mut files = BTreeMap::new();
        while let Some(record) = catalogue.read()? {
            let (mblock, name) = record.split_first_chunk().ok_or("a record without an mblock")?;
            let name = String::from_utf8(name.to_vec())?;
            match u64::from_le_bytes(*mblock) {
                0 => drop(files.remove(&name)),
                mblock => drop(files.insert(name, mblock)),
            }
        }
        // What a crash has left between an mblock and its record.
        let unnamed = |id: &u64| !files.values().any(|mblock| mblock == id);
        let leftovers: Vec<u64> = pool.mblocks().iter().map(|mblock| mblock.id).filter(unnamed).collect();
        pool.mblock_delete(&leftovers)?;
        Ok(Self { pool, catalogue, files })
    }

    /// Says durably which mblock a file is, and frees the one that it was.
    fn set(&mut self, name: &str, mblock: u64) -> Result<(), Box<dyn Error>> {
        self.catalogue.append(&[&record(mblock, name)], true)?;
        let before = if mblock == 0 { self.files.remove(name) } else { self.files.insert(name.into(), mblock) };
        self.pool.mblock_delete(&Vec::from_iter(before))?;
        self.compact()
    }

    /// Writes the catalogue anew when it is much longer than it need be.
    fn compact(&mut self) -> Result<(), Box<dyn Error>> {
        let records: Vec<Vec<u8>> = self.files.iter().map(|(name, mblock)| record(*mblock, name)).collect();
        if self.catalogue.usage() < 4 * records.iter().map(|record| record.len() as u64 + 32).sum::<u64>() + 4096 {
            return Ok(());
        }
        self.catalogue.start_compaction()?;
        self.catalogue.append(&Vec::from_iter(records.iter().map(Vec::as_slice)), false)?;
        Ok(self.catalogue.end_compaction()?)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        let mut writer =
            self.pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(bytes)])?;
        let mblock = writer.commit()?;
        self.set(name, mblock)
    }

    /// The bytes of a file, which are checked.
    fn get(&self, name: &str) -> Result<(AlignedBuf, usize), Box<dyn Error>> {
        let mblock = self.pool.mblock(*self.files.get(name).ok_or("no file of this name")?)?;
        let len = mblock.props().len as usize;
        let mut bytes = AlignedBuf::zeroed(len);
        mblock.read(0, &mut bytes[..len])?;
        Ok((bytes, len))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["put", directory, file] => {
            let name = Path::new(file).file_name().ok_or("a file has a name")?.to_string_lossy().into_owned();
            Files::open(Path::new(directory))?.put(&name, &std::fs::read(file)?)?;
        }
        ["get", directory, name] => {
            let (bytes, len) = Files::open(Path::new(directory))?.get(name)?;
            std::io::stdout().write_all(&bytes[..len])?;
        }
        ["rm", directory, name] => Files::open(Path::new(directory))?.set(name, 0)?,
        ["ls", directory] => {
            let store = Files::open(Path::new(directory))?;
            for (name, mblock) in &store.files {
                println!("{:>12}  {name}", store.pool.mblock(*mblock)?.props().len);
            }
        }
        _ => return Err("words: put DIRECTORY FILE | get DIRECTORY NAME | rm DIRECTORY NAME | ls DIRECTORY".into()),
    }
    Ok(())
}
