//! A program that closes and replaces descriptors that it did not open.

use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Mutex;

unsafe extern "C" {
    fn closefrom(first: libc::c_int);
}

/// The files that the program has opened since.
static FILES: Mutex<Vec<std::fs::File>> = Mutex::new(Vec::new());

/// Descriptors of this process that are not the first three, with what they are.
fn others() -> Vec<(i32, String)> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let named = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, target.to_string_lossy().into_owned()))
    });
    named.filter(|(number, _): &(i32, String)| *number > 2).collect()
}

/// Closes all but the first three: 0 by `closefrom`, 1 by `close_range`, 2 one by one, 3 past the C
/// library. Then it takes all numbers that are free with files of its own.
pub fn close_all(way: usize) -> String {
    let highest = others().into_iter().map(|(number, _)| number).max().unwrap_or(3);
    // SAFETY: no object of this program owns a descriptor above the first three.
    unsafe {
        match way {
            0 => closefrom(3),
            1 => assert_eq!(libc::close_range(3, u32::MAX, 0), 0),
            2 => (3..=highest).for_each(|number| _ = libc::close(number)),
            _ => assert_eq!(libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0), 0),
        }
    }
    let mut files = FILES.lock().unwrap();
    while files.last().is_none_or(|file| file.as_raw_fd() <= highest) {
        files.push(new_file());
    }
    others().iter().filter(|(_, target)| target.contains("userfaultfd")).count().to_string()
}

fn new_file() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"mine").unwrap();
    file
}

/// Puts files of its own onto the agent's descriptors: 0 by `dup2`, 1 by `dup3`, 2 past the C
/// library.
pub fn replace(way: usize) -> String {
    let kinds = ["socket:", "userfaultfd", "memfd:"];
    let agents: Vec<i32> = others()
        .into_iter()
        .filter(|(_, target)| kinds.iter().any(|kind| target.contains(kind)))
        .map(|(number, _)| number)
        .collect();
    // Made before: the agent closes its other descriptors when it has lost one.
    let files: Vec<_> = agents.iter().map(|_| new_file()).collect();
    for (&number, file) in agents.iter().zip(files) {
        // SAFETY: no object of this program owns the number; from now on the file below does.
        let done = unsafe {
            match way {
                0 => libc::dup2(file.as_raw_fd(), number),
                1 => libc::dup3(file.as_raw_fd(), number, libc::O_CLOEXEC),
                _ => libc::syscall(libc::SYS_dup3, file.as_raw_fd(), number, 0) as i32,
            }
        };
        assert_eq!(done, number);
        drop(file);
        // SAFETY: the number was made this file's just now.
        FILES.lock().unwrap().push(unsafe { std::os::fd::FromRawFd::from_raw_fd(number) });
    }
    agents.len().to_string()
}

/// How many of its own files are not what the program wrote, or are closed; those are kept.
pub fn own_files() -> String {
    let mut files = FILES.lock().unwrap();
    let is_bad = |file: &std::fs::File| {
        let mut bytes = [0; 16];
        let read = std::os::unix::fs::FileExt::read_at(file, &mut bytes, 0);
        let place = std::io::Seek::stream_position(&mut &*file);
        read.ok() != Some(4) || bytes[..4] != *b"mine" || place.ok() != Some(4)
    };
    let bad = files.iter().filter(|file| is_bad(file)).count();
    files.drain(..).for_each(|file| _ = file.into_raw_fd());
    bad.to_string()
}
