//! Serving a snapshot's memory to programs that ask for it by userfaultfd(2), as Firecracker does.
//!
//! The program connects to a stream socket and sends one message: a JSON array with an object for
//! each part of its guest's memory (`base_host_virt_addr`, `size`, `offset` in the memory,
//! `page_size`), and its userfaultfd by `SCM_RIGHTS`. From then on a thread of this process answers
//! its page faults, until it ends. What the program has given back (`EVENT_REMOVE`) is zeros.
//! Source: Firecracker's docs/snapshotting/handling-page-faults-on-snapshot-resume.md.
//!
//! If this process ends, the program waits at its next fault, for ever. If a page cannot be read,
//! it gets an error (`UFFDIO_POISON`), or, where the kernel has none of these, is killed.

#![allow(unsafe_code)] // The kernel copies pages into another process.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use checkpoint::Image;
use dirty::DirtyTree;
use kmem::Range;
use kmem::pidfd::PidFd;
use kmem::uffd::{Event, Uffd};
use mpool::{AlignedBuf, BLOCK};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use serde::Deserialize;

/// Bytes of the longest message.
const LONGEST: usize = 1 << 16;
/// How long a client may take for its message.
const MESSAGE: Duration = Duration::from_secs(10);
/// Bytes of the longest page: a huge one.
const LONGEST_PAGE: usize = 2 << 20;
/// Pause before a page is copied again into memory whose mappings are changing.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Why a snapshot's memory is not served by userfaultfd.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum UffdError {
    #[error("program {pid} is not served: {why}; it waits for its memory, and must be ended")]
    Message { pid: i32, why: String },
    #[error("program {pid} needs a page that cannot be given to it, and ends: {why}")]
    Page { pid: i32, why: String },
}

/// A part of a program's guest memory.
#[derive(Clone, Debug, Deserialize)]
struct Mapping {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    /// Older programs say this, in bytes for all its name.
    page_size_kib: Option<u64>,
}

impl Mapping {
    fn page(&self) -> u64 {
        self.page_size.or(self.page_size_kib).unwrap_or(BLOCK as u64)
    }

    /// Why it cannot be a part of a snapshot of this many bytes.
    fn fault(&self, bytes: u64) -> Option<&'static str> {
        let page = self.page();
        if !(BLOCK as u64..=LONGEST_PAGE as u64).contains(&page) || !page.is_power_of_two() {
            return Some("no kernel has pages of the size that it names");
        }
        if [self.base_host_virt_addr, self.size, self.offset].iter().any(|number| !number.is_multiple_of(page)) {
            return Some("a mapping is not made of pages");
        }
        let fits = self.offset.checked_add(self.size).is_some_and(|end| end <= bytes)
            && self.base_host_virt_addr.checked_add(self.size).is_some();
        (!fits).then_some("a mapping reaches beyond the snapshot's memory")
    }
}

/// Serves the program at the other end of a connection until it ends.
///
/// # Errors
/// If it sends something else, or gets no page.
pub fn serve(image: &Image, stream: &UnixStream) -> Result<(), UffdError> {
    let pid = sockopt::socket_peercred(stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get());
    let message = |why: String| UffdError::Message { pid, why };
    let process = PidFd::open(pid).map_err(|e| message(e.to_string()))?;
    let (bytes, uffd) = receive(stream).map_err(|e| message(e.to_string()))?;
    let mappings: Vec<Mapping> = serde_json::from_slice(&bytes).map_err(|e| message(e.to_string()))?;
    let all = image.pages() * BLOCK as u64;
    if let Some(why) = mappings.iter().find_map(|mapping| mapping.fault(all)) {
        return Err(message(why.into()));
    }
    let removed = DirtyTree::new(image.pages()).map_err(|e| message(e.to_string()))?;
    let (uffd, bytes) = (Uffd::from_fd(uffd), AlignedBuf::zeroed(LONGEST_PAGE));
    let mut client = Client { image, mappings, uffd, removed, bytes, waiting: VecDeque::new() };
    client.run(&process).map_err(|why| {
        // It would wait for ever.
        let _ = process.send_signal(libc::SIGKILL);
        UffdError::Page { pid, why }
    })
}

/// The message: a whole JSON array, and a descriptor.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, OwnedFd)> {
    stream.set_read_timeout(Some(MESSAGE))?;
    let (mut message, mut uffd) = (Vec::new(), None);
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; LONGEST];
        let got = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                uffd = uffd.or(files.last());
            }
        }
        message.extend(&bytes[..got.bytes]);
        let whole = serde_json::from_slice::<serde_json::Value>(&message).is_ok();
        match uffd.take() {
            Some(uffd) if whole => return Ok((message, uffd)),
            None if whole => return Err(io::Error::other("no userfaultfd came with its mappings")),
            kept => uffd = kept,
        }
        if got.bytes == 0 || message.len() > LONGEST {
            return Err(io::Error::other("it did not send mappings as Firecracker does"));
        }
    }
}

struct Client<'a> {
    image: &'a Image,
    mappings: Vec<Mapping>,
    uffd: Uffd,
    /// Pages of the snapshot that the program has given back: they are zeros for it.
    removed: DirtyTree,
    bytes: AlignedBuf,
    /// Addresses at which it waits.
    waiting: VecDeque<usize>,
}

impl Client<'_> {
    /// Answers until the program has ended.
    fn run(&mut self, process: &PidFd) -> Result<(), String> {
        loop {
            let (uffd, end) = (self.uffd.as_fd(), process.as_fd());
            let mut both = [PollFd::new(&uffd, PollFlags::IN), PollFd::new(&end, PollFlags::IN)];
            let limit = if self.waiting.is_empty() { None } else { Some(&AGAIN) };
            match poll(&mut both, limit) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.to_string()),
            }
            if !both[1].revents().is_empty() {
                return Ok(());
            }
            // What it gives back comes first: a page is not copied before that is known.
            while let Some(event) = self.uffd.read_event().map_err(|e| e.to_string())? {
                match event {
                    Event::Pagefault { address, .. } => self.waiting.push_back(address),
                    Event::Remove(range) => self.remove(range),
                    Event::Fork { .. } | Event::Remap { .. } | Event::Unmap(_) => {}
                }
            }
            for _ in 0..self.waiting.len() {
                let Some(address) = self.waiting.pop_front() else { break };
                match self.answer(address)? {
                    Answered::Yes => {}
                    Answered::Later => self.waiting.push_back(address),
                    Answered::Gone => return Ok(()),
                }
            }
        }
    }

    /// The mapping with an address, and the offset of that in it.
    fn find(&self, address: usize) -> Option<(&Mapping, u64)> {
        let offset = |mapping: &Mapping| {
            let offset = (address as u64).checked_sub(mapping.base_host_virt_addr)?;
            (offset < mapping.size).then_some(offset)
        };
        self.mappings.iter().find_map(|mapping| Some((mapping, offset(mapping)?)))
    }

    fn remove(&self, range: Range) {
        for mapping in &self.mappings {
            let start = (range.start as u64).max(mapping.base_host_virt_addr);
            let end = (range.end() as u64).min(mapping.base_host_virt_addr + mapping.size);
            if start < end {
                let first = (mapping.offset + start - mapping.base_host_virt_addr) / BLOCK as u64;
                self.removed.insert_range(first, (end - start) / BLOCK as u64);
            }
        }
    }

    /// Gives the program the page with this address.
    fn answer(&mut self, address: usize) -> Result<Answered, String> {
        let Some((mapping, offset)) = self.find(address) else {
            return Err(format!("address {address:#x} is in none of its mappings"));
        };
        let page = mapping.page();
        let within = offset / page * page;
        let (to, first) = ((mapping.base_host_virt_addr + within) as usize, (mapping.offset + within) / BLOCK as u64);
        let bytes = &mut self.bytes[..page as usize];
        let range = Range::new(to, page as usize);
        if let Err(error) = self.image.read(first, bytes) {
            for page in (to..range.end()).step_by(BLOCK) {
                // SAFETY: as below; the page's bytes are lost, so nobody can rely on reading them.
                if let Err(errno @ (Errno::INVAL | Errno::NOTTY)) = unsafe { self.uffd.poison(page) } {
                    return Err(format!("{error} (it cannot be told: {errno})"));
                }
            }
            self.uffd.wake(range).map_err(|e| e.to_string())?;
            return Ok(Answered::Yes);
        }
        for (number, block) in (first..).zip(bytes.chunks_mut(BLOCK)) {
            if self.removed.contains(number) {
                block.fill(0);
            }
        }
        // SAFETY: the userfaultfd is another process's: it came from a socket, and none of this
        // process's is ever sent. So no memory of this process changes. In the other one the kernel
        // writes only where no page is and a thread waits, or would, for these bytes.
        match unsafe { self.uffd.copy(to, bytes) } {
            Ok(copied) if copied < bytes.len() => return Ok(Answered::Later),
            // Two threads waited for it, or it was unmapped meanwhile.
            Ok(_) | Err(Errno::EXIST | Errno::NOENT) => {}
            Err(Errno::AGAIN) => return Ok(Answered::Later),
            Err(Errno::SRCH) => return Ok(Answered::Gone),
            Err(errno) => return Err(format!("it cannot be copied: {errno}")),
        }
        self.uffd.wake(range).map_err(|e| e.to_string())?;
        Ok(Answered::Yes)
    }
}

enum Answered {
    Yes,
    /// Its mappings are changing.
    Later,
    /// It has ended.
    Gone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_do_not_fit_are_told_from_those_that_do() {
        let fault = |text: &str| serde_json::from_str::<Mapping>(text).unwrap().fault(64 << 20);
        let of = |base: u64, size: u64, offset: u64, rest: &str| {
            fault(&format!("{{\"base_host_virt_addr\":{base},\"size\":{size},\"offset\":{offset}{rest}}}"))
        };
        assert_eq!(of(4096, 64 << 20, 0, ""), None);
        assert_eq!(of(2 << 20, 2 << 20, 0, ",\"page_size_kib\":2097152"), None);
        assert_eq!(of(0, 4096, (64 << 20) - 4096, ",\"page_size\":4096,\"page_size_kib\":4096"), None);
        for (base, size, offset, rest) in [
            (4096, 4096, 64 << 20, ""),
            (4096, u64::MAX - 4095, 4096, ""),
            (u64::MAX - 4095, 8192, 0, ""),
            (1, 4096, 0, ""),
            (4096, 2 << 20, 0, ",\"page_size\":2097152"),
            (4096, 4096, 0, ",\"page_size\":4"),
            (4096, 4096, 0, ",\"page_size\":12288"),
        ] {
            assert!(of(base, size, offset, rest).is_some(), "{base} {size} {offset} {rest}");
        }
    }

    #[test]
    fn a_client_that_says_something_else_is_named() {
        use std::io::Write;
        for (said, part) in [
            (&b"[]"[..], "no userfaultfd came with its mappings"),
            (b"hello", "it did not send mappings as Firecracker does"),
            (b"", "it did not send mappings as Firecracker does"),
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(said).unwrap();
            drop(theirs);
            let error = receive(&ours).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
