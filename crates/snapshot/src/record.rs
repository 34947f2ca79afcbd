//! What lies beside a snapshot's memory in the pool: a description, and QEMU's device stream.
//!
//! ```text
//! magic "PGSNAP01" · bytes of the description, 4, little-endian · description, JSON · stream
//! ```

use std::borrow::Cow;
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
    /// Whether it had mounts, users or numbers of processes of its own, as in a container.
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
        let meta = std::fs::metadata(image)?;
        Ok(Self { image: image.into(), len: meta.len(), written: (meta.mtime(), meta.mtime_nsec()) })
    }
}

impl Disk {
    /// Notes what its image and all below it are now.
    ///
    /// # Errors
    /// If one of them cannot be read: it is named.
    pub fn note_layers(&mut self) -> Result<(), (PathBuf, io::Error)> {
        let of = |image: PathBuf| Layer::of(&image).map_err(|error| (image, error));
        self.layers = self.chain()?.into_iter().map(of).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Its image, the one below it, and so on.
    pub(crate) fn chain(&self) -> Result<Vec<PathBuf>, (PathBuf, io::Error)> {
        qcow2::chain(qcow2::Backing { image: self.image.clone(), raw: self.raw })
    }
}

impl Description {
    /// The guest that was stored, as its command line names it: `-name` and `-uuid`. Two snapshots
    /// with the same are of one guest: clones have the source's UUID, and names of their own.
    pub fn guest(&self) -> Option<String> {
        let all = words::name(&self.words).into_iter().chain(words::uuid(&self.words).map(Cow::Borrowed));
        all.reduce(|name, uuid| format!("{name} {uuid}").into()).map(Cow::into_owned)
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
        let rest = bytes.strip_prefix(MAGIC).ok_or(Foreign)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(Foreign)?;
        let (description, stream) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(Foreign)?;
        let description = Some(description).filter(|text| text.len() as u64 <= DESCRIPTION).ok_or(Foreign)?;
        let description = serde_json::from_slice(description).map_err(|_| Foreign)?;
        Ok(Self { description, stream: stream.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_known_by_its_uuid_or_name() {
        let guest = |line: &str| {
            let words = line.split(' ').map(String::from).collect();
            Description { words, ..Description::default() }.guest()
        };
        assert_eq!(guest("-m 1 -name guest=web,debug-threads=on"), Some("web".into()));
        assert_eq!(guest("-m 1 --name web"), Some("web".into()));
        assert_eq!(guest("-name web -uuid 1-2"), Some("web 1-2".into()));
        assert_eq!(guest("-uuid 1-2"), Some("1-2".into()));
        assert_eq!(guest("-name shop,,one"), Some("shop,one".into()));
        assert_ne!(guest("-name shop,,one"), guest("-name shop,,two"));
        assert_eq!(guest("-m name"), None);
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_nothing_else_is_one() {
        let disks = vec![Disk { word: "a.qcow2".into(), image: "/b.qcow2".into(), ..Disk::default() }];
        let (program, words, source) = ("/q".into(), vec!["-S".into()], Source::of(std::process::id()).ok());
        assert!(source.as_ref().is_some_and(Source::runs));
        let other = |source: Source| {
            !Source { started: 0, ..source.clone() }.runs() && !Source { boot: "".into(), ..source }.runs()
        };
        assert!(other(source.clone().unwrap()));
        let description = Description { program, words, disks, source, ..Description::default() };
        let record = Record { description, stream: vec![1, 2, 3] };
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes).unwrap(), record);
        // One that was stored by an earlier version.
        let old = br#"{"program":"/q","directory":"/","words":[],"facts":{"qemu":"","machine":"","cpu":"","features":[],"cpus":1,"ram":1,"devices":[]},"disks":[]}"#;
        let old = Record::decode(&[MAGIC, &(old.len() as u32).to_le_bytes()[..], old].concat()).unwrap().description;
        assert!(old.source.is_none() && !old.imported && !old.reseeds);
        for len in 0..bytes.len() - 3 {
            assert!(Record::decode(&bytes[..len]).is_err(), "{len}");
        }
        let error = Record::decode(b"PGSNAP02....").unwrap_err().to_string();
        assert_eq!(
            error,
            "what is kept beside it is no snapshot that this version of PageONE understands; use \
                           the version that took it, or take a new one"
        );
    }
}
