//! `/proc/PID/maps`, line by line. A client with merged memory has tens of thousands of lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use super::{invalid, lines_of, path};
use crate::Range;

/// The permissions of a mapping.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Perms {
    /// Readable.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// Executable.
    pub exec: bool,
    /// `MAP_SHARED`; otherwise `MAP_PRIVATE`.
    pub shared: bool,
}

/// One mapping.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapLine {
    /// Its addresses.
    pub range: Range,
    /// Its permissions.
    pub perms: Perms,
    /// The offset of its start in the file, in bytes.
    pub offset: u64,
    /// The file's device, as `st_dev`; 0 without a file.
    pub dev: u64,
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// The file's path, or a name such as `[heap]`; empty for memory without a name. A
    /// memfd's path is `/memfd:NAME (deleted)`.
    pub path: String,
}

/// An open `/proc/PID/maps`. It means the same address space for ever, even when the process number
/// is used again, or the process runs another program.
#[derive(Debug)]
pub struct Maps {
    lines: BufReader<File>,
    file: String,
}

impl Maps {
    /// Opens the list of mappings of a process.
    pub fn open(pid: Option<i32>) -> io::Result<Self> {
        let file = path(pid, "maps");
        Ok(Self { lines: lines_of(&file)?, file })
    }

    /// Calls `each` for every mapping, in ascending order. All calls share one [`MapLine`].
    ///
    /// The kernel does not list all mappings at one moment: a mapping that changes meanwhile may be
    /// missed, or appear twice in part. There are none where the address space is gone.
    ///
    /// # Errors
    ///
    /// `InvalidData`: a line is not understood; those of reading the file.
    pub fn for_each(mut self, mut each: impl FnMut(&MapLine)) -> io::Result<()> {
        let mut text = Vec::with_capacity(256);
        let mut line = MapLine {
            range: Range::new(0, 0),
            perms: Perms::default(),
            offset: 0,
            dev: 0,
            inode: 0,
            path: String::with_capacity(256),
        };
        loop {
            text.clear();
            if self.lines.read_until(b'\n', &mut text)? == 0 {
                return Ok(());
            }
            parse(text.strip_suffix(b"\n").unwrap_or(&text), &mut line).ok_or_else(|| invalid(&self.file))?;
            each(&line);
        }
    }
}

/// Calls `each` for every mapping of a process; see [`Maps::for_each`].
pub fn for_each_map(pid: Option<i32>, each: impl FnMut(&MapLine)) -> io::Result<()> {
    Maps::open(pid)?.for_each(each)
}

/// The number of mappings of a process; cheaper than [`for_each_map`].
pub fn count_maps(pid: Option<i32>) -> io::Result<usize> {
    let mut lines = lines_of(&path(pid, "maps"))?;
    let mut count = 0;
    loop {
        let chunk = lines.fill_buf()?;
        if chunk.is_empty() {
            return Ok(count);
        }
        count += chunk.iter().filter(|&&byte| byte == b'\n').count();
        let len = chunk.len();
        lines.consume(len);
    }
}

/// Parses `start-end perms offset major:minor inode   path`. The numbers are hexadecimal, except
/// for the inode.
pub(super) fn parse(text: &[u8], line: &mut MapLine) -> Option<()> {
    let (start, rest) = hexadecimal(text, b'-')?;
    let (end, rest) = hexadecimal(rest, b' ')?;
    let (perms, rest) = rest.split_at_checked(5)?;
    let (offset, rest) = hexadecimal(rest, b' ')?;
    let (major, rest) = hexadecimal(rest, b':')?;
    let (minor, rest) = hexadecimal(rest, b' ')?;
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
    let (inode, rest) = rest.split_at(digits);
    line.range = Range::new(start as usize, end.checked_sub(start)? as usize);
    line.perms =
        Perms { read: perms[0] == b'r', write: perms[1] == b'w', exec: perms[2] == b'x', shared: perms[3] == b's' };
    line.offset = offset;
    line.dev = libc::makedev(u32::try_from(major).ok()?, u32::try_from(minor).ok()?);
    line.inode = str::from_utf8(inode).ok()?.parse().ok()?;
    line.path.clear();
    let name = rest.iter().position(|&byte| byte != b' ').unwrap_or(rest.len());
    line.path.push_str(&String::from_utf8_lossy(&rest[name..]));
    Some(())
}

/// A hexadecimal number that ends at `end`, and the text behind that.
fn hexadecimal(text: &[u8], end: u8) -> Option<(u64, &[u8])> {
    let mut value: u64 = 0;
    for (i, &byte) in text.iter().enumerate() {
        if byte == end && i > 0 {
            return Some((value, &text[i + 1..]));
        }
        if value >> 60 != 0 {
            return None;
        }
        value = value << 4 | u64::from((byte as char).to_digit(16)?);
    }
    None
}
