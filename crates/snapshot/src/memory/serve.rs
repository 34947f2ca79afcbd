//! The page server: a process that reads a snapshot's pages from the pool for the kernel.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use checkpoint::{Image, ReadError};
use mpool::{AlignedBuf, BLOCK};
use rustix::io::Errno;

use super::NAME;
use super::fuse::{self, Request};
use super::slots::Slots;
use super::working_set::Recorder;

/// Called with what cannot be read.
pub type Report<'a> = &'a (dyn Fn(ReadError) + Sync);

/// Serves an image until nobody has the file open or mapped any more. Standard input is the FUSE
/// device and standard output the slots, as the supervisor gives them. `record`: the file for a
/// list of what is read in the first seconds, for [`prefetch`](super::prefetch).
///
/// # Errors
/// If the two are something else, or the kernel's requests cannot be read.
pub fn serve(image: &Image, report: Report<'_>, record: Option<&Path>) -> io::Result<()> {
    // Ctrl-C ends the clones. They need their memory until they have ended.
    rustix::process::setsid().ok();
    let device: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let slots = Slots::open(io::stdout().as_fd().try_clone_to_owned()?)?;
    let recorder = record.map(Recorder::new);
    let server = Server { image, report, recorder: recorder.as_ref(), device: device.as_fd(), slots: &slots };
    for slot in 0..slots.count() {
        server.answer_slot(slot)?;
    }
    slots.ready()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..slots.count()).map(|slot| scope.spawn(move || server.run(slot))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| io::Error::other("a thread panicked"))?)
    })
}

#[derive(Clone, Copy)]
struct Server<'a> {
    image: &'a Image,
    report: Report<'a>,
    recorder: Option<&'a Recorder>,
    device: BorrowedFd<'a>,
    slots: &'a Slots,
}

impl Server<'_> {
    /// Takes requests and answers them, until the file system has ended.
    fn run(&self, slot: usize) -> io::Result<()> {
        loop {
            match self.slots.take(slot, self.device) {
                Ok(()) => self.answer_slot(slot)?,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::NODEV) => return Ok(()),
                    // Whoever asked has been killed meanwhile.
                    Some(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                    _ => return Err(error),
                },
            }
        }
    }

    /// Answers the request in a slot, if there is one.
    fn answer_slot(&self, slot: usize) -> io::Result<()> {
        let bytes = self.slots.get(slot)?;
        if let Some(request) = Request::parse(&bytes)
            && request.is_answered()
        {
            let answered = self.answer(&request);
            // A server that was killed has answered it, or whoever asked is gone.
            match answered.as_ref().map_err(Errno::from_io_error) {
                Ok(()) | Err(Some(Errno::NOENT | Errno::NODEV)) => {}
                Err(_) => return answered,
            }
        }
        self.slots.clear(slot)
    }

    fn answer(&self, request: &Request<'_>) -> io::Result<()> {
        let size = self.image.pages() * BLOCK as u64;
        let reply = |body: Result<&[u8], i32>| fuse::answer(self.device, request.unique, body);
        match request.kind {
            fuse::LOOKUP if request.node == fuse::ROOT && request.body.strip_suffix(&[0]) == Some(NAME.as_bytes()) => {
                reply(Ok(&fuse::entry(size)))
            }
            fuse::LOOKUP => reply(Err(libc::ENOENT)),
            fuse::GETATTR => reply(Ok(&fuse::attributes(request.node, size))),
            fuse::OPEN if request.node == fuse::FILE => reply(Ok(&fuse::opened())),
            fuse::READ => {
                let Some((offset, len)) = request.range() else { return reply(Err(libc::EINVAL)) };
                let end = (offset.saturating_add(len.into())).min(size);
                let Some(len) = end.checked_sub(offset) else { return reply(Ok(&[])) };
                if let Some(recorder) = self.recorder {
                    recorder.note(offset, len);
                }
                let before = (offset % BLOCK as u64) as usize;
                let mut bytes = AlignedBuf::zeroed((before + len as usize).next_multiple_of(BLOCK));
                match self.image.read(offset / BLOCK as u64, &mut bytes) {
                    Ok(()) => reply(Ok(&bytes[before..before + len as usize])),
                    Err(error) => {
                        (self.report)(error);
                        reply(Err(libc::EIO))
                    }
                }
            }
            fuse::RELEASE | fuse::FLUSH => reply(Ok(&[])),
            _ => reply(Err(libc::ENOSYS)),
        }
    }
}
