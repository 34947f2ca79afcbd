//! Descriptors of the agent's address space, and the proof that it is the agent's.
//!
//! A process number may stand for another program by the time that it is used: the process ran
//! `execve(2)`, or has ended and another took its number. So the daemon opens the files below
//! `/proc/PID` once, and uses these descriptors from then on. Each always stands for one address
//! space. The proof that it is the agent's, and not that of a program which ran in between:
//!
//! ```text
//!   open mem     maps, pagemap     open mem again
//!       │                                │
//!       └───── both show the control page, at the address that the agent names
//! ```
//!
//! The daemon writes random words into its own mapping of the page and reads them back at once
//! through both descriptors. Only memory that maps this very page shows them. No process returns to
//! an address space that it has left. So what was opened between the two is the agent's too, or
//! belongs to a program that has already ended: then it shows nothing.

use std::sync::atomic::Ordering::SeqCst;

use kmem::memfd::SharedMap;
use kmem::pagemap::Pagemap;
use kmem::procfs::{self, Maps};
use kmem::procmem::AddressSpace;
use rustix::rand::{GetRandomFlags, getrandom};
use wire::control::NONCE;

const WORDS: usize = 2;

/// Descriptors of one address space.
pub(super) struct Process {
    pub(super) memory: AddressSpace,
    pub(super) pagemap: Pagemap,
    pub(super) maps: Maps,
}

/// Why a process is not known to be the agent's.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProofError {
    #[error("/proc/{pid}/{file} can't be opened: {source}; run the daemon as root or as the same user")]
    Open { pid: i32, file: &'static str, source: std::io::Error },
    #[error(
        "process {pid} does not show the control page that its agent says it mapped: it runs another program by now, \
         or the agent speaks for another process; start the program anew"
    )]
    OtherMemory { pid: i32 },
    #[error(
        "process {pid} belongs to user {now} now and connected as user {uid}; let it connect as the user that it \
         stays"
    )]
    OtherUser { pid: i32, uid: u32, now: u32 },
}

impl Process {
    /// Opens the memory of user `uid`'s agent, which says that it maps `control` at `address`.
    pub(super) fn open(pid: i32, uid: u32, control: &SharedMap, address: u64) -> Result<Self, ProofError> {
        let cannot = |file| move |source| ProofError::Open { pid, file, source };
        let before = AddressSpace::open(pid).map_err(cannot("mem"))?;
        let maps = Maps::open(Some(pid)).map_err(cannot("maps"))?;
        let pagemap = Pagemap::open(pid).map_err(cannot("pagemap"))?;
        let now = procfs::status(Some(pid)).map_err(cannot("status"))?.uid;
        let memory = AddressSpace::open(pid).map_err(cannot("mem"))?;
        if ![&before, &memory].into_iter().all(|memory| shows(memory, control, address)) {
            return Err(ProofError::OtherMemory { pid });
        }
        // A program that runs as another user than its caller maps nothing that the caller names.
        // Should it, it is still refused.
        if now != uid {
            return Err(ProofError::OtherUser { pid, uid, now });
        }
        Ok(Self { memory, pagemap, maps })
    }
}

/// Whether the memory shows the control page at this address. Looks twice, with another nonce each
/// time: a copy of the page does not follow.
pub(super) fn shows(memory: &AddressSpace, control: &SharedMap, address: u64) -> bool {
    let Some(at) = address.checked_add(NONCE as u64) else { return false };
    (0..2).all(|_| {
        let (mut nonce, mut seen) = ([0u8; 8 * WORDS], [0u8; 8 * WORDS]);
        if getrandom(&mut nonce, GetRandomFlags::empty()) != Ok(nonce.len()) {
            return false;
        }
        for (at, word) in nonce.as_chunks::<8>().0.iter().enumerate() {
            control.atomic_u64(NONCE + 8 * at).store(u64::from_ne_bytes(*word), SeqCst);
        }
        memory.read(at as usize, &mut seen) == Ok(seen.len()) && seen == nonce
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::memory::tests::control_page;

    #[test]
    fn only_memory_that_maps_the_control_page_is_taken() {
        let (control, other) = (control_page(), control_page());
        let uid = rustix::process::geteuid().as_raw();
        let pid = std::process::id() as i32;
        let address = |page: &SharedMap| page.range().start as u64;
        let open = |pid, uid, address| Process::open(pid, uid, &control, address);
        let process = open(pid, uid, address(&control)).unwrap();
        assert!(!process.pagemap.is_gone());
        for wrong in [0, 8, address(&other), address(&control) + 8, u64::MAX, u64::MAX - 4095] {
            assert!(matches!(open(pid, uid, wrong), Err(ProofError::OtherMemory { .. })), "{wrong:#x}");
        }
        assert!(matches!(open(pid, uid + 1, address(&control)), Err(ProofError::OtherUser { .. })));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(matches!(open(pid, uid, address(&control)), Err(ProofError::OtherMemory { .. })));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(open(pid, uid, address(&control)), Err(ProofError::Open { .. })));
    }
}
