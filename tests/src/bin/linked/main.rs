//! A program that is linked with the agent's library, by crate `pageone-vmm`, and not started by
//! `pageone run`.
//!
//! `pageone-linked-client SOCKET` maps 8 MiB, the same in each such program, and says `ready`.
//! Then each line of its input is a command: `start`, `register`, `unregister`, `stop`, `small` (a
//! range that is too small), `odd` (an address inside of a page). The answer is `ok`, or the error.
//! After each the bytes are compared: `WRONG` if one differs.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, unsafe_code)] // A test's client.

use std::io::{BufRead, stdin};
use std::path::PathBuf;

/// Bytes of memory.
const LEN: usize = 8 << 20;

fn main() {
    let socket = PathBuf::from(std::env::args_os().nth(1).unwrap());
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), LEN, access, flags, -1, 0) }.cast::<u8>();
    assert!(memory.addr() != usize::MAX);
    let word = |n: usize| e2e::pattern(7, n);
    let words = memory.cast::<u64>();
    // SAFETY: all of the mapping, which nobody else has.
    (0..LEN / 8).for_each(|n| unsafe { words.add(n).write_volatile(word(n)) });
    println!("ready");
    for command in stdin().lock().lines() {
        let answer = match command.unwrap().as_str() {
            "start" => pageone_vmm::start(Some(&socket)),
            // SAFETY: nothing changes the mapping.
            "register" => unsafe { pageone_vmm::register(memory, LEN) },
            // SAFETY: nothing changes the mapping.
            "small" => unsafe { pageone_vmm::register(memory, 4096) },
            // SAFETY: nothing changes the mapping.
            "odd" => unsafe { pageone_vmm::register(memory.add(1), LEN / 2) },
            "unregister" => pageone_vmm::unregister(memory, LEN),
            "stop" => pageone_vmm::stop(),
            other => panic!("{other}?"),
        };
        // SAFETY: all of the mapping.
        let right = (0..LEN / 8).all(|n| unsafe { words.add(n).read_volatile() } == word(n));
        match answer {
            _ if !right => println!("WRONG"),
            Ok(()) => println!("ok"),
            Err(error) => println!("{error}"),
        }
    }
}
