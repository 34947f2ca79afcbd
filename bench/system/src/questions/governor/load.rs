//! The load of the `governor` bench: processes that come and go, each with memory a quarter of
//! which all others have too.
//!
//! Pages lie in stretches of 64: one that all processes have, three that only this process has.

#![allow(unsafe_code)] // mmap(2) and madvise(2) through the C library, where the agent sees them; raw memory.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use kmem::PAGE_SIZE;

use crate::harness::hold::Client;

/// Pages of a stretch.
const STRETCH: usize = 64;
/// One run of pages in this many is common.
const PERIOD: usize = 4;
const WORDS: usize = PAGE_SIZE / 8;

/// How many of `pages` all processes have in common.
pub(crate) fn common(pages: usize) -> usize {
    pages / (PERIOD * STRETCH) * STRETCH
}

/// Is such a process, until standard input ends.
pub(crate) fn run(pages: usize, number: usize) -> Result<()> {
    let len = pages * PAGE_SIZE;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "cannot map {len} bytes: {}", std::io::Error::last_os_error());
    for page in 0..pages {
        let is_common = (page / STRETCH).is_multiple_of(PERIOD);
        let identity = if is_common { page as u64 } else { (number as u64 + 1) << 32 | page as u64 };
        for word in 0..WORDS {
            let value = (identity << 9 | word as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // SAFETY: within the mapping, which nothing else knows yet.
            unsafe { start.cast::<u64>().add(page * WORDS + word).write(value) };
        }
    }
    for advice in [libc::MADV_DONTFORK, libc::MADV_MERGEABLE] {
        // SAFETY: the mapping is ours, and neither advice changes its content.
        let result = unsafe { libc::madvise(start, len, advice) };
        ensure!(result == 0, "madvise {advice}: {}", std::io::Error::last_os_error());
    }
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin().lines().try_for_each(|line| line.map(drop))?;
    Ok(())
}

/// The processes that are there now, the oldest first.
pub(crate) struct Load<'a> {
    program: &'a Path,
    /// How the command of a process becomes that of a client.
    launch: &'a dyn Fn(Command) -> Result<Command>,
    pages: usize,
    started: usize,
    pub(crate) clients: Vec<Client>,
}

impl<'a> Load<'a> {
    pub(crate) fn new(program: &'a Path, launch: &'a dyn Fn(Command) -> Result<Command>, pages: usize) -> Self {
        Self { program, launch, pages, started: 0, clients: Vec::new() }
    }

    /// Changes the number of processes: starts new ones and waits until they have filled their
    /// memory, or ends the oldest.
    pub(crate) fn become_so_many(&mut self, count: usize) -> Result<()> {
        if self.clients.len() > count {
            self.clients.drain(..self.clients.len() - count);
        }
        let first = self.clients.len();
        while self.clients.len() < count {
            let mut command = Command::new(self.program);
            command.args(["governor-load", &self.pages.to_string(), &self.started.to_string()]);
            command.env_remove("LD_PRELOAD");
            self.started += 1;
            self.clients.push(Client::start((self.launch)(command)?)?);
        }
        self.clients[first..].iter_mut().try_for_each(Client::wait_ready)
    }

    /// Pages that a perfect merger has merged: each of the common ones, in each process.
    pub(crate) fn mergeable(&self) -> u64 {
        match self.clients.len() {
            0 | 1 => 0,
            count => (count * common(self.pages)) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_pages_is_common() {
        assert_eq!(common(STRETCH * 12), STRETCH * 3);
        assert_eq!(common(32_768), 8_192);
    }
}
