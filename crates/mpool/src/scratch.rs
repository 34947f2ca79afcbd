//! Bytes that are put aside on a medium for a while, encrypted with a key that only this process
//! has: what an encrypted pool will hold is not to be read beside it either, also if the process is
//! killed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use zeroize::Zeroizing;

use crate::disk::xts::{SECTOR, Xts};

/// An empty file that is being filled.
pub struct Scratch {
    file: File,
    keys: Xts,
    end: u64,
}

impl Scratch {
    /// Bytes of a sector.
    pub const SECTOR: usize = SECTOR;

    /// Uses this file, and a new key.
    ///
    /// # Errors
    /// If the kernel has no random numbers.
    pub fn new(file: File) -> io::Result<Self> {
        let mut key = Zeroizing::new([0; 64]);
        rustix::rand::getrandom(&mut key[..], rustix::rand::GetRandomFlags::empty())?;
        Ok(Self { file, keys: Xts::new(&key), end: 0 })
    }

    /// Appends whole sectors, which are encrypted then; gives the place of the first.
    ///
    /// # Errors
    /// The file's.
    pub fn append(&mut self, sectors: &mut [u8]) -> io::Result<u64> {
        let at = self.end;
        self.keys.encrypt(sectors, at / SECTOR as u64);
        self.file.write_all_at(sectors, at)?;
        self.end += sectors.len() as u64;
        Ok(at)
    }

    /// Reads whole sectors.
    ///
    /// # Errors
    /// The file's.
    pub fn read(&self, at: u64, sectors: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(sectors, at)?;
        self.keys.decrypt(sectors, at / SECTOR as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_aside_comes_back_and_is_not_on_the_medium() {
        let file = tempfile::tempfile().unwrap();
        let mut scratch = Scratch::new(file.try_clone().unwrap()).unwrap();
        let plain: Vec<u8> = (0..8 * SECTOR).map(|i| (i / 300) as u8).collect();
        let zeros = scratch.append(&mut vec![0; SECTOR]).unwrap();
        let at = scratch.append(&mut plain.clone()).unwrap();
        let (mut medium, mut back) = (vec![0; 9 * SECTOR], vec![1; 9 * SECTOR]);
        file.read_exact_at(&mut medium, 0).unwrap();
        scratch.read(zeros, &mut back).unwrap();
        assert!((zeros, at) == (0, SECTOR as u64) && back[..SECTOR] == [0; SECTOR] && back[SECTOR..] == plain);
        assert!(!medium.chunks(32).any(|part| back.chunks(32).any(|plain| plain == part)));
    }
}
