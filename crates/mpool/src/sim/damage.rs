//! For tests of damage: copies of a storage, and files of which parts are lost.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{Directory, FileState, Sim, World};

/// What is wrong with bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    Zero,
    Flipped,
    Unreadable,
}

impl Sim {
    /// A medium with the same contents, all of them durable.
    pub(crate) fn copy(&self) -> Sim {
        let old = self.world();
        let mut new = World { next: old.next, ..World::default() };
        for (path, directory) in &old.directories {
            let now = directory.now.clone();
            let copy = Directory { durable: now.clone(), now, ..Directory::durable(directory.identity) };
            new.directories.insert(path.clone(), copy);
        }
        for (&id, file) in &old.files {
            let now = file.now.clone();
            new.files.insert(id, FileState { durable: now.clone(), now, ..FileState::default() });
        }
        Sim(Arc::new(Mutex::new(new)))
    }

    /// The same, and what cannot be read cannot be read there either.
    pub(crate) fn copy_with_damage(&self) -> Sim {
        let new = self.copy();
        for (id, file) in &mut new.world().files {
            file.unreadable = self.world().files[id].unreadable.clone();
        }
        new
    }

    /// A copy of one directory with all that is in it, under another path.
    pub(crate) fn copy_directory(&self, from: &Path, to: &Path) {
        let mut world = self.world();
        let names = world.directories[from].now.clone();
        let mut copy = Directory::durable(world.next + 1);
        world.next += 1;
        for (name, id) in names {
            world.next += 1;
            let (new, file) = (world.next, world.files[&id].clone());
            world.files.insert(new, file);
            copy.now.insert(name.clone(), new);
            copy.durable.insert(name, new);
        }
        world.directories.insert(to.into(), copy);
    }

    /// The files of a directory, with their lengths but for zeros at their ends.
    pub(crate) fn contents(&self, path: &Path) -> Vec<(String, usize)> {
        let world = self.world();
        let len = |id: &u64| world.files[id].now.data.iter().rposition(|&b| b != 0).map_or(0, |at| at + 1);
        world.directories[path].now.iter().map(|(name, id)| (name.clone(), len(id))).collect()
    }

    /// The files of a directory, with their bytes.
    pub(crate) fn bytes(&self, path: &Path) -> Vec<(String, Vec<u8>)> {
        let world = self.world();
        world.directories[path].now.iter().map(|(name, id)| (name.clone(), world.files[id].now.data.clone())).collect()
    }

    /// Damages a part of a file. Whether that changes anything.
    pub(crate) fn damage(&self, path: &Path, name: &str, at: usize, len: usize, wrong: Wrong) -> bool {
        let mut world = self.world();
        let id = world.directories[path].now[name];
        let Some(file) = world.files.get_mut(&id) else { return false };
        let end = (at + len).min(file.now.data.len());
        let part = &mut file.now.data[at.min(end)..end];
        match wrong {
            Wrong::Zero if part.iter().all(|&b| b == 0) => return false,
            Wrong::Zero => part.fill(0),
            Wrong::Flipped => part.iter_mut().for_each(|b| *b ^= 0x10),
            Wrong::Unreadable => file.unreadable.push((at, end)),
        }
        file.durable = file.now.clone();
        at < end
    }

    /// Removes a file.
    pub(crate) fn lose(&self, path: &Path, name: &str) {
        let mut world = self.world();
        let directory = world.directories.get_mut(path).unwrap();
        directory.now.remove(name);
        directory.durable.remove(name);
    }
}
