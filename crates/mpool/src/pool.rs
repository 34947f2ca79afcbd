//! Pools: create, open, change, destroy.

mod classes;
mod destroy;
mod directory;
mod logs;
mod mblocks;
mod open;
mod rebuild;

pub(crate) mod check;
pub(crate) mod lease;
pub(crate) mod registry;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use crate::disk::file_system::Disk;
use crate::disk::key::{self, Keys, UserKey};
use crate::disk::log::Reserve;
use crate::disk::medium::{Access, Medium, Room, Storage};
use crate::disk::record::Record;
use crate::disk::sealed::over;
use crate::disk::superblock::{self, ENCRYPTED_VERSION, FORMAT_VERSION, Opening, State, Superblock};
use crate::error::{During, PoolError};
use crate::finding::Finding;
use crate::objects::class::ClassUsage;
use crate::objects::inner::Inner;
use crate::objects::log_files::create_root;
use crate::objects::meta::Journal;
use crate::{KeyPlace, MediaClass};
pub use lease::{Kept, Leased};
pub use rebuild::{Rebuild, Rebuilt};

use directory::{create_class, locked, read_superblock, refuse_others_data};

/// How to open a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Alone or with others.
    pub access: Access,
    /// Opens the rest of a pool that lost metadata records, or a class. Implies
    /// [`Access::Shared`].
    pub salvage: bool,
    /// The directories belong together although they do not look so, because the pool was moved, or
    /// restored from a backup: from now on they do. An original that uses the same directories does
    /// not open any more. For an exclusive opening.
    pub adopt: bool,
}

/// The properties of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolProps {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: [u8; 16],
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// The format of its files.
    pub version: u32,
    /// Where the user's key is, of an encrypted pool.
    pub key: Option<KeyPlace>,
    /// How it was opened.
    pub access: Access,
}

/// The contents of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Of each class.
    pub classes: Vec<ClassUsage>,
    /// mlogs.
    pub mlogs: u64,
    /// MDCs, the root MDC too.
    pub mdcs: u64,
    /// Bytes of metadata records.
    pub metadata_bytes: u64,
    /// Bytes that the metadata take on the medium.
    pub metadata_used: u64,
}

/// An open pool. Clones are the same pool; it is closed when the last one, and the last handle of
/// its objects, is gone.
#[derive(Clone)]
pub struct Pool {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pool").field(&self.inner.path).finish()
    }
}

impl Pool {
    /// Makes a pool with its capacity class in `path`, which is made if need be, and opens it.
    ///
    /// # Errors
    /// `Exists`, `Occupied`, `Busy`, `Name`, `Io`.
    pub fn create(path: &Path, name: &str) -> Result<Self, PoolError> {
        Self::create_on(Arc::new(Disk), path, name)
    }

    /// Makes an encrypted pool, and opens it. `key` is 32 random bytes; the pool notes where they
    /// are, and finds them there whenever it is opened.
    ///
    /// # Errors
    /// Those of [`Pool::create`]; `UnfitKey`, `KernelKey`.
    pub fn create_encrypted(path: &Path, name: &str, key: impl Into<KeyPlace>) -> Result<Self, PoolError> {
        Self::create_encrypted_on(Arc::new(Disk), path, name, key)
    }

    pub(crate) fn create_encrypted_on(
        storage: Arc<dyn Storage>,
        path: &Path,
        name: &str,
        key: impl Into<KeyPlace>,
    ) -> Result<Self, PoolError> {
        let key = UserKey::read(&key.into())?;
        Self::create_with(storage, path, name, Some(&key))
    }

    /// From now on an encrypted pool, which must not be open, is opened with this key: the same one
    /// in another place, or another one, with which the pool's own key is wrapped anew. Then the
    /// one before must be where it was.
    ///
    /// # Errors
    /// `NotEncrypted`; those of [`Pool::open`].
    pub fn set_key(path: &Path, key: impl Into<KeyPlace>) -> Result<(), PoolError> {
        Self::set_key_on(&Disk, path, key)
    }

    pub(crate) fn set_key_on(storage: &dyn Storage, path: &Path, key: impl Into<KeyPlace>) -> Result<(), PoolError> {
        let key = UserKey::read(&key.into())?;
        let medium = locked(storage, path)?;
        let path = medium.path().to_owned();
        match read_superblock(&*medium)? {
            None => Err(PoolError::NotAPool(path)),
            Some((superblock, _)) if !superblock.is_encrypted() => Err(PoolError::NotEncrypted(path)),
            Some((superblock, _)) => Keys::change(&*medium, superblock.pool, &key),
        }
    }

    /// Creates a pool as [`Pool::create`] does, on the given storage.
    ///
    /// # Errors
    /// Those of [`Pool::create`].
    pub fn create_on(storage: Arc<dyn Storage>, path: &Path, name: &str) -> Result<Self, PoolError> {
        Self::create_with(storage, path, name, None)
    }

    fn create_with(
        storage: Arc<dyn Storage>,
        path: &Path,
        name: &str,
        key: Option<&UserKey>,
    ) -> Result<Self, PoolError> {
        registry::check_name(name)?;
        let medium = storage.make_directory(path).during("making", path.display())?;
        let path = medium.path().to_owned();
        let is_free = || match read_superblock(&*medium)? {
            Some(_) => Err(PoolError::Exists(path.clone())),
            None => refuse_others_data(&*medium),
        };
        is_free()?;
        // Two programs may create a pool in the same directory: the lock decides.
        if !medium.lock(Access::Exclusive).during("locking", path.display())? {
            return Err(PoolError::Busy(path));
        }
        is_free()?;
        let mut superblock = new_superblock(&*medium, None)?;
        // What an interrupted call left.
        key::erase(&*medium)?;
        let keys = key.map(|key| Keys::create(&*medium, superblock.pool, key)).transpose()?.map(Arc::new);
        if keys.is_some() {
            superblock.version = ENCRYPTED_VERSION;
        }
        let medium = over(medium, keys.as_ref(), MediaClass::Capacity);
        let mut journal = Journal::create(&*medium, name, path.clone())?;
        create_root(&*medium, &mut journal)?;
        journal.close();
        drop(journal);
        create_class(&*medium, &superblock)?;
        // It is locked again as it is opened.
        drop(medium);
        Self::open_on(storage, &path, OpenOptions::default())
    }

    /// Gives the pool another name.
    ///
    /// # Errors
    /// `Name`, `ReadOnly`, `Failed`, `Io`.
    pub fn rename(&self, name: &str) -> Result<(), PoolError> {
        registry::check_name(name)?;
        self.inner.check_writable()?;
        Ok(self.inner.commit(vec![Record::Name(name.into())], Reserve::Keep)?)
    }

    /// Its properties.
    pub fn props(&self) -> PoolProps {
        let Superblock { version, pool: uuid, created, .. } = self.inner.superblock;
        let name = self.inner.meta().tables.name.clone();
        let key = self.inner.keys.as_ref().map(|keys| keys.place().clone());
        PoolProps { name, uuid, created, version, key, access: self.inner.access }
    }

    /// The directory of its capacity class.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The findings of opening it.
    pub fn findings(&self) -> &[Finding] {
        &self.inner.findings
    }

    /// Whether a program waits for this pool, which is open, and says so ([`Sign::Waits`]).
    pub fn is_awaited(&self) -> bool {
        let locked = Sign::Waits.lock(&self.inner.path, FlockOperation::NonBlockingLockExclusive);
        locked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Its contents.
    ///
    /// # Errors
    /// `Io`.
    pub fn usage(&self) -> Result<Usage, PoolError> {
        let meta = self.inner.meta();
        let mut classes = Vec::new();
        for (&class, path) in &meta.tables.classes {
            let of_class = || meta.tables.mblocks.values().filter(|m| m.record.class == class);
            let open = self.inner.class(class).ok();
            let (used_bytes, room) = match &open {
                Some(open) => (
                    open.data.used().during("looking at", path.display())?,
                    open.medium.room().during("looking at", path.display())?,
                ),
                None => (0, Room::default()),
            };
            classes.push(ClassUsage {
                class,
                // Where it was found: the metadata name another place when the pool was moved.
                path: open.as_ref().map_or_else(|| path.clone(), |open| open.medium.path().into()),
                present: open.is_some(),
                direct_io: open.as_ref().is_some_and(|c| c.data.is_direct()),
                gives_back: open.is_some_and(|c| c.data.punches()),
                mblocks: of_class().count() as u64,
                data_bytes: of_class().map(|m| m.record.len).sum(),
                used_bytes,
                room,
            });
        }
        let (mlogs, mdcs) = (meta.tables.mlogs.len() as u64, meta.tables.mdcs.len() as u64);
        drop(meta);
        let journal = self.inner.journal();
        Ok(Usage { classes, mlogs, mdcs, metadata_bytes: journal.pair.content(), metadata_used: journal.pair.used()? })
    }
}

/// What programs tell each other of a pool: each has a file in its directory, which they lock,
/// shared. Who has the pool open locks the directory itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// This program waits until others have closed the pool.
    Waits,
    /// This program has closed the pool for others, and comes back: others let it go first.
    Returns,
    /// This program does what takes long, and ends, or lets others have the pool meanwhile: who
    /// waits for it need not give up.
    Works,
}

impl Sign {
    /// The file's name.
    pub fn file(self) -> &'static str {
        match self {
            Self::Waits => superblock::NAMES[0],
            Self::Works => superblock::NAMES[1],
            Self::Returns => crate::objects::class::DATA,
        }
    }

    /// Gives it, of the pool in this directory, as long as the file is open.
    ///
    /// # Errors
    /// If the file cannot be opened or locked.
    pub fn give(self, path: &Path) -> io::Result<File> {
        self.lock(path, FlockOperation::NonBlockingLockShared)
    }

    fn lock(self, path: &Path, how: FlockOperation) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        let file = claims::open_at(rustix::fs::CWD, &path.join(self.file()), flags, Mode::empty())?;
        flock(&file, how)?;
        Ok(file)
    }
}

/// The superblock of a pool that no other one knows, unless it has keys.
fn new_superblock(medium: &dyn Medium, keys: Option<&Keys>) -> Result<Superblock, PoolError> {
    let at = || medium.path().display();
    let mut uuid = [0; 16];
    rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())
        .map_err(io::Error::from)
        .during("drawing an identity for", at())?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let home = medium.identity().during("looking at", at())?;
    let opening = Opening { epoch: 0, random: 0, before: 0, home, state: State::Open };
    let class = MediaClass::Capacity;
    let (version, pool) = keys.map_or((FORMAT_VERSION, uuid), |keys| (ENCRYPTED_VERSION, keys.pool()));
    Ok(Superblock { version, class, pool, created, opening, serial: 0 })
}
