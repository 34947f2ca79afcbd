//! Which memory is fit to be a region, by `/proc/self/smaps` (proc_pid_smaps(5)).
//!
//! Fit is private anonymous memory that can be read and written, not executed, of ordinary pages,
//! without gaps, that no other userfaultfd has, and whose advice the agent can repeat. Parts may be
//! private mappings of segments that the agent holds.

use std::fs::File;
use std::io::{BufRead, BufReader};

use kmem::range::Range;
use wire::SegmentId;

use crate::runtime::denied::{self, Need};
use crate::runtime::state::region::Sticky;

mod malloc;
mod marked;
mod stacks;

pub(crate) use marked::{Marked, marked};

/// Why a range is not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("/proc/self/smaps cannot be read")]
    Unknown,
    #[error("part of it is not mapped")]
    Hole,
    #[error("not private anonymous memory that can be read and written")]
    NotPlain,
    #[error("parts of it were advised differently")]
    Mixed,
    /// The C library's allocator gives it back to the kernel, unseen.
    #[error("memory of malloc, which free() may unmap unseen: map it with mmap()")]
    Malloc,
    /// The end of a thread would be missed.
    #[error("the stack of a thread")]
    Stack,
    /// The kernel has marked it as something that the agent does not merge.
    #[error("{0}")]
    Flag(&'static str),
}

/// What the kernel says of memory for a stack, a device or the like.
const SPECIAL: Unfit = Unfit::Flag("memory with a special use");

/// Whether the kernel's KSM may have marked the memory (`mg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ksm {
    Without,
    /// It may: the mark is about to be taken away.
    Marked,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The advice on it.
    pub(crate) sticky: Sticky,
    /// The parts that are mappings of segments, ascending.
    pub(crate) merged: Vec<Range>,
    /// The start of the memory of this kind that ends with the range.
    before: usize,
}

/// Whether a range is fit. `held`: the segments that it may map.
pub(crate) fn probe(range: Range, ksm: Ksm, held: &[SegmentId]) -> Result<Fit, Unfit> {
    let fit = probe_in(smaps()?, range, ksm, &|fields| check_kind(fields, held))?;
    if stacks::overlaps(range) {
        return Err(Unfit::Stack);
    }
    match malloc::owns(range, fit.before) {
        Some(false) => Ok(fit),
        Some(true) => Err(Unfit::Malloc),
        None => Err(Unfit::Unknown),
    }
}

/// The advice on a range that is one private mapping of a file, and fit otherwise.
pub(crate) fn probe_file(range: Range) -> Result<Sticky, Unfit> {
    let fit = probe_in(smaps()?, range, Ksm::Marked, &check_file)?;
    let covers = |(start, end, _): (usize, usize, &str)| start <= range.start && range.end() <= end;
    let is_one = smaps()?.lines().map_while(Result::ok).any(|line| header(&line).is_some_and(covers));
    if is_one { Ok(fit.sticky) } else { Err(Unfit::Mixed) }
}

fn smaps() -> Result<BufReader<File>, Unfit> {
    let file = File::open("/proc/self/smaps").map_err(|error| {
        denied::tell(Need::Smaps, &error);
        Unfit::Unknown
    })?;
    Ok(BufReader::with_capacity(64 << 10, file))
}

fn probe_in(smaps: impl BufRead, range: Range, ksm: Ksm, check_kind: Check<'_>) -> Result<Fit, Unfit> {
    let (mut covered, mut inside) = (range.start, false);
    let mut before = Range::new(0, 0);
    let (mut kind, mut merged) = (Kind::Plain, Vec::new());
    // A mapping of a segment reserves nothing, whatever the program asked for.
    let (mut plain, mut of_segments) = (None, None);
    for line in smaps.lines() {
        let line = line.map_err(|_| Unfit::Unknown)?;
        if let Some((start, end, rest)) = header(&line) {
            if start >= range.end() {
                break;
            }
            inside = end > range.start;
            if start <= range.start {
                let joins = start == before.end() && check_kind(rest).is_ok();
                before = Range::new(if joins { before.start } else { start }, 0);
                before.len = end - before.start;
            }
            if inside {
                if start > covered {
                    return Err(Unfit::Hole);
                }
                kind = check_kind(rest)?;
                if kind == Kind::Segment {
                    merged.extend(Range::new(start, end - start).intersect(&range));
                }
                covered = end;
            }
        } else if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            let this = advice(flags, ksm)?;
            let (known, this) = match kind {
                Kind::Plain => (&mut plain, this),
                Kind::Segment => (&mut of_segments, Sticky { no_reserve: false, ..this }),
            };
            if *known.get_or_insert(this) != this {
                return Err(Unfit::Mixed);
            }
        }
    }
    if let (Some(plain), Some(of_segments)) = (plain, of_segments)
        && (Sticky { no_reserve: false, ..plain }) != of_segments
    {
        return Err(Unfit::Mixed);
    }
    match plain.or(of_segments) {
        Some(sticky) if covered >= range.end() => Ok(Fit { sticky, merged, before: before.start }),
        _ => Err(Unfit::Hole),
    }
}

/// The first line of a mapping: its bounds, and the other fields.
fn header(line: &str) -> Option<(usize, usize, &str)> {
    let (bounds, rest) = line.split_once(' ')?;
    let (start, end) = bounds.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?, rest))
}

/// What a mapping is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    /// A mapping of a segment that the agent holds.
    Segment,
}

/// Checks the fields of a mapping behind its bounds.
type Check<'a> = &'a dyn Fn(&str) -> Result<Kind, Unfit>;

/// A private mapping of a file that can be read and written.
fn check_file(fields: &str) -> Result<Kind, Unfit> {
    let mut fields = fields.split_ascii_whitespace();
    let is_file = fields.next() == Some("rw-p") && fields.nth(2).is_some_and(|inode| inode != "0");
    if is_file { Ok(Kind::Plain) } else { Err(Unfit::NotPlain) }
}

/// Checks a mapping's permissions, inode and name.
fn check_kind(fields: &str, held: &[SegmentId]) -> Result<Kind, Unfit> {
    let mut fields = fields.split_ascii_whitespace();
    let (perms, _offset, _device, inode) = (fields.next(), fields.next(), fields.next(), fields.next());
    let inode: Option<u64> = inode.and_then(|inode| inode.parse().ok());
    match (perms, inode, fields.next()) {
        (Some("rw-p"), Some(0), None) => Ok(Kind::Plain),
        (Some("rw-p"), Some(0), Some("[heap]")) => Err(Unfit::Malloc),
        (Some("rw-p"), Some(0), Some(name)) if name.starts_with("[anon:") => Ok(Kind::Plain),
        (Some("rw-p"), Some(0), Some(_)) => Err(SPECIAL),
        (Some("rw-p"), Some(id), Some(name)) if name.starts_with("/memfd:") && held.contains(&id) => Ok(Kind::Segment),
        _ => Err(Unfit::NotPlain),
    }
}

/// The advice that a mapping's flags tell of.
fn advice(flags: &str, ksm: Ksm) -> Result<Sticky, Unfit> {
    let mut sticky = Sticky::default();
    for flag in flags.split_ascii_whitespace() {
        match flag {
            "dc" => sticky.dont_fork = true,
            "dd" => sticky.dont_dump = true,
            "hg" => sticky.huge = Some(true),
            "nh" => sticky.huge = Some(false),
            "nr" => sticky.no_reserve = true,
            "mg" if ksm == Ksm::Marked => {}
            "mg" => return Err(Unfit::Flag("the kernel's KSM has it already")),
            "um" | "uw" | "ui" => return Err(Unfit::Flag("another userfaultfd has it")),
            "lo" => return Err(Unfit::Flag("locked memory")),
            "gd" => return Err(Unfit::Flag("memory that grows down")),
            "wf" => return Err(Unfit::Flag("wiped on fork")),
            "ht" => return Err(Unfit::Flag("huge pages from a pool")),
            "pf" | "io" | "mm" | "sl" | "dp" => return Err(SPECIAL),
            _ => {}
        }
    }
    Ok(sticky)
}

#[cfg(test)]
mod tests {
    use kmem::{mm, raw};

    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
Rss:                   0 kB
VmFlags: rd wr mr mw me ac sd 
7f0000100000-7f0000200000 rw-p 00000000 00:00 0                          [anon:guest]
VmFlags: rd wr mr mw me ac sd 
7f0000200000-7f0000300000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me dc dd ac nh 
7f0000300000-7f0000400000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
VmFlags: rd wr sh mr mw me ms sd 
7f0000500000-7f0000600000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac mg 
7f0000600000-7f0000700000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac nr 
7f0000700000-7f0000800000 rw-p 00000000 00:01 9                          /memfd:pageone:snapshot (deleted)
VmFlags: rd wr mr mw me nr 
7f0000800000-7f0000900000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac 
7f0000900000-7f0000a00000 rw-p 00100000 00:01 9                          /memfd:pageone:snapshot (deleted)
VmFlags: rd wr mr mw me dc nr 
";

    fn fit(start: usize, len: usize) -> Result<Sticky, Unfit> {
        let range = Range::new(0x7f00_0000_0000 + start, len);
        probe_in(MAPS.as_bytes(), range, Ksm::Without, &|fields| check_kind(fields, &[])).map(|fit| fit.sticky)
    }

    #[test]
    fn segments_that_the_agent_holds_are_told_from_other_files() {
        let whole = |start: usize, len| Range::new(0x7f00_0000_0000 + start, len);
        let fit = |start, len, held: &[SegmentId]| {
            probe_in(MAPS.as_bytes(), whole(start, len), Ksm::Without, &|fields| check_kind(fields, held))
        };
        let found = fit(0x680000, 0x100000, &[8, 9]).unwrap();
        assert_eq!(found.merged, [whole(0x700000, 0x80000)]);
        assert_eq!(found.sticky, Sticky { no_reserve: true, ..Sticky::default() }, "that of memory without a file");
        let found = fit(0x700000, 0x200000, &[9]).unwrap();
        assert_eq!((found.merged, found.sticky), (vec![whole(0x700000, 0x100000)], Sticky::default()));
        assert_eq!(fit(0x700000, 0x200000, &[8]), Err(Unfit::NotPlain), "another file");
        assert_eq!(fit(0x800000, 0x200000, &[9]), Err(Unfit::Mixed), "advised differently");
    }

    #[test]
    fn a_private_mapping_of_a_file_is_told_from_others() {
        let fields = |permissions: &str, inode: u32| format!("{permissions} 00000000 00:51 {inode}          /ram");
        assert_eq!(check_file(&fields("rw-p", 2)), Ok(Kind::Plain));
        for other in [fields("rw-s", 2), fields("r--p", 2), fields("rwxp", 2), fields("rw-p", 0), String::new()] {
            assert_eq!(check_file(&other), Err(Unfit::NotPlain), "{other}");
        }
    }

    #[test]
    fn takes_private_anonymous_memory_only() {
        assert_eq!(fit(0, 0x200000), Ok(Sticky::default()));
        assert_eq!(fit(0x1000, 0x1000), Ok(Sticky::default()));
        let advised = Sticky { dont_fork: true, dont_dump: true, huge: Some(false), no_reserve: false };
        assert_eq!(fit(0x200000, 0x100000), Ok(advised));
        assert!(fit(0x1ff000, 0x2000).is_err(), "advised differently");
        assert!(fit(0x300000, 0x1000).is_err(), "shared");
        assert!(fit(0x400000, 0x1000).is_err(), "not mapped");
        assert!(fit(0x4ff000, 0x2000).is_err(), "starts before the mapping");
        assert!(fit(0x500000, 0x100000).is_err(), "KSM");
        assert!(fit(0x700000, 0x1000).is_err(), "a file");
        assert!(fit(0xa00000, 0x1000).is_err(), "behind the last mapping");
    }

    #[test]
    fn asks_the_kernel() {
        let len = 4 << 20;
        let start = mm::map_anonymous(len).unwrap();
        assert_eq!(probe(Range::new(start, len), Ksm::Without, &[]).map(|fit| fit.sticky.dont_fork), Ok(false));
        // SAFETY: the memory was mapped above, and nothing but this test uses it.
        #[allow(unsafe_code)]
        unsafe {
            raw::madvise(start, len, libc::MADV_DONTFORK).unwrap();
            assert_eq!(probe(Range::new(start, len), Ksm::Without, &[]).map(|fit| fit.sticky.dont_fork), Ok(true));
            raw::mprotect(start + 4096, 4096, libc::PROT_READ).unwrap();
            assert!(probe(Range::new(start, len), Ksm::Without, &[]).is_err());
            raw::munmap(start, len).unwrap();
        }
    }
}
