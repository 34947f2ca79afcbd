//! What lies beside a snapshot's memory in the pool: a description, and QEMU's device stream.
//!
//! ```text
//! magic "PGSNAP01" · bytes of the description, 4, little-endian · description, JSON · stream
//! ```

use std::borrow::Cow;
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kmem::account::Account;
use kmem::place::is_elsewhere;
use kmem::procfs::start_time;
use serde::{Deserialize, Serialize};

use crate::facts::Facts;
use crate::qcow2;
use guests::words;

const MAGIC: &[u8; 8] = b"PGSNAP01";
/// Bytes of a description, at most: its longest part is a command line. As text it takes less than
/// when it is read.
pub(crate) const DESCRIPTION: u64 = 2 << 20;

/// A guest's description. An earlier version's lacks what has a default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// QEMU's program.
    pub program: PathBuf,
    /// The directory that it ran in: names on its command line may be relative.
    pub directory: PathBuf,
    /// The words of its command line, without those for RAM and monitor.
    pub words: Vec<String>,
    /// What a clone must have in common with it.
    pub facts: Facts,
    /// Its disks.
    pub disks: Vec<Disk>,
    /// Whose it was.
    #[serde(default)]
    pub source: Option<Source>,
    /// Whether it came in an archive: nothing in it is this host's word.
    #[serde(default)]
    pub imported: bool,
    /// Whether the guest's kernel makes new random numbers in each clone, as its agent says.
    #[serde(default)]
    pub reseeds: bool,
}

/// A guest's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Other groups.
    pub groups: Vec<u32>,
    /// Capabilities that it could use, a bit each.
    pub capabilities: u64,
    /// Its number.
    pub pid: u32,
    /// When it was started, in the kernel's ticks, and after which boot of the host.
    pub started: u64,
    /// The boot's number.
    pub boot: String,
    /// Whether it had mounts, users, numbers of processes or networks of its own, as in a
    /// container.
    #[serde(default)]
    pub elsewhere: bool,
}

impl Source {
    /// That of a process.
    ///
    /// # Errors
    /// If it has ended.
    pub fn of(pid: u32) -> io::Result<Self> {
        let Account { uid, gid, groups, capabilities } = Account::of(pid)?;
        let (started, elsewhere) = (start_time(pid as i32)?, is_elsewhere(pid)?);
        Ok(Self { uid, gid, groups, capabilities, pid, started, boot: boot()?, elsewhere })
    }

    /// Whether it runs.
    pub fn runs(&self) -> bool {
        let started = start_time(self.pid as i32);
        started.is_ok_and(|started| started == self.started) && boot().is_ok_and(|boot| boot == self.boot)
    }

    /// The account.
    pub fn account(&self) -> Account {
        let &Self { uid, gid, ref groups, capabilities, .. } = self;
        Account { uid, gid, groups: groups.clone(), capabilities }
    }
}

/// The number of this host's boot.
fn boot() -> io::Result<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The image as the command line names it.
    pub word: String,
    /// The image at the time of the snapshot. Nothing may change it from then on.
    pub image: PathBuf,
    /// Whether it is raw, and not qcow2. The guest decides about all of a raw image's bytes: they
    /// are never taken for a header.
    #[serde(default)]
    pub raw: bool,
    /// Its image and all below, as they were. Empty: an earlier version has not noted it.
    #[serde(default)]
    pub layers: Vec<Layer>,
    /// How many of these its save made, from its image on. Zero: an earlier version, or an import.
    #[serde(default)]
    pub own: usize,
}

/// A file that was stored. Whoever writes to it changes its time; copies of it can keep that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The file.
    pub image: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// When it was written to last: seconds since 1970, and nanoseconds.
    pub written: (i64, i64),
}

impl Layer {
    /// That of a file.
    ///
    /// # Errors
    /// If it is not there.
    pub fn of(image: &Path) -> io::Result<Self> {
        Ok(Self::new(image, &std::fs::metadata(image)?))
    }

    /// That of a file, whatever has its name.
    pub(crate) fn new(image: &Path, meta: &Metadata) -> Self {
        Self { image: image.into(), len: meta.len(), written: (meta.mtime(), meta.mtime_nsec()) }
    }
}

impl Disk {
    /// What its image, the one below it, and so on are now, as their headers say. Whoever may write
    /// to one of them decides which files that are: they are read as that account.
    ///
    /// # Errors
    /// If one of them cannot be read: it is named.
    pub(crate) fn layers_by_headers(&self) -> Result<Vec<Layer>, (PathBuf, io::Error)> {
        // Raw ones have no header: it is seen all the same that they can be read.
        let open = |image: &PathBuf| Ok(Layer::new(image, &qcow2::open(image)?.metadata()?));
        let of = |image: PathBuf| open(&image).map_err(|error| (image, error));
        qcow2::chain(qcow2::Backing { image: self.image.clone(), raw: self.raw })?.into_iter().map(of).collect()
    }

    /// Notes these, read as that account.
    ///
    /// # Errors
    /// As before.
    pub(crate) fn note_layers(&mut self, account: &Account) -> Result<(), (PathBuf, io::Error)> {
        let read = account.with_files(|| Ok(self.layers_by_headers()));
        self.layers = read.map_err(|error| (self.image.clone(), error))??;
        Ok(())
    }
}

impl Description {
    /// The account whose the images are: the guest's, or the caller's where that is not known, or
    /// another host's.
    ///
    /// # Errors
    /// If `/proc` does not tell.
    pub fn reader(&self) -> io::Result<Account> {
        match &self.source {
            Some(source) if !self.imported => Ok(source.account()),
            _ => Account::of(std::process::id()),
        }
    }

    /// The guest that was stored. `process`: what the checkpoint says that it was taken of.
    pub fn guest(&self, process: &str) -> Guest {
        let name = words::name(&self.words).map(Cow::into_owned);
        let uuid = words::uuid(&self.words).map(str::to_owned);
        let of = |source: &Source| (process.to_owned(), source.started, source.boot.clone());
        let process = self.source.as_ref().map_or_else(|| (process.to_owned(), 0, String::new()), of);
        Guest {
            process: (name.is_none() && uuid.is_none()).then_some(process),
            name,
            uuid,
            uid: self.source.as_ref().map(|source| source.uid),
            elsewhere: self.source.as_ref().is_some_and(|source| source.elsewhere),
            imported: self.imported,
        }
    }
}

/// All by which guests are told apart: what anybody may call a guest of his counts for him alone.
/// Clones have the source's UUID, and names of their own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Guest {
    /// `-name`.
    name: Option<String>,
    /// `-uuid`.
    uuid: Option<String>,
    /// Without both: the process, when it was started, and the host's boot.
    process: Option<(String, u64, String)>,
    /// Whose it was.
    uid: Option<u32>,
    /// As [`Source::elsewhere`].
    elsewhere: bool,
    /// As [`Description::imported`].
    imported: bool,
}

impl Guest {
    /// What it is called, for people.
    pub fn called(&self) -> &str {
        let process = self.process.as_ref().map(|(process, ..)| process);
        self.name.as_ref().or(self.uuid.as_ref()).or(process).map_or("", String::as_str)
    }
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It is one line, whatever the guest's owner has called it.
        f.write_str(&output::text::printable(self.called()))?;
        self.uid.map_or(Ok(()), |uid| write!(f, ", uid {uid}"))?;
        f.write_str(if self.elsewhere { ", in a container" } else { "" })?;
        f.write_str(if self.imported { ", imported" } else { "" })
    }
}

/// A description with the device stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The description.
    pub description: Description,
    /// What QEMU says of all devices and processors.
    pub stream: Vec<u8>,
}

/// The bytes beside a checkpoint are those of another program, or of another version of this one.
#[derive(Debug, thiserror::Error)]
#[error(
    "what is kept beside it is no snapshot that this version of PageONE understands; use the version that \
         took it, or take a new one"
)]
pub struct Foreign;

impl Record {
    /// The record as bytes.
    pub fn encode(&self) -> Vec<u8> {
        // Text and numbers alone: it can be written as JSON.
        let description = serde_json::to_vec(&self.description).unwrap_or_default();
        let len = (description.len() as u32).to_le_bytes();
        [MAGIC, &len[..], &description, &self.stream].concat()
    }

    /// Reads a record.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, Foreign> {
        let (description, at) = Description::decode(bytes)?;
        Ok(Self { description, stream: bytes[at..].to_vec() })
    }
}

impl Description {
    /// Reads the description at the beginning of a record, of which there may be more; gives also
    /// where the stream begins.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), Foreign> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(Foreign)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(Foreign)?;
        let len = u32::from_le_bytes(*len) as usize;
        let text = rest.get(..len).filter(|text| text.len() as u64 <= DESCRIPTION).ok_or(Foreign)?;
        let description = serde_json::from_slice(text).map_err(|_| Foreign)?;
        Ok((description, bytes.len() - rest.len() + len))
    }
}

#[cfg(test)]
mod tests;
