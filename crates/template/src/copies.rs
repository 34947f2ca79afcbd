//! The template waits for what is asked, and makes copies of itself.

#![allow(unsafe_code)] // fork(2), and a descriptor by its number.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use kmem::pidfd::PidFd;
use kmem::procfs;
use kmem::seqpacket::Conn;
use wire::template::{COPY, ENV_TEMPLATE, FAILED, LOADED, MAX_ANSWER, RUNS, Start};

use crate::inherited::{self, Arguments};
use crate::reads::{self, Files};

/// Makes copies until the socket is closed, and ends this process then. Returns in each copy, with
/// what that has. `None`: this program is not a template.
pub(crate) fn serve() -> Option<Arguments> {
    let number = std::env::var(ENV_TEMPLATE).ok()?.parse().ok()?;
    // SAFETY: the variable names a descriptor that was left for this library. The program, which
    // could use it, has not begun.
    let socket = Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) });
    // Of several threads fork(2) copies one.
    let is_alone = procfs::threads(std::process::id() as i32).is_ok_and(|threads| threads.len() == 1);
    if !is_alone || socket.send(&[LOADED], &[]).is_err() {
        end();
    }
    // By these a copy asks its template for files (`reads.rs`).
    let Ok((asked, asks)) = Conn::pair() else { end() };
    let mut files = Files::default();
    loop {
        let (mut bytes, mut fds) = ([0; 2], Vec::new());
        if let Ok(Some(2)) = asked.recv(&mut bytes, &mut fds)
            && let Ok([file, answer]) = <[OwnedFd; 2]>::try_from(std::mem::take(&mut fds))
        {
            files.answer(u16::from_le_bytes(bytes), file, answer);
        }
        match socket.recv(&mut bytes, &mut fds) {
            Ok(None) => reads::wait(&[socket.as_fd(), asked.as_fd()]),
            Ok(Some(1)) if bytes[0] == COPY && fds.len() >= 2 => {
                let rest = fds.split_off(2);
                let [start, answer] = [fds.remove(0), fds.remove(0)];
                // Nobody waits for it, so that the command can read how it has ended.
                // SAFETY: the process has one thread, so the copy has all of it.
                match unsafe { libc::fork() } {
                    0 => {
                        drop((socket, asked, files));
                        return Some(begin(start, answer, asks, rest));
                    }
                    -1 => refuse(&Conn::from_fd(answer), &io::Error::last_os_error()),
                    _ => {}
                }
            }
            // Closed, or nothing that can be understood.
            _ => end(),
        }
    }
}

fn end() -> ! {
    // SAFETY: ends the process, with no handler.
    unsafe { libc::_exit(0) }
}

fn refuse(answer: &Conn, why: &io::Error) {
    let mut packet = vec![FAILED];
    packet.extend(why.to_string().bytes().take(MAX_ANSWER - 1));
    let _ = answer.send(&packet, &[]);
}

/// Makes this copy what is asked, and says that it is there.
fn begin(start: OwnedFd, answer: OwnedFd, asks: Conn, rest: Vec<OwnedFd>) -> Arguments {
    let mut kept = [Conn::from_fd(answer), asks];
    let begun = prepare(start, &mut kept, rest);
    let [answer, asks] = kept;
    reads::ask_at(asks);
    begun.unwrap_or_else(|why| {
        refuse(&answer, &why);
        end()
    })
}

fn prepare(start: OwnedFd, kept: &mut [Conn; 2], rest: Vec<OwnedFd>) -> io::Result<Arguments> {
    let mut bytes = Vec::new();
    File::from(start).read_to_end(&mut bytes)?;
    let start = Start::decode(&bytes).filter(|start| start.numbers.len() == rest.len());
    let start = start.ok_or(io::ErrorKind::InvalidData)?;
    inherited::take_descriptors(rest, &start.numbers, kept)?;
    let words = inherited::take_words(&start.words, &start.environment)?;
    kept[0].send(&[RUNS], &[PidFd::open(std::process::id() as i32)?.as_fd()])?;
    Ok(words)
}
