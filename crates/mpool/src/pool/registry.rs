//! Names for pools: a directory of symbolic links to their capacity classes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::Access;
use crate::KeyPlace;
use crate::disk::file_system::{make_directory, sync_directory};
use crate::error::{During, PoolError};
use crate::pool::{OpenOptions, Pool};

/// A directory of pools' names.
#[derive(Clone, Debug)]
pub struct Registry {
    directory: PathBuf,
}

/// Checks that a name can be a file's and needs no quoting.
pub(crate) fn check_name(name: &str) -> Result<(), PoolError> {
    let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    if letters && !name.starts_with('.') && (1..64).contains(&name.len()) {
        Ok(())
    } else {
        Err(PoolError::Name(name.into()))
    }
}

impl Registry {
    /// The names in this directory, which need not be there yet.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    fn link(&self, name: &str) -> Result<PathBuf, PoolError> {
        check_name(name)?;
        Ok(self.directory.join(name))
    }

    /// The directory of the pool of that name. A word with a slash is a path already.
    ///
    /// # Errors
    /// `Name`, `NoSuchPool`.
    pub fn find(&self, name: &str) -> Result<PathBuf, PoolError> {
        if name.contains('/') {
            return Ok(name.into());
        }
        fs::read_link(self.link(name)?).map_err(|_| PoolError::NoSuchPool(name.into()))
    }

    /// All names and where they lead, sorted.
    ///
    /// # Errors
    /// `Io`.
    pub fn list(&self) -> Result<Vec<(String, PathBuf)>, PoolError> {
        let at = || self.directory.display();
        let entries = match fs::read_dir(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.during("listing", at())?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.during("listing", at())?.path();
            if let (Ok(target), Some(name)) = (fs::read_link(&path), path.file_name()) {
                all.push((name.to_string_lossy().into_owned(), target));
            }
        }
        all.sort();
        Ok(all)
    }

    /// Makes a pool and enters its name.
    ///
    /// # Errors
    /// `Exists`: the name is taken; those of [`Pool::create`].
    pub fn create(&self, name: &str, path: &Path) -> Result<Pool, PoolError> {
        self.enter(name, || Pool::create(path, name))
    }

    /// Makes an encrypted pool and enters its name.
    ///
    /// # Errors
    /// `Exists`: the name is taken; those of [`Pool::create_encrypted`].
    pub fn create_encrypted(&self, name: &str, path: &Path, key: impl Into<KeyPlace>) -> Result<Pool, PoolError> {
        self.enter(name, || Pool::create_encrypted(path, name, key))
    }

    fn enter(&self, name: &str, make: impl FnOnce() -> Result<Pool, PoolError>) -> Result<Pool, PoolError> {
        let link = self.link(name)?;
        if fs::symlink_metadata(&link).is_ok() {
            return Err(PoolError::Exists(link));
        }
        make_directory(&self.directory).during("making", self.directory.display())?;
        let pool = make()?;
        std::os::unix::fs::symlink(pool.path(), &link).during("entering", link.display())?;
        self.sync()?;
        Ok(pool)
    }

    /// Renames a pool. For a path, only the name inside the pool changes.
    ///
    /// # Errors
    /// `Exists`: the new name is taken; those of [`Pool::open`].
    pub fn rename(&self, from: &str, to: &str) -> Result<(), PoolError> {
        let new = self.link(to)?;
        let named = !from.contains('/');
        if named && fs::symlink_metadata(&new).is_ok() {
            return Err(PoolError::Exists(new));
        }
        let pool = Pool::open(&self.find(from)?, OpenOptions { access: Access::Exclusive, ..OpenOptions::default() })?;
        if named {
            // First the link, then the name inside the pool: people use the link.
            rename_to_free(&self.link(from)?, &new)?;
            self.sync()?;
        }
        pool.rename(to)
    }

    /// Removes a pool and its name.
    ///
    /// # Errors
    /// Those of [`Pool::destroy`].
    pub fn destroy(&self, name: &str) -> Result<(), PoolError> {
        let path = self.find(name)?;
        match Pool::destroy(&path) {
            // Only the name was left.
            Err(PoolError::NotAPool(_)) if !name.contains('/') => {}
            Err(PoolError::Io(e)) if !name.contains('/') && e.os().kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
        if !name.contains('/') {
            let link = self.link(name)?;
            fs::remove_file(&link).during("removing", link.display())?;
            self.sync()?;
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), PoolError> {
        Ok(sync_directory(&self.directory).during("syncing", self.directory.display())?)
    }
}

/// Renames a link. A name that was taken meanwhile is not overwritten.
fn rename_to_free(from: &Path, to: &Path) -> Result<(), PoolError> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) => Err(PoolError::Exists(to.into())),
        // Not every file system knows the flag.
        Err(Errno::INVAL) => Ok(fs::rename(from, to).during("renaming", to.display())?),
        result => Ok(result.map_err(io::Error::from).during("renaming", to.display())?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_pools() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path().join("names"));
        assert!(registry.list().unwrap().is_empty());
        drop(registry.create("one", &dir.path().join("a")).unwrap());
        assert!(matches!(registry.create("one", &dir.path().join("b")), Err(PoolError::Exists(_))));
        registry.rename("one", "two").unwrap();
        let path = registry.find("two").unwrap();
        assert_eq!(Pool::open(&path, OpenOptions::default()).unwrap().props().name, "two");
        assert!(matches!(registry.find("one"), Err(PoolError::NoSuchPool(_))));
        assert_eq!(registry.list().unwrap(), [("two".into(), path.clone())]);
        registry.destroy("two").unwrap();
        assert!(registry.list().unwrap().is_empty() && !path.exists());
        for bad in ["", ".hidden", "a/b", "a b", &"x".repeat(64)] {
            assert!(matches!(check_name(bad), Err(PoolError::Name(_))), "{bad}");
        }
    }
}
