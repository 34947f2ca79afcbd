//! The mappings of a process that are scanned.

use std::io;

use kmem::Range;
use kmem::procfs::{self, MapLine};

use super::Part;

/// Least size of a mapping that counts as guest RAM, bytes: QEMU's other mappings are smaller.
const GUEST_MIN: usize = 32 << 20;

/// Whether a mapping is private memory without a file.
fn is_anonymous(line: &MapLine) -> bool {
    line.inode == 0
        && !line.perms.shared
        && !matches!(line.path.as_str(), "[vvar]" | "[vvar_vclock]" | "[vdso]" | "[vsyscall]")
}

/// Whether a mapping shows merged pages.
fn is_store(line: &MapLine) -> bool {
    line.path.starts_with("/memfd:pageone")
}

/// The mappings to scan. A kernel thread has none.
pub(super) fn areas(pid: i32, part: Part) -> io::Result<Vec<Range>> {
    if part == Part::Guest {
        return guest_ram(pid);
    }
    let mut areas = Vec::new();
    procfs::for_each_map(Some(pid), |line| {
        if is_anonymous(line) {
            areas.push(line.range);
        }
    })?;
    Ok(areas)
}

/// Neighbouring mappings that may be guest RAM.
///
/// If PageONE has merged pages of the RAM, it consists of many mappings: then all neighbours count
/// together. Otherwise a neighbour is other memory of QEMU that happens to be adjacent, and each
/// mapping counts by itself.
#[derive(Default)]
struct Neighbours {
    /// The mappings without those of merged pages.
    areas: Vec<Range>,
    /// Length of all mappings, bytes.
    len: usize,
    /// Whether one of them shows merged pages.
    merged: bool,
    /// End of the last mapping.
    end: usize,
}

impl Neighbours {
    fn push(&mut self, line: &MapLine) {
        self.len += line.range.len;
        self.end = line.range.end();
        match is_store(line) {
            true => self.merged = true,
            false => self.areas.push(line.range),
        }
    }

    /// The mappings that are guest RAM.
    fn ram(self) -> impl Iterator<Item = Range> {
        let Self { areas, len, merged, .. } = self;
        areas.into_iter().filter(move |area| if merged { len >= GUEST_MIN } else { area.len >= GUEST_MIN })
    }
}

fn guest_ram(pid: i32) -> io::Result<Vec<Range>> {
    let mut areas = Vec::new();
    let mut neighbours = Neighbours::default();
    procfs::for_each_map(Some(pid), |line| {
        let writable = line.perms.read && line.perms.write && !line.perms.exec && !line.perms.shared;
        let ram = writable && (is_store(line) || is_anonymous(line) && !line.path.starts_with("[heap"));
        if !ram || neighbours.end != line.range.start {
            areas.extend(std::mem::take(&mut neighbours).ram());
        }
        if ram {
            neighbours.push(line);
        }
    })?;
    areas.extend(neighbours.ram());
    Ok(areas)
}
