//! Reading a client's memory.
//!
//! There are two ways, and each has a cost:
//!
//! ```text
//! way                     address space   locked for  a page that userfaultfd withholds
//! process_vm_readv(2)     at the call     16 pages    sleeps
//! /proc/PID/mem           at its open(2)  one page    an error
//! ```
//!
//! The agent needs the lock of the address space to map frames: taken for each page, it makes a
//! merge of long runs a fifth more expensive. So pages are read the first way, together with a
//! word of the control page that the daemon writes just before and nobody else can know. Memory
//! that shows it is the agent's. Else the process runs another program now, and is read the second
//! way; so is a client that held up a worker ([`crate::world::stall`]).

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use kmem::memfd::SharedMap;
use kmem::pagemap::Pagemap;
use kmem::procmem::{self, AddressSpace, Gone, ReadError};
use wire::control::NONCE;

pub(crate) struct Memory {
    pid: i32,
    /// The agent's address space, whichever program the process runs now.
    pub(crate) space: AddressSpace,
    /// Address of the control page's word in that space.
    proof: usize,
    secret: RandomState,
    words: AtomicU64,
    /// The page that daemon and agent share.
    pub(crate) control: SharedMap,
    pub(crate) pagemap: Pagemap,
    /// The process may be read by its number.
    by_number: AtomicBool,
}

impl Memory {
    /// Memory that was proven to map the control page at `address`.
    pub(crate) fn new(pid: i32, space: AddressSpace, pagemap: Pagemap, control: SharedMap, address: u64) -> Self {
        let proof = (address as usize).saturating_add(NONCE);
        let (secret, words, by_number) = (RandomState::new(), AtomicU64::new(0), AtomicBool::new(true));
        Self { pid, space, proof, secret, words, control, pagemap, by_number }
    }

    /// A worker was held up in this memory: it is not read by number any more.
    pub(crate) fn held_up(&self) {
        self.by_number.store(false, Relaxed);
    }

    /// Reads whole pages, as [`AddressSpace::read_pages`] does.
    pub(crate) fn read_pages(&self, addresses: &[usize], out: &mut [u8]) -> Result<usize, Gone> {
        if self.by_number.load(Relaxed) {
            let word = self.secret.hash_one(self.words.fetch_add(1, Relaxed));
            self.control.atomic_u64(NONCE).store(word, SeqCst);
            match procmem::read_pages_of(self.pid, (self.proof, word), addresses, out) {
                Ok(Some(read)) => return Ok(read),
                Err(ReadError::NoPermission { .. }) => self.by_number.store(false, Relaxed),
                // Another program, or another thread that reads this client just now.
                _ => {}
            }
        }
        self.space.read_pages(addresses, out)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kmem::{PAGE_SIZE, memfd};

    use super::*;

    /// A client's control page.
    pub(crate) fn control_page() -> SharedMap {
        let fd = rustix::fs::memfd_create("control", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, wire::control::LEN as u64).unwrap();
        memfd::map_shared(&fd, wire::control::LEN).unwrap()
    }

    /// Memory that maps this control page.
    pub(crate) fn memory_of(pid: i32, space: AddressSpace, control: SharedMap) -> Memory {
        let address = control.range().start as u64;
        Memory::new(pid, space, Pagemap::open_self().unwrap(), control, address)
    }

    #[test]
    fn only_memory_that_shows_the_word_is_read() {
        let own = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let bytes = vec![7u8; 3 * PAGE_SIZE];
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE_SIZE);
        // Its own number and page; another page; the number of another process.
        for (pid, is_other, shows) in [(own, false, true), (own, true, false), (child.id() as i32, false, false)] {
            let (mut memory, other) =
                (memory_of(pid, AddressSpace::open(own).unwrap(), control_page()), control_page());
            let proof = if is_other { other.range().start + NONCE } else { memory.proof };
            memory.proof = proof;
            let mut out = [0; 2 * PAGE_SIZE];
            let word = (memory.proof, 5);
            memory.control.atomic_u64(NONCE).store(5, SeqCst);
            let by_number = procmem::read_pages_of(pid, word, &[start, start + PAGE_SIZE], &mut out);
            assert_eq!(by_number, Ok(shows.then_some(2)), "{pid} {proof:#x}");
            out.fill(0);
            assert_eq!(memory.read_pages(&[start, start + PAGE_SIZE], &mut out), Ok(2));
            assert!(out.iter().all(|&byte| byte == 7), "from the agent's address space in any case");
            memory.held_up();
            assert_eq!(memory.read_pages(&[start, start + PAGE_SIZE], &mut out), Ok(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
