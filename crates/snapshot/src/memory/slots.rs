//! The requests that a server has taken and not answered, in memory that outlives it.
//!
//! The kernel gives a request once. If the server that took it is killed, the clone that waits for
//! the page would wait for ever. So each thread of the server reads its requests into a *slot* of
//! a memfd that the supervisor keeps, and empties the slot when it has answered. The next server
//! answers what stands in the slots first. Answering a second time does no harm: the kernel knows
//! of no such request any more.
//!
//! The kernel takes a request from its queue and copies it in one call, which a signal does not
//! cut short as long as it needs not wait for the memory; that is locked, therefore.
//!
//! ```text
//! page 0    magic · process of the server that is ready
//! then      slots of two pages: a request, or zeros
//! ```

#![allow(unsafe_code)] // The kernel writes requests into a shared mapping.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use kmem::memfd::{SharedMap, create_fixed, map_shared};

use super::fuse::BUFFER;

const MAGIC: &[u8; 8] = b"PGSLOT01";
/// Bytes before the first slot.
const HEAD: usize = 4096;

/// All slots.
pub(super) struct Slots {
    file: OwnedFd,
    map: SharedMap,
}

impl Slots {
    /// Makes empty slots.
    pub(super) fn create(count: usize) -> io::Result<Self> {
        let (file, map) = create_fixed("pageone-requests", HEAD + count * BUFFER).map_err(io::Error::other)?;
        rustix::io::pwrite(&file, MAGIC, 0)?;
        Ok(Self { file, map })
    }

    /// The slots in a file that another process made. Locks them into memory.
    pub(super) fn open(file: OwnedFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(&file)?.st_size as usize;
        let mut magic = [0; 8];
        rustix::io::pread(&file, &mut magic, 0)?;
        if magic != *MAGIC || len < HEAD + BUFFER {
            return Err(io::Error::other("the requests of the server before are of another version"));
        }
        let map = map_shared(&file, len).map_err(io::Error::other)?;
        // SAFETY: the pages are those of the mapping, which lives as long as this value.
        unsafe { rustix::mm::mlock(map.as_ptr().cast(), map.len()) }?;
        Ok(Self { file, map })
    }

    /// The file, for a server.
    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    pub(super) fn count(&self) -> usize {
        (self.map.len() - HEAD) / BUFFER
    }

    /// The server that said last that it is ready; 0: none yet.
    pub(super) fn server(&self) -> io::Result<u32> {
        let mut bytes = [0; 4];
        rustix::io::pread(&self.file, &mut bytes, 8)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    /// Says that this process serves.
    pub(super) fn ready(&self) -> io::Result<()> {
        rustix::io::pwrite(&self.file, &std::process::id().to_ne_bytes(), 8)?;
        Ok(())
    }

    /// What stands in a slot: [`BUFFER`] bytes.
    pub(super) fn get(&self, slot: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; BUFFER];
        rustix::io::pread(&self.file, &mut bytes, self.offset(slot) as u64)?;
        Ok(bytes)
    }

    /// Empties a slot: its request is answered.
    pub(super) fn clear(&self, slot: usize) -> io::Result<()> {
        // A request begins with its length.
        rustix::io::pwrite(&self.file, &[0; 4], self.offset(slot) as u64)?;
        Ok(())
    }

    /// Waits for a request and takes it into a slot of this thread's.
    pub(super) fn take(&self, slot: usize, device: impl AsFd) -> io::Result<()> {
        let at = self.map.as_ptr().wrapping_add(self.offset(slot));
        // SAFETY: the slot lies in the mapping. Only this thread of this process writes to it: the
        // server before has ended. No other reference into the mapping is ever made.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at.cast::<MaybeUninit<u8>>(), BUFFER) };
        rustix::io::read(device, buffer)?;
        Ok(())
    }

    fn offset(&self, slot: usize) -> usize {
        assert!(slot < self.count(), "no such slot");
        HEAD + slot * BUFFER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_took_is_there_for_the_next_one_until_it_is_answered() {
        let first = Slots::create(2).unwrap();
        let (out, into) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&into, b"request").unwrap();
        first.take(1, &out).unwrap();
        let second = Slots::open(first.file().unwrap()).unwrap();
        assert_eq!((second.count(), first.server().unwrap()), (2, 0));
        second.ready().unwrap();
        assert_eq!(first.server().unwrap(), std::process::id());
        drop(first);
        assert!(second.get(1).unwrap().starts_with(b"request"));
        assert_eq!(second.get(0).unwrap(), [0; BUFFER]);
        second.clear(1).unwrap();
        assert!(second.get(1).unwrap().starts_with(&[0; 4]));
    }

    #[test]
    fn slots_of_another_version_are_refused() {
        let (file, _map) = create_fixed("other", HEAD + BUFFER).unwrap();
        assert!(Slots::open(file).is_err_and(|e| e.to_string().contains("another version")));
    }
}
