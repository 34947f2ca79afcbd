//! The key of an encrypted pool: a random master key, wrapped by the user's key, in two files
//! beside the superblock of the capacity class.
//!
//! A block, the same in both files. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PGONEKEY` |
//! | 8..12 | version: 1, the user's key is in a file; 2, in the kernel's keyrings |
//! | 12..16 | length of the file's path, or of the key's name |
//! | 16..32 | identity of the pool |
//! | 32..40 | serial number: how often the user's key, or its place, was changed |
//! | 40..72 | a random salt |
//! | 72..80 | by which the user's key is known: HKDF-SHA256 of it and the salt |
//! | 80..120 | the master key, wrapped (AES-KW, RFC 3394) by a key made in the same way |
//! | 120..4092 | path or name of the user's key, zeros |
//! | 4092..4096 | crc32c of all before |
//!
//! The user's key is 32 random bytes, so nothing has to be made slow here. Each file of the pool,
//! and each lease, has keys of its own: HKDF-SHA256 of the master key and the name.
//!
//! A pool whose key is in a file keeps version 1, and is opened by programs that know no other.
//!
//! A change of the user's key writes one file, syncs it, and then the other: the newer whole one
//! counts.

mod user;

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aes_kw::{KeyInit, KwAes256};
use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::block;
use super::medium::{Medium, Open};
use super::xts::Xts;
use crate::error::{Damage, During, IoError, Object, PoolError};
use crate::{BLOCK, KeyPlace, MediaClass};
pub(crate) use user::UserKey;

/// The files. Erasing them in a directory of which a pool is made must not hit a user's own key: so
/// they have a name that nobody gives to that.
pub(crate) const NAMES: [&str; 2] = ["wrapped-key", "wrapped-key.copy"];
const MAGIC: &[u8; 8] = b"PGONEKEY";
/// The versions: what the text is.
const FILE: u32 = 1;
const KERNEL: u32 = 2;
/// Bytes of a key.
const KEY: usize = 32;
/// Where the text begins.
const HEAD: usize = 120;
/// The longest text that fits.
const LONGEST: usize = BLOCK - 4 - HEAD;

/// A key; it is wiped when it is dropped.
type Secret = Zeroizing<[u8; KEY]>;

/// A decoded key file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyFile {
    pool: [u8; 16],
    serial: u64,
    salt: [u8; 32],
    check: [u8; 8],
    wrapped: [u8; KEY + 8],
    /// Where the user's key is.
    place: KeyPlace,
}

/// The version of a block that is whole.
fn version(block: &[u8]) -> Option<u32> {
    block::decode(block, MAGIC)?[MAGIC.len()..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// A version, and what is said with it.
fn parts(place: &KeyPlace) -> (u32, &[u8]) {
    match place {
        KeyPlace::File(path) => (FILE, path.as_os_str().as_bytes()),
        KeyPlace::Kernel(name) => (KERNEL, name.as_bytes()),
    }
}

impl KeyFile {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (version, text) = parts(&self.place);
        let mut block = Vec::with_capacity(BLOCK);
        block.extend(MAGIC);
        block.extend(version.to_le_bytes());
        block.extend((text.len() as u32).to_le_bytes());
        block.extend(self.pool);
        block.extend(self.serial.to_le_bytes());
        [&self.salt[..], &self.check, &self.wrapped, text].iter().for_each(|part| block.extend(*part));
        block::encode(block)
    }

    pub(crate) fn decode(block: &[u8]) -> Option<Self> {
        let (version, rest) = block::decode(block, MAGIC)?[MAGIC.len()..].split_first_chunk::<4>()?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let (pool, rest) = rest.split_first_chunk()?;
        let (serial, rest) = rest.split_first_chunk()?;
        let (salt, rest) = rest.split_first_chunk()?;
        let (check, rest) = rest.split_first_chunk()?;
        let (wrapped, rest) = rest.split_first_chunk()?;
        let (text, zeros) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let place = match u32::from_le_bytes(*version) {
            FILE => KeyPlace::File(std::ffi::OsStr::from_bytes(text).into()),
            KERNEL => KeyPlace::Kernel(std::str::from_utf8(text).ok()?.into()),
            _ => return None,
        };
        let serial = u64::from_le_bytes(*serial);
        let found = Self { pool: *pool, serial, salt: *salt, check: *check, wrapped: *wrapped, place };
        zeros.iter().all(|&byte| byte == 0).then_some(found)
    }

    /// Wraps the master key.
    fn seal(pool: [u8; 16], serial: u64, master: &Secret, user: &UserKey) -> Result<Self, PoolError> {
        let place = user.place.clone();
        let fail = |e: io::Error| IoError::new("wrapping the key with", &place, e);
        if parts(&place).1.len() > LONGEST {
            return Err(PoolError::UnfitKey { key: place, why: "its path or name is too long" });
        }
        let mut salt = [0; 32];
        random(&mut salt).map_err(fail)?;
        let (check, wrapping) = of_user(&user.key, &salt, &pool);
        let mut wrapped = [0; KEY + 8];
        let done = KwAes256::new(&(*wrapping).into()).wrap_key(&master[..], &mut wrapped).map(drop);
        done.map_err(|e| fail(io::Error::other(e.to_string())))?;
        Ok(Self { pool, serial, salt, check, wrapped, place })
    }

    /// The master key, if `user` is the user's key.
    fn unseal(&self, user: &UserKey, medium: &Path) -> Result<Secret, PoolError> {
        let (check, wrapping) = of_user(&user.key, &self.salt, &self.pool);
        if check != self.check {
            return Err(PoolError::WrongKey { path: medium.into(), key: user.place.clone() });
        }
        let mut master = Secret::default();
        let done = KwAes256::new(&(*wrapping).into()).unwrap_key(&self.wrapped, &mut master[..]).map(drop);
        done.map_err(|_| PoolError::KeyLost(medium.into()))?;
        Ok(master)
    }
}

fn random(bytes: &mut [u8]) -> io::Result<()> {
    Ok(rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()).map(drop)?)
}

/// Bytes made of a key, a salt and what they are for.
fn derive<const N: usize>(key: &[u8], salt: &[u8], purpose: &[&[u8]]) -> Zeroizing<[u8; N]> {
    let mut out = Zeroizing::new([0; N]);
    // Only more than 255 times 32 bytes are too many.
    let made = Hkdf::<Sha256>::new(Some(salt), key).expand_multi_info(purpose, &mut out[..]);
    assert!(made.is_ok(), "a key of {N} bytes");
    out
}

/// By which the user's key is known, and what wraps the master key.
fn of_user(user: &Secret, salt: &[u8; 32], pool: &[u8; 16]) -> ([u8; 8], Secret) {
    (*derive(&user[..], salt, &[b"pageone pool: check", pool]), derive(&user[..], salt, &[b"pageone pool: wrap", pool]))
}

/// The keys of an open pool.
pub(crate) struct Keys {
    master: Secret,
    file: KeyFile,
    /// One of the two files is not what it should be.
    damage: Option<Damage>,
    /// Both are to be written again.
    differ: bool,
}

impl Keys {
    /// Makes the master key of a new pool, and its files.
    pub(crate) fn create(medium: &dyn Medium, pool: [u8; 16], user: &UserKey) -> Result<Self, PoolError> {
        let mut master = Secret::default();
        random(&mut master[..]).during("making a key for", medium.path().display())?;
        let file = KeyFile::seal(pool, 1, &master, user)?;
        write(medium, &file, [0, 1])?;
        Ok(Self { master, file, damage: None, differ: false })
    }

    /// The keys of the pool in this directory; `pool`: its identity, if that is known.
    pub(crate) fn open(medium: &dyn Medium, pool: Option<[u8; 16]>) -> Result<Self, PoolError> {
        let (copies, damage) = read(medium, pool)?;
        let differ = copies[0] != copies[1];
        let mut copies: Vec<KeyFile> = copies.into_iter().flatten().collect();
        copies.sort_by_key(|file| std::cmp::Reverse(file.serial));
        let mut failed = None;
        for file in copies {
            let gone = |why: String| PoolError::NoKey { path: medium.path().into(), key: file.place.clone(), why };
            let opened = match UserKey::read(&file.place) {
                Ok(user) => file.unseal(&user, medium.path()),
                Err(PoolError::Io(cause)) => Err(gone(cause.to_string())),
                Err(PoolError::KernelKey { cause, .. }) => Err(gone(cause.to_string())),
                Err(e) => Err(e),
            };
            match opened {
                Ok(master) => return Ok(Self { master, file, damage, differ }),
                // The older one may be the right one, if the newer was never synced.
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        Err(failed.unwrap_or_else(|| PoolError::KeyLost(medium.path().into())))
    }

    /// Wraps the master key with another user's key, or notes a new place of the same one.
    pub(crate) fn change(medium: &dyn Medium, pool: [u8; 16], user: &UserKey) -> Result<(), PoolError> {
        let (copies, _) = read(medium, Some(pool))?;
        let same = copies.iter().flatten().find_map(|file| file.unseal(user, medium.path()).ok());
        let master = match same {
            Some(master) => master,
            None => Self::open(medium, Some(pool))?.master,
        };
        let [first, second] = copies.map(|file| file.map(|file| file.serial));
        let serial = first.max(second).unwrap_or(0).saturating_add(1);
        let file = KeyFile::seal(pool, serial, &master, user)?;
        // The newer whole one is written last.
        Ok(write(medium, &file, if first > second { [1, 0] } else { [0, 1] })?)
    }

    /// Makes both files what they should be.
    pub(crate) fn mend(&self, medium: &dyn Medium) -> Result<(), IoError> {
        if !self.differ {
            return Ok(());
        }
        // First the one that is not whole, or older.
        let whole = copy(medium, NAMES[0]).ok().flatten().is_some_and(|found| found == self.file);
        write(medium, &self.file, if whole { [1, 0] } else { [0, 1] })
    }

    /// One of the two files is not what it should be.
    pub(crate) fn damage(&self) -> Option<&Damage> {
        self.damage.as_ref()
    }

    /// Where the user's key is.
    pub(crate) fn place(&self) -> &KeyPlace {
        &self.file.place
    }

    /// The identity of the pool.
    pub(crate) fn pool(&self) -> [u8; 16] {
        self.file.pool
    }

    /// The cipher of a file of the pool.
    pub(crate) fn of_file(&self, class: MediaClass, name: &str) -> Xts {
        Xts::new(&derive(&self.master[..], &self.file.pool, &[b"pageone pool: file ", &[class as u8], name.as_bytes()]))
    }

    /// The cipher of a lease.
    pub(crate) fn of_lease(&self, number: &[u8; 16]) -> Xts {
        Xts::new(&derive(&self.master[..], &self.file.pool, &[b"pageone pool: lease ", number]))
    }
}

/// Whether there is a key file, whole or not.
pub(crate) fn is_there(medium: &dyn Medium) -> Result<bool, IoError> {
    let names = medium.list().during("listing", medium.path().display())?;
    Ok(names.iter().any(|name| NAMES.contains(&name.as_str())))
}

/// The block in one of the files, whatever it holds. `None`: it is missing, or too short.
fn block_of(medium: &dyn Medium, name: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match medium.open(name, Open { read_only: true, ..Open::default() }) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut block = vec![0; BLOCK];
    match file.read_at(&mut block, 0).or_else(|_| file.read_at(&mut block, 0)) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        read => read.map(|()| Some(block)),
    }
}

/// One of the files. `None`: it is missing, or not whole.
fn copy(medium: &dyn Medium, name: &str) -> io::Result<Option<KeyFile>> {
    Ok(block_of(medium, name)?.and_then(|block| KeyFile::decode(&block)))
}

/// Why neither file can be used: another program made them, or they are lost.
fn unusable(medium: &dyn Medium) -> PoolError {
    let known = [FILE, KERNEL];
    for name in NAMES {
        let block = block_of(medium, name).ok().flatten();
        let version = block.as_deref().and_then(version).filter(|found| !known.contains(found));
        if let Some(found) = version {
            return PoolError::Version { path: medium.path().join(name), found, known };
        }
    }
    PoolError::KeyLost(medium.path().into())
}

/// The two files, where they are whole, and of this pool, if its identity is known. One at least
/// is.
fn read(medium: &dyn Medium, pool: Option<[u8; 16]>) -> Result<([Option<KeyFile>; 2], Option<Damage>), PoolError> {
    let mut failed = None;
    let copies = NAMES.map(|name| {
        let found = copy(medium, name).unwrap_or_else(|e| {
            failed = Some(e);
            None
        });
        found.filter(|file| pool.is_none_or(|pool| file.pool == pool))
    });
    let damage = copies.iter().position(Option::is_none).map(|copy| Damage {
        object: Object::Key,
        offset: 0,
        what: ["its first file is not whole", "its second file is not whole"][copy],
    });
    match (copies.iter().any(Option::is_some), failed) {
        (true, _) => Ok((copies, damage)),
        (false, Some(e)) => Err(IoError::new("reading the wrapped key in", medium.path().display(), e).into()),
        (false, None) => Err(unusable(medium)),
    }
}

/// Writes both files, in this order; each is on the medium before the next is begun.
fn write(medium: &dyn Medium, key: &KeyFile, order: [usize; 2]) -> Result<(), IoError> {
    let (at, block) = (|| medium.path().display(), key.encode());
    for name in order.map(|i| NAMES[i]) {
        let file = medium.open(name, Open { create: true, ..Open::default() });
        let file = file.during("opening the wrapped key in", at())?;
        file.write_at(&block, 0).during("writing the wrapped key in", at())?;
        file.sync().during("syncing the wrapped key in", at())?;
        medium.sync_names().during("syncing", at())?;
    }
    Ok(())
}

/// Overwrites and removes both files: nobody can read the pool then.
pub(crate) fn erase(medium: &dyn Medium) -> Result<(), IoError> {
    let at = || medium.path().display();
    let names = medium.list().during("listing", at())?;
    let there = || NAMES.iter().filter(|name| names.iter().any(|there| there == *name));
    for name in there() {
        let file = medium.open(name, Open::default()).during("opening the wrapped key in", at())?;
        file.write_at(&vec![0; BLOCK], 0).during("erasing the wrapped key in", at())?;
        file.sync().during("erasing the wrapped key in", at())?;
    }
    for name in there() {
        medium.remove(name).during("removing the wrapped key in", at())?;
    }
    Ok(())
}
