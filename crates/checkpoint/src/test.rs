//! A storage in memory whose program can be killed at each change, and whose reads can fail.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpool::{Access, BLOCK, EachLease, Medium, MediumFile, Open, Room, Storage};
use parking_lot::Mutex;
use rustix::fs::fstat;
use rustix::pipe::{PipeFlags, pipe_with};

#[derive(Clone, Default)]
struct File {
    len: u64,
    /// Blocks that are not here are zeros.
    blocks: BTreeMap<u64, Vec<u8>>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, File>,
    /// Changes so far.
    changes: u64,
    /// Reads until all fail.
    reads: Option<u64>,
    /// Changes that fail, counted from the start, and whether they are made nevertheless.
    fails: Option<(std::ops::Range<u64>, bool)>,
    /// What becomes of reads when a change has failed.
    then: Then,
    /// File and block of the last write, and the block that cannot be read.
    last: Option<(String, u64)>,
    bad: Option<(String, u64)>,
    /// Descriptor and inode of each lease, which holds while this process has both, and its bytes.
    /// A child of another test has the descriptor too until it is executed, which means nothing.
    leases: Vec<(RawFd, u64, Vec<u8>)>,
    /// Called before the next change.
    next: Option<Box<dyn FnOnce() + Send>>,
}

/// What becomes of reads when a change has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// They go on.
    #[default]
    All,
    /// The block that was written last before cannot be read.
    ButTheLast,
    /// None can be made.
    None,
}

/// The storage: files by the paths of their directories and their names. Clones are of one program,
/// with the changes that it can still make.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<State>>, Arc<Mutex<Option<u64>>>);

impl Memory {
    /// A copy of the files, on which nothing is counted yet.
    pub fn copy(&self) -> Self {
        let files = self.0.lock().files.clone();
        Self(Arc::new(Mutex::new(State { files, ..State::default() })), Arc::default())
    }

    /// The same files, as another program has them.
    pub fn of_another(&self) -> Self {
        Self(self.0.clone(), Arc::default())
    }

    /// The program is killed before this change, counted from now on.
    pub fn kill_before(&self, change: u64) {
        *self.1.lock() = Some(change);
    }

    /// Whether that has come.
    pub fn is_killed(&self) -> bool {
        *self.1.lock() == Some(0)
    }

    /// These changes fail, and are made nevertheless if they are `done`.
    pub fn fail(&self, changes: std::ops::Range<u64>, done: bool) {
        self.0.lock().fails = Some((changes, done));
    }

    /// What becomes of reads when a change has failed.
    pub fn then(&self, then: Then) {
        self.0.lock().then = then;
    }

    /// Changes so far.
    pub fn changes(&self) -> u64 {
        self.0.lock().changes
    }

    /// This read and all behind it fail, counted from now on; `None`: none does.
    pub fn fail_reads_from(&self, read: Option<u64>) {
        self.0.lock().reads = read;
    }

    /// Calls this before the next change.
    pub fn before_next_change(&self, call: impl FnOnce() + Send + 'static) {
        self.0.lock().next = Some(Box::new(call));
    }

    fn change<R>(&self, change: impl FnOnce(&mut BTreeMap<String, File>) -> io::Result<R>) -> io::Result<R> {
        let call = self.0.lock().next.take();
        call.into_iter().for_each(|call| call());
        let mut state = self.0.lock();
        let fails = state.fails.as_ref().and_then(|(which, done)| which.contains(&state.changes).then_some(*done));
        state.changes += 1;
        match &mut *self.1.lock() {
            Some(0) => return Err(io::Error::other("killed")),
            Some(left) => *left -= 1,
            None => {}
        }
        match fails {
            Some(done) => {
                match state.then {
                    Then::All => {}
                    Then::ButTheLast if state.bad.is_some() => {}
                    Then::ButTheLast => state.bad = state.last.clone(),
                    Then::None => state.reads = Some(0),
                }
                let _ = done.then(|| change(&mut state.files));
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            None => change(&mut state.files),
        }
    }
}

impl Storage for Memory {
    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        self.directory(path)
    }

    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(Place(self.clone(), path.into())))
    }

    fn remove_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
}

struct Place(Memory, PathBuf);

impl Place {
    fn of(&self, name: &str) -> String {
        format!("{}/{name}", self.1.display())
    }
}

impl Medium for Place {
    fn path(&self) -> &Path {
        &self.1
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        let name = self.of(name);
        if !self.0.0.lock().files.contains_key(&name) {
            if !how.create {
                return Err(ErrorKind::NotFound.into());
            }
            self.0.change(|files| {
                files.insert(name.clone(), File::default());
                Ok(())
            })?;
        }
        Ok(Arc::new(Handle(self.0.clone(), name)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let name = self.of(name);
        self.0.change(|files| files.remove(&name).map(drop).ok_or(ErrorKind::NotFound.into()))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let prefix = self.of("");
        let files = &self.0.0.lock().files;
        Ok(files.keys().filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.0.change(|_| Ok(()))
    }

    fn lease(&self, bytes: &[u8]) -> io::Result<OwnedFd> {
        self.0.change(|_| Ok(()))?;
        let (_, held) = pipe_with(PipeFlags::CLOEXEC)?;
        self.0.0.lock().leases.push((held.as_raw_fd(), fstat(&held)?.st_ino, bytes.to_vec()));
        Ok(held)
    }

    fn leases(&self, each: &mut EachLease<'_>) -> io::Result<()> {
        let leases = &mut self.0.0.lock().leases;
        let of = |fd: RawFd| std::fs::metadata(format!("/proc/self/fd/{fd}"));
        leases.retain(|&(fd, inode, _)| of(fd).is_ok_and(|file| file.ino() == inode));
        leases.iter().try_for_each(|(.., bytes)| each("", bytes.len() as u64, &mut &bytes[..]))
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

struct Handle(Memory, String);

/// The file of this name.
fn file<'a>(files: &'a mut BTreeMap<String, File>, name: &str) -> io::Result<&'a mut File> {
    files.get_mut(name).ok_or(ErrorKind::NotFound.into())
}

impl File {
    fn write(&mut self, mut from: &[u8], mut offset: u64) {
        self.len = self.len.max(offset + from.len() as u64);
        while !from.is_empty() {
            let at = offset as usize % BLOCK;
            let (now, rest) = from.split_at(from.len().min(BLOCK - at));
            let block = self.blocks.entry(offset / BLOCK as u64).or_insert_with(|| vec![0; BLOCK]);
            block[at..at + now.len()].copy_from_slice(now);
            (from, offset) = (rest, offset + now.len() as u64);
        }
    }

    fn read(&self, mut into: &mut [u8], mut offset: u64) {
        while !into.is_empty() {
            let at = offset as usize % BLOCK;
            let (now, rest) = into.split_at_mut(into.len().min(BLOCK - at));
            match self.blocks.get(&(offset / BLOCK as u64)) {
                Some(block) => now.copy_from_slice(&block[at..at + now.len()]),
                None => now.fill(0),
            }
            offset += now.len() as u64;
            into = rest;
        }
    }

    /// Whole blocks only: what is left is not read before it is written.
    fn punch(&mut self, from: u64, to: u64) {
        let gone = from.div_ceil(BLOCK as u64)..to / BLOCK as u64;
        self.blocks.retain(|block, _| !gone.contains(block));
    }
}

impl MediumFile for Handle {
    fn len(&self) -> io::Result<u64> {
        Ok(file(&mut self.0.0.lock().files, &self.1)?.len)
    }

    fn used(&self) -> io::Result<u64> {
        Ok((file(&mut self.0.0.lock().files, &self.1)?.blocks.len() * BLOCK) as u64)
    }

    fn is_direct(&self) -> bool {
        false
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut state = self.0.0.lock();
        match &mut state.reads {
            Some(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(left) => *left -= 1,
            None => {}
        }
        let is_bad = |(name, at): &(String, u64)| *name == self.1 && (offset..offset + into.len() as u64).contains(at);
        if state.bad.as_ref().is_some_and(is_bad) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let file = file(&mut state.files, &self.1)?;
        if offset + into.len() as u64 > file.len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        file.read(into, offset);
        Ok(())
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.0.change(|files| file(files, &self.1).map(|file| file.write(from, offset)))?;
        self.0.0.lock().last = Some((self.1.clone(), offset));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.change(|_| Ok(()))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.change(|files| file(files, &self.1).map(|file| file.len = file.len.max(offset + len)))
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.change(|files| file(files, &self.1).map(|file| file.punch(offset, offset + len)))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.change(|files| {
            file(files, &self.1).map(|file| {
                file.punch(len, file.len.max(len));
                if let Some(block) = file.blocks.get_mut(&(len / BLOCK as u64)) {
                    block[len as usize % BLOCK..].fill(0);
                }
                file.len = len;
            })
        })
    }
}
