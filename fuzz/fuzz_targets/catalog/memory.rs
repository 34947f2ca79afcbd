//! A storage of one directory, in memory: a copy of it costs next to nothing, so that each input
//! gets a fresh one.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mpool::{Access, BLOCK, Medium, MediumFile, Open, Room, Storage};

/// Bytes; blocks that are not there are zeros.
#[derive(Clone, Default)]
pub struct File {
    pub len: usize,
    blocks: BTreeMap<usize, Arc<[u8; BLOCK]>>,
}

/// The files by name.
pub type Directory = BTreeMap<String, File>;

impl File {
    /// The parts of blocks from `at` on: block, offset in it, length, and how many bytes come
    /// before.
    fn parts(at: usize, len: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let (block, offset) = ((at + done) / BLOCK, (at + done) % BLOCK);
            let part = (BLOCK - offset).min(len - done);
            done += part;
            (part > 0).then_some((block, offset, part, done - part))
        })
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (block, offset, part, before) in Self::parts(at, len) {
            if let Some(block) = self.blocks.get(&block) {
                bytes[before..before + part].copy_from_slice(&block[offset..offset + part]);
            }
        }
        bytes
    }

    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        for (block, offset, part, before) in Self::parts(at, bytes.len()) {
            let block = Arc::make_mut(self.blocks.entry(block).or_insert_with(|| Arc::new([0; BLOCK])));
            block[offset..offset + part].copy_from_slice(&bytes[before..before + part]);
        }
        self.len = self.len.max(at + bytes.len());
    }

    fn clear(&mut self, at: usize, len: usize) {
        let end = at.saturating_add(len).min(self.len);
        if at >= end {
            return;
        }
        let keys: Vec<usize> = self.blocks.range(at / BLOCK..end.div_ceil(BLOCK)).map(|(block, _)| *block).collect();
        for block in keys {
            let (from, to) = (at.max(block * BLOCK) - block * BLOCK, end.min((block + 1) * BLOCK) - block * BLOCK);
            if (from, to) == (0, BLOCK) {
                self.blocks.remove(&block);
            } else if let Some(bytes) = self.blocks.get_mut(&block) {
                Arc::make_mut(bytes)[from..to].fill(0);
            }
        }
    }

    pub fn set_len(&mut self, len: usize) {
        self.clear(len, self.len.saturating_sub(len));
        self.len = len;
    }
}

/// The storage.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<Directory>>);

impl Memory {
    pub fn of(files: Directory) -> Self {
        Self(Arc::new(Mutex::new(files)))
    }

    pub fn files(&self) -> Directory {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Directory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for Memory {
    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        self.directory(path)
    }

    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(Place { memory: self.clone(), path: path.into() }))
    }

    fn remove_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
}

struct Place {
    memory: Memory,
    path: PathBuf,
}

impl Medium for Place {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        let mut files = self.memory.lock();
        if !files.contains_key(name) {
            if !how.create {
                return Err(ErrorKind::NotFound.into());
            }
            files.insert(name.into(), File::default());
        }
        Ok(Arc::new(Handle { memory: self.memory.clone(), name: name.into() }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.memory.lock().remove(name).map(drop).ok_or(ErrorKind::NotFound.into())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.memory.lock().keys().cloned().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, _: Access) -> io::Result<bool> {
        Ok(true)
    }

    fn identity(&self) -> io::Result<u64> {
        Ok(1)
    }

    fn room(&self) -> io::Result<Room> {
        Ok(Room { total: 1 << 40, free: 1 << 39 })
    }
}

struct Handle {
    memory: Memory,
    name: String,
}

impl Handle {
    fn with<R>(&self, f: impl FnOnce(&mut File) -> R) -> io::Result<R> {
        self.memory.lock().get_mut(&self.name).map(f).ok_or(ErrorKind::NotFound.into())
    }
}

impl MediumFile for Handle {
    fn len(&self) -> io::Result<u64> {
        self.with(|file| file.len as u64)
    }

    fn used(&self) -> io::Result<u64> {
        self.with(|file| (file.blocks.len() * BLOCK) as u64)
    }

    fn is_direct(&self) -> bool {
        false
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        self.with(|file| {
            let fits = at.checked_add(into.len()).is_some_and(|end| end <= file.len);
            fits.then(|| into.copy_from_slice(&file.read(at, into.len()))).ok_or(ErrorKind::UnexpectedEof.into())
        })?
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.with(|file| file.write(offset as usize, from))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len).filter(|end| *end < 1 << 40) {
            Some(end) => self.with(|file| file.len = file.len.max(end as usize)),
            None => Err(ErrorKind::StorageFull.into()),
        }
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.with(|file| file.clear(offset as usize, len as usize))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.with(|file| file.set_len(len as usize))
    }
}
