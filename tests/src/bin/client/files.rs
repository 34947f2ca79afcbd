//! What programs do with files that they read into their memory.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;

use crate::{say, verdict};

/// Whether an address lies in a mapping with this name.
fn lies_in(address: usize, name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start)..number(end)).contains(&address) && line.contains(name)
    })
}

/// Reads a file with fread(3) into buffers of several kinds, and says which were mapped.
pub(crate) fn fread(path: &str) {
    let bytes = std::fs::read(path).unwrap();
    let name = CString::new(std::ffi::OsStr::new(path).as_bytes()).unwrap();
    let mut problems = Vec::new();
    // SAFETY: the name is a C string.
    let file = unsafe { libc::fopen(name.as_ptr(), c"rb".as_ptr()) };
    assert!(!file.is_null());
    let mut read = |what: &str, buffer: *mut c_void, from: usize, len: usize| {
        // SAFETY: the buffer has room for the bytes, and the file is open.
        let done =
            unsafe { libc::fseek(file, from as _, libc::SEEK_SET) == 0 && libc::fread(buffer, 1, len, file) == len };
        // SAFETY: the buffer has these bytes.
        let has = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
        // SAFETY: the file is open.
        let at = unsafe { libc::ftell(file) };
        if !done || has != &bytes[from..from + len] || at != (from + len) as libc::c_long {
            problems.push(format!("{what}: wrong bytes, or not all, or {at} is the wrong place"));
        }
        lies_in(buffer as usize + len / 2, "pageone-read")
    };
    // SAFETY: plain calls of the allocator, whose results are used within their lengths.
    let (whole, part, short) = unsafe { (libc::malloc(bytes.len()), libc::malloc(bytes.len()), libc::malloc(4096)) };
    let mut mapped = vec![read("all", whole, 0, bytes.len())];
    mapped.push(read("a part", part, 12_345, bytes.len() - 20_000));
    mapped.push(read("a short one", short, 5, 4096));
    // The program's own mapping, in which a buffer lies as malloc's do.
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let own = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes.len() + 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(own, libc::MAP_FAILED);
    mapped.push(read("the program's mapping", own.wrapping_byte_add(16), 0, bytes.len()));
    // The end of the file, before what was asked for.
    // SAFETY: the buffer has room for all of the file, and less is there.
    let rest = unsafe {
        libc::fseek(file, 4096, libc::SEEK_SET);
        libc::fread(part, 1, bytes.len(), file)
    };
    if rest != bytes.len() - 4096 {
        problems.push(format!("behind the end: {rest} bytes"));
    }
    // A buffer is the program's: it grows, is written, and goes.
    // SAFETY: the buffer is malloc's, and has its bytes still.
    unsafe {
        let grown = libc::realloc(whole, bytes.len() * 2).cast::<u8>();
        if std::slice::from_raw_parts(grown, bytes.len()) != bytes {
            problems.push("grown: wrong bytes".into());
        }
        grown.write_bytes(0xee, bytes.len());
        libc::free(grown.cast());
        libc::free(part);
    }
    say(&format!("mapped {mapped:?}"));
    verdict(&problems);
}
