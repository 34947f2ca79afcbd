//! Clones whose RAM is their own, under PageONE's agent. They are merged, their free pages can be
//! taken back, and they can be stored again: what a guest under `pageone run --snapshots` is.
//!
//! QEMU is started as such a guest is ([`crate::prepare`]): its RAM is private, anonymous memory in
//! place of an empty file. Before it reads the device stream all of the snapshot's RAM is copied to
//! it. Pages of zeros stay untouched.

use std::any::Any;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, Pagemap, Query};

use crate::prepare::{Ram, is_socket_name, monitor_words, ram_words};

/// Bytes that are copied at once.
const AT_ONCE: usize = 1 << 20;
static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Adds to the command that starts QEMU with these words. What it gives is dropped when QEMU has
/// started.
pub type Add<'a> = dyn Fn(&mut Command, &[String]) -> io::Result<Box<dyn Any>> + Sync + 'a;

/// How clones with RAM of their own are started.
pub struct Own<'a> {
    /// The environment that puts the agent into QEMU. Without a value a variable is removed.
    pub environment: Vec<(OsString, Option<OsString>)>,
    /// What else QEMU gets.
    pub add: Option<&'a Add<'a>>,
}

/// The socket of a clone's monitor, by which it can be stored.
pub(super) fn socket(directory: &Path) -> PathBuf {
    directory.join("monitor.qmp")
}

impl Own<'_> {
    /// Words for RAM and monitor, and the environment. The descriptor is to be inherited.
    pub(super) fn prepare(
        &self,
        command: &mut Command,
        bytes: u64,
        directory: &Path,
    ) -> io::Result<(Vec<String>, OwnedFd)> {
        let Ram { fd, identity } = Ram::empty(bytes)?;
        let mut words = ram_words(bytes, fd.as_raw_fd(), true);
        words.extend(monitor_words(&socket(directory)));
        for (name, value) in &self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env(wire::ENV_SNAPSHOT_RAM, identity);
        Ok((words, fd))
    }
}

/// Whether a clone in this directory can have a monitor.
pub(super) fn fits(directory: &Path) -> bool {
    is_socket_name(&socket(directory))
}

/// Copies the snapshot's RAM to a process, from this address on.
///
/// # Errors
/// If it cannot be read or written.
pub(super) fn load(ram: &File, pid: i32, address: u64, bytes: u64) -> io::Result<()> {
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem"))?;
    // QEMU leaves RAM alone that it expects to be loaded. Whatever lies there would stay where the
    // snapshot has zeros.
    let mut touched: Vec<Range<u64>> = Vec::new();
    let query = Query { any_of: Categories::PRESENT | Categories::SWAPPED, ..Query::default() };
    Pagemap::open(pid)?.scan(kmem::Range::new(address as usize, bytes as usize), &query, &mut |run| {
        touched.push(run.start as u64..run.end as u64);
    })?;
    let mut touched = touched.into_iter().peekable();
    let mut buffer = vec![0; AT_ONCE];
    for at in (0..bytes).step_by(AT_ONCE) {
        let len = (bytes - at).min(AT_ONCE as u64) as usize;
        ram.read_exact_at(&mut buffer[..len], at)?;
        let mut wanted = |page: usize| {
            let place = address + at + (page * PAGE_SIZE) as u64;
            while touched.next_if(|run| run.end <= place).is_some() {}
            let bytes = &buffer[page * PAGE_SIZE..][..PAGE_SIZE];
            bytes != ZEROS || touched.peek().is_some_and(|run| run.start <= place)
        };
        let all: Vec<bool> = (0..len / PAGE_SIZE).map(&mut wanted).collect();
        let mut page = 0;
        for run in all.chunk_by(|a, b| a == b) {
            let part = page * PAGE_SIZE..(page + run.len()) * PAGE_SIZE;
            if run[0] {
                memory.write_all_at(&buffer[part.clone()], address + at + part.start as u64)?;
            }
            page += run.len();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn memory_gets_the_files_bytes_and_zeros_stay_untouched_but_where_something_was() {
        let pages = 600;
        let mut file = tempfile::tempfile().unwrap();
        let mut want = vec![0_u8; pages * PAGE_SIZE];
        for page in [0, 1, 5, 255, 256, 300, 599] {
            want[page * PAGE_SIZE + 7] = page as u8 | 1;
        }
        file.write_all(&want).unwrap();
        let start = kmem::mm::map_anonymous(pages * PAGE_SIZE).unwrap() as u64;
        let pid = std::process::id() as i32;
        let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        for page in [2, 5, 257, 300] {
            memory.write_all_at(&[9; PAGE_SIZE], start + (page * PAGE_SIZE) as u64).unwrap();
        }
        let present = || {
            let query = Query { any_of: Categories::PRESENT, ..Query::default() };
            let range = kmem::Range::new(start as usize, pages * PAGE_SIZE);
            let mut count = 0;
            let each = &mut |run: kmem::pagemap::PageRun| count += (run.end - run.start) / PAGE_SIZE;
            Pagemap::open_self().unwrap().scan(range, &query, each).unwrap();
            count
        };
        load(&file, pid, start, (pages * PAGE_SIZE) as u64).unwrap();
        assert_eq!(present(), 9);
        let mut got = vec![1; want.len()];
        memory.read_exact_at(&mut got, start).unwrap();
        assert!(got == want);
        // A file that ends too soon.
        let error = load(&file, pid, start, (pages * PAGE_SIZE + AT_ONCE) as u64).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
