//! What `/proc/PID` says of a process: who it is, what it was started with, what it has open.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most bytes of a file that is read as a whole.
const MOST: u64 = 1 << 20;
/// Bits of `CapEff` (capabilities(7)).
pub(super) const CAP_CHOWN: u32 = 0;
pub(super) const CAP_DAC_OVERRIDE: u32 = 1;
pub(super) const CAP_DAC_READ_SEARCH: u32 = 2;
pub(super) const CAP_SYS_PTRACE: u32 = 19;
pub(super) const CAP_SYS_ADMIN: u32 = 21;

/// A process, below a root directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Process<'a> {
    root: &'a Path,
    pub(super) pid: i32,
}

/// Some of `/proc/PID/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    /// Effective user and group.
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Further groups.
    pub(super) groups: Vec<u32>,
    /// Effective capabilities.
    pub(super) capabilities: u64,
    /// Filters of system calls (seccomp); 1 where the kernel does not count them.
    pub(super) filters: u64,
    /// Locked memory, bytes.
    pub(super) locked: u64,
    /// Pinned memory, bytes: io_uring, VFIO and RDMA.
    pub(super) pinned: u64,
}

impl Identity {
    pub(super) fn has(&self, capability: u32) -> bool {
        self.capabilities >> capability & 1 == 1
    }
}

impl<'a> Process<'a> {
    pub(super) fn new(root: &'a Path, pid: i32) -> Self {
        Self { root, pid }
    }

    /// A path below `/proc/PID`.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.root.join(format!("proc/{}/{file}", self.pid))
    }

    pub(super) fn text(&self, file: &str) -> io::Result<String> {
        read(&self.path(file))
    }

    /// The target of a link; where the file was removed, it ends with ` (deleted)`.
    pub(super) fn link(&self, file: &str) -> io::Result<String> {
        Ok(std::fs::read_link(self.path(file))?.to_string_lossy().into_owned())
    }

    pub(super) fn identity(&self) -> io::Result<Identity> {
        Ok(parse(&self.text("status")?))
    }

    pub(super) fn arguments(&self) -> Vec<String> {
        guests::words(self.root, self.pid).unwrap_or_default()
    }

    /// A variable of the environment that it was started with.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
        let text = self.text("environ").ok()?;
        text.split('\0').find_map(|entry| Some(entry.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    }

    /// Numbers and names of its open files.
    ///
    /// # Errors
    ///
    /// `PermissionDenied`: it is another user's.
    pub(super) fn files(&self) -> io::Result<Vec<(String, String)>> {
        let entries = std::fs::read_dir(self.path("fd"))?;
        let name = |entry: std::fs::DirEntry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            Some((entry.file_name().into_string().ok()?, target.to_string_lossy().into_owned()))
        };
        Ok(entries.flatten().filter_map(name).collect())
    }

    /// Whether its user namespace is not the host's: its capabilities count only within.
    pub(super) fn is_user_contained(&self) -> bool {
        let of = |process: &str| {
            let meta = std::fs::metadata(self.root.join("proc").join(process).join("ns/user")).ok()?;
            Some((meta.dev(), meta.ino()))
        };
        let own = of("1").or_else(|| of("self"));
        own.is_some() && of(&self.pid.to_string()).is_some_and(|theirs| Some(theirs) != own)
    }

    /// Whether its program is an ELF file that asks for no dynamic linker (elf(5)), so that no
    /// library can be loaded into it. `None`: it cannot be read.
    pub(super) fn is_static(&self) -> Option<bool> {
        /// Bytes in the header of a 64-bit file, and in each entry of its program header table.
        const HEADER: usize = 64;
        const ENTRY: u64 = 56;
        /// The type of the entry that names the dynamic linker.
        const PT_INTERP: u32 = 3;
        let file = File::open(self.path("exe")).ok()?;
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0).ok()?;
        // ELFCLASS64, ELFDATA2LSB.
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return Some(false);
        }
        let table = u64::from_le_bytes(header[32..40].try_into().ok()?);
        let entries = u16::from_le_bytes(header[56..58].try_into().ok()?);
        for entry in 0..u64::from(entries) {
            let mut kind = [0; 4];
            file.read_exact_at(&mut kind, table.checked_add(entry * ENTRY)?).ok()?;
            if u32::from_le_bytes(kind) == PT_INTERP {
                return Some(false);
            }
        }
        Some(true)
    }
}

/// At most 1 MiB of a file; what is no text in it is replaced.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of a line `name: value`.
pub(super) fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}

fn parse(text: &str) -> Identity {
    let number = |name| -> Option<u64> { field(text, name)?.split_whitespace().next()?.parse().ok() };
    // Real, effective, saved, file system.
    let effective = |name| field(text, name)?.split_whitespace().nth(1)?.parse().ok();
    let groups = field(text, "Groups").unwrap_or_default().split_whitespace();
    let is_filtered = number("Seccomp") == Some(2);
    Identity {
        uid: effective("Uid").unwrap_or(u32::MAX),
        gid: effective("Gid").unwrap_or(u32::MAX),
        groups: groups.filter_map(|group| group.parse().ok()).collect(),
        capabilities: field(text, "CapEff").and_then(|bits| u64::from_str_radix(bits, 16).ok()).unwrap_or(0),
        filters: if is_filtered { number("Seccomp_filters").unwrap_or(1).max(1) } else { 0 },
        locked: number("VmLck").unwrap_or(0) << 10,
        pinned: number("VmPin").unwrap_or(0) << 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_understood() {
        let text = "Name:\tqemu\nUid:\t0\t64055\t0\t0\nGid:\t0\t108\t0\t0\nGroups:\t36 108 \nVmPin:\t  4 kB\nVmLck:\t8 kB\n\
                    CapEff:\t0000000000080002\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        let identity = parse(text);
        assert_eq!((identity.uid, identity.gid, &identity.groups[..]), (64055, 108, &[36, 108][..]));
        assert!(identity.has(CAP_SYS_PTRACE) && identity.has(CAP_DAC_OVERRIDE) && !identity.has(CAP_CHOWN));
        assert_eq!((identity.filters, identity.locked, identity.pinned), (3, 8192, 4096));
    }

    #[test]
    fn this_test_asks_for_a_dynamic_linker() {
        let own = Process::new(Path::new("/"), std::process::id() as i32);
        assert_eq!(own.is_static(), Some(false));
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/7")).unwrap();
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        std::fs::write(root.path().join("proc/7/exe"), &elf).unwrap();
        assert_eq!(Process::new(root.path(), 7).is_static(), Some(true), "no entry at all");
        assert_eq!(Process::new(root.path(), 8).is_static(), None);
    }
}
