//! A function's address, by the dynamic symbols that lie in the process's memory.
//!
//! The file that a library was mapped from may be replaced or hidden by now; what was mapped stays.
//! Every address and count comes from the process, so each loop has a bound, and a look-up that
//! leads nowhere finds nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The memory of a process (`/proc/PID/mem`).
pub(crate) struct Memory(File);

impl Memory {
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).map(Self)
    }

    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, address)
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, address)
    }

    fn array<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes).ok()?;
        Some(bytes)
    }

    fn u32(&self, address: u64) -> Option<u32> {
        self.array(address).map(u32::from_le_bytes)
    }

    fn u64(&self, address: u64) -> Option<u64> {
        self.array(address).map(u64::from_le_bytes)
    }

    /// Whether this very name, and a zero, stand there.
    fn has_name(&self, address: u64, name: &str) -> bool {
        let mut found = vec![0; name.len() + 1];
        self.read(address, &mut found).is_ok() && found.strip_suffix(&[0]) == Some(name.as_bytes())
    }
}

/// Segments that a library may have.
const MAX_SEGMENTS: u64 = 64;
/// Entries of a dynamic section that are looked at.
const MAX_ENTRIES: u64 = 256;
/// Symbols in one chain of a hash table that are looked at.
const MAX_CHAIN: u32 = 4096;

/// Numbers of elf(5).
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
/// Bytes of a symbol.
const SYMBOL: u64 = 24;
const STT_FUNC: u8 = 2;

/// The address of a function that the library at `base` defines. `None`: it defines none of this
/// name, or is no library.
pub(crate) fn function(memory: &Memory, base: u64, name: &str) -> Option<u64> {
    let [strings, symbols, hashes] = tables(memory, base)?;
    let header: [u8; 16] = memory.array(hashes)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (buckets, first, bloom) = (word(0), word(4), word(8));
    let hash = gnu_hash(name);
    let table = hashes.checked_add(16 + u64::from(bloom) * 8)?;
    let chains = table.checked_add(u64::from(buckets) * 4)?;
    let mut index = memory.u32(table.checked_add(u64::from(hash.checked_rem(buckets)?) * 4)?)?;
    for _ in 0..MAX_CHAIN {
        let link = memory.u32(chains.checked_add(u64::from(index.checked_sub(first)?) * 4)?)?;
        if link | 1 == hash | 1 {
            let symbol: [u8; SYMBOL as usize] = memory.array(symbols.checked_add(u64::from(index) * SYMBOL)?)?;
            let text = u32::from_le_bytes([symbol[0], symbol[1], symbol[2], symbol[3]]);
            let section = u16::from_le_bytes([symbol[6], symbol[7]]);
            let value = u64::from_le_bytes(symbol[8..16].try_into().ok()?);
            if symbol[4] & 15 == STT_FUNC && section != 0 && memory.has_name(strings.checked_add(text.into())?, name) {
                return base.checked_add(value);
            }
        }
        if link & 1 != 0 {
            break;
        }
        index = index.checked_add(1)?;
    }
    None
}

/// Where the names, the symbols and their hash table are.
fn tables(memory: &Memory, base: u64) -> Option<[u64; 3]> {
    let header: [u8; 64] = memory.array(base)?;
    if &header[..6] != b"\x7fELF\x02\x01" {
        return None;
    }
    let segments = base.checked_add(u64::from_le_bytes(header[32..40].try_into().ok()?))?;
    let count = u64::from(u16::from_le_bytes([header[56], header[57]])).min(MAX_SEGMENTS);
    let dynamic = (0..count).find_map(|i| {
        let segment: [u8; 56] = memory.array(segments.checked_add(i * 56)?)?;
        let is_dynamic = u32::from_le_bytes(segment[..4].try_into().ok()?) == PT_DYNAMIC;
        is_dynamic.then(|| u64::from_le_bytes([16, 17, 18, 19, 20, 21, 22, 23].map(|at: usize| segment[at])))
    })?;
    let mut found = [0; 3];
    for i in 0..MAX_ENTRIES {
        let entry = base.checked_add(dynamic)?.checked_add(i * 16)?;
        let (tag, value) = (memory.u64(entry)?, memory.u64(entry.checked_add(8)?)?);
        // The loader of the GNU C library has made most of them addresses.
        let address = if value < base { base.checked_add(value)? } else { value };
        match tag {
            0 => break,
            DT_STRTAB => found[0] = address,
            DT_SYMTAB => found[1] = address,
            DT_GNU_HASH => found[2] = address,
            _ => {}
        }
    }
    (!found.contains(&0)).then_some(found)
}

/// The hash of a symbol's name in `DT_GNU_HASH`.
fn gnu_hash(name: &str) -> u32 {
    name.bytes().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(byte.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where this process's C library begins.
    fn library() -> u64 {
        let mut base = 0;
        let is_first = |line: &kmem::procfs::MapLine| line.offset == 0 && line.path.ends_with("/libc.so.6");
        kmem::procfs::for_each_map(None, |line| {
            if is_first(line) {
                base = line.range.start as u64;
            }
        })
        .unwrap();
        base
    }

    #[test]
    fn functions_of_the_c_library_are_found_where_they_are() {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        let base = library();
        for (name, address) in [("getppid", libc::getppid as *const ()), ("madvise", libc::madvise as *const ())] {
            assert_eq!(function(&memory, base, name), Some(address as u64), "{name}");
        }
        assert_eq!(function(&memory, base, "no_such_function"), None);
        assert_eq!(function(&memory, base, ""), None);
        assert_eq!(function(&memory, base + 4096, "getppid"), None, "no library begins there");
        assert_eq!(function(&memory, u64::MAX - 8, "getppid"), None);
    }

    #[test]
    fn tables_of_any_content_lead_nowhere_and_end() {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        // A library's first pages, with each 8 bytes of it replaced in turn.
        let mut bytes = vec![0; 4096];
        memory.read(library(), &mut bytes).unwrap();
        for at in (0..bytes.len()).step_by(8) {
            for value in [0, 1, u64::MAX, u64::MAX / 2, bytes.as_ptr() as u64] {
                let mut copy = bytes.clone();
                copy[at..at + 8].copy_from_slice(&value.to_le_bytes());
                function(&memory, copy.as_ptr() as u64, "getppid");
            }
        }
    }
}
