//! What a program inherits from those who start it, and a copy has for itself: words, environment,
//! descriptors.

#![allow(unsafe_code)] // Lists of C strings; descriptors by number.

use std::ffi::{c_char, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use kmem::range::Range;
use kmem::seqpacket::Conn;

/// The last of the descriptors that each program has.
const STDERR: u32 = 2;

/// The program's words, and its environment.
pub(crate) struct Arguments {
    pub(crate) count: c_int,
    /// Ends with null, and the environment follows.
    pub(crate) words: *mut *mut c_char,
    pub(crate) environment: *mut *mut c_char,
}

/// Lays words and environment out for this process, and has the kernel show them.
pub(crate) fn take_words(words: &[Vec<u8>], environment: &[Vec<u8>]) -> io::Result<Arguments> {
    let join = |all: &[Vec<u8>]| -> Vec<u8> { all.iter().flat_map(|text| text.iter().copied().chain([0])).collect() };
    let (own, variables) = (join(words), join(environment));
    let border = own.len();
    // They stay for ever, as those that the kernel lays out.
    let text: &'static mut [u8] = Box::leak([own, variables].concat().into_boxed_slice());
    let (start, len) = (text.as_ptr() as usize, text.len());
    kmem::words::show(Range::new(start, border), Range::new(start + border, len - border))?;
    let mut list = Vec::with_capacity(words.len() + environment.len() + 2);
    let mut rest = text;
    for all in [words, environment] {
        for one in all {
            let (this, behind) = rest.split_at_mut(one.len() + 1);
            list.push(this.as_mut_ptr().cast::<c_char>());
            rest = behind;
        }
        list.push(null_mut());
    }
    let list: &'static mut [*mut c_char] = Box::leak(list.into_boxed_slice());
    let (own, variables) = list.split_at_mut(words.len() + 1);
    Ok(Arguments { count: words.len() as c_int, words: own.as_mut_ptr(), environment: variables.as_mut_ptr() })
}

/// Gives descriptors these numbers, as a program inherits them. `kept` get others.
///
/// # Errors
///
/// `AlreadyExists`: one of the numbers is another descriptor's, which the program or a library has
/// opened; and those of dup2(2).
pub(crate) fn take_descriptors(all: Vec<OwnedFd>, numbers: &[u32], kept: &mut [Conn]) -> io::Result<()> {
    let behind = numbers.iter().max().map_or(0, |&last| last as i32 + 1);
    let away = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, behind);
    // All of them are behind the numbers before the first gets its own.
    for conn in kept {
        *conn = Conn::from_fd(away(conn.as_fd())?);
    }
    let behind = all.iter().map(|fd| away(fd.as_fd())).collect::<Result<Vec<_>, _>>()?;
    drop(all);
    for (fd, &number) in behind.iter().zip(numbers) {
        // SAFETY: the call only asks about the number.
        if number > STDERR && unsafe { libc::fcntl(number as i32, libc::F_GETFD) } >= 0 {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // SAFETY: the number is nobody's, or a standard one of a program that has not begun.
        if unsafe { libc::dup2(fd.as_raw_fd(), number as i32) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
