//! Of what kind a process's memory is, by its `smaps` (proc_pid_smaps(5)).
//!
//! Guest RAM is in large pieces. A merged piece is cut into many mappings, private memory and
//! frames of the store in turn: those that touch count as one piece. Pieces below 16 MiB are left
//! out, and so is executable memory: it is QEMU's translated code, not RAM.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use super::process::Process;

/// The least piece that can be guest RAM, bytes.
const LEAST: u64 = 16 << 20;
/// The agent's library.
pub(super) const AGENT: &str = "libpageone_agent.so";
/// How the names of the store's memfds begin, and that of the pool of free pages.
const STORE: &str = "/memfd:pageone:";
const POOL: &str = "/memfd:pageone-ppr";

/// Sums over large pieces, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Private and anonymous, or merged: what can be merged.
    pub(super) private: u64,
    /// Mapped as shared.
    pub(super) shared: u64,
    /// A private mapping of a memfd or file: its pages exist twice once they are written.
    pub(super) copied: u64,
    /// Huge pages from a pool (hugetlbfs), shared or not.
    pub(super) huge: u64,
    /// Of the private memory: marked for the kernel's KSM.
    pub(super) ksm: u64,
    /// Of the private memory: locked.
    pub(super) locked: u64,
    /// Of the private memory: registered with a userfaultfd, which may be the agent's.
    pub(super) userfaultfd: u64,
    /// The largest shared or copied file's name, and the number of its file system's device.
    pub(super) file: String,
    pub(super) device: u64,
    /// The path of the agent's library, if it is loaded.
    pub(super) agent: Option<String>,
}

impl Memory {
    pub(super) fn total(&self) -> u64 {
        self.private + self.shared + self.copied + self.huge
    }
}

/// Reads the `smaps` of a process. The kernel walks all of its page tables: about 1 ms for 100 MiB.
///
/// # Errors
///
/// `PermissionDenied`: it is another user's.
pub(super) fn of(process: &Process<'_>) -> io::Result<Memory> {
    sum(BufReader::with_capacity(64 << 10, File::open(process.path("smaps"))?))
}

/// Whether a process has the agent's library; cheaper than [`of`].
pub(super) fn has_agent(process: &Process<'_>) -> bool {
    let Ok(file) = File::open(process.path("maps")) else { return false };
    // An executable mapping of it comes with the program's first instruction.
    BufReader::new(file).lines().map_while(Result::ok).any(|line| line.contains(AGENT))
}

/// What a mapping is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    Private,
    Shared,
    Copied,
    #[default]
    Other,
}

/// Mappings that touch and are of one kind.
#[derive(Debug, Default)]
struct Piece {
    kind: Kind,
    end: u64,
    len: u64,
    /// The file's name and device, of shared and copied memory.
    file: String,
    device: u64,
    huge: bool,
    ksm: u64,
    locked: u64,
    userfaultfd: u64,
}

fn sum(smaps: impl BufRead) -> io::Result<Memory> {
    let (mut memory, mut piece, mut last, mut largest) = (Memory::default(), Piece::default(), 0, 0);
    for line in smaps.lines() {
        let line = line?;
        if let Some(Header { start, end, kind, device, name }) = header(&line) {
            if name.ends_with(AGENT) || name.ends_with(&format!("{AGENT} (deleted)")) {
                memory.agent = Some(name.to_owned());
            }
            let file = if matches!(kind, Kind::Shared | Kind::Copied) { name } else { "" };
            if start != piece.end || kind != piece.kind || file != piece.file {
                memory.add(&piece, &mut largest);
                piece = Piece { kind, file: file.to_owned(), device, ..Piece::default() };
            }
            last = end - start;
            (piece.end, piece.len) = (end, piece.len + last);
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            for flag in flags.split_ascii_whitespace() {
                match flag {
                    "mg" => piece.ksm += last,
                    "lo" => piece.locked += last,
                    "um" | "uw" | "ui" => piece.userfaultfd += last,
                    "ht" => piece.huge = true,
                    // A device's registers.
                    "io" | "pf" => piece.kind = Kind::Other,
                    _ => {}
                }
            }
        }
    }
    memory.add(&piece, &mut largest);
    Ok(memory)
}

impl Memory {
    fn add(&mut self, piece: &Piece, largest: &mut u64) {
        if piece.len < LEAST || piece.file.starts_with(POOL) {
            return;
        }
        let sum = match piece.kind {
            Kind::Other => return,
            _ if piece.huge => &mut self.huge,
            Kind::Private => &mut self.private,
            Kind::Shared => &mut self.shared,
            Kind::Copied => &mut self.copied,
        };
        *sum += piece.len;
        if piece.kind == Kind::Private && !piece.huge {
            self.ksm += piece.ksm;
            self.locked += piece.locked;
            self.userfaultfd += piece.userfaultfd;
        } else if piece.len > *largest {
            *largest = piece.len;
            self.file.clone_from(&piece.file);
            self.device = piece.device;
        }
    }
}

/// The first line of a mapping.
struct Header<'a> {
    start: u64,
    end: u64,
    kind: Kind,
    /// Of its file.
    device: u64,
    name: &'a str,
}

fn header(line: &str) -> Option<Header<'_>> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let (perms, _, device, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let (major, minor) = device.split_once(':')?;
    let device = rustix::fs::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let name = fields.next().unwrap_or_default().trim();
    let is_anonymous = inode == "0" && (name.is_empty() || name.starts_with("[anon:"));
    let kind = match perms {
        "rw-p" if is_anonymous || name.starts_with(STORE) => Kind::Private,
        // A library's variables are too small to count.
        "rw-p" if inode != "0" => Kind::Copied,
        "rw-s" => Kind::Shared,
        _ => Kind::Other,
    };
    Some(Header { start, end, kind, device, name }).filter(|_| end > start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn of(smaps: &str) -> Memory {
        sum(smaps.as_bytes()).unwrap()
    }

    #[test]
    fn pieces_of_merged_memory_count_as_one() {
        let memory = of("\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me uw 
7f0000800000-7f0001000000 rw-p 00400000 00:01 9                          /memfd:pageone:uid-0 (deleted)
VmFlags: rd wr mr mw me 
7f0001000000-7f0001800000 rw-p 00000000 00:00 0                          [anon:guest]
VmFlags: rd wr mr mw me lo 
7f0002000000-7f0002f00000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me mg 
7f0010000000-7f0020000000 rwxp 00000000 00:00 0 
VmFlags: rd wr ex mr mw me 
7f0030000000-7f0030001000 r-xp 00000000 08:01 77                         /usr/lib/pageone/libpageone_agent.so (deleted)
VmFlags: rd ex mr mw me 
");
        assert_eq!((memory.private, memory.total()), (24 * MIB, 24 * MIB), "{memory:?}");
        assert_eq!(
            (memory.locked, memory.userfaultfd, memory.ksm),
            (8 * MIB, 8 * MIB, 0),
            "the small piece is left out"
        );
        assert_eq!(memory.agent.as_deref(), Some("/usr/lib/pageone/libpageone_agent.so (deleted)"));
    }

    #[test]
    fn shared_copied_and_huge_memory_are_told_apart() {
        let memory = of("\
7f0000000000-7f0010000000 rw-s 00000000 00:01 5                          /memfd:memory-backend-memfd (deleted)
VmFlags: rd wr sh mr mw me ms 
7f0020000000-7f0022000000 rw-p 00000000 00:01 6                          /memfd:ram (deleted)
VmFlags: rd wr mr mw me mg 
7f0030000000-7f0034000000 rw-s 00000000 00:0f 7                          /dev/hugepages/ram
VmFlags: rd wr sh mr mw me ms ht 
7f0040000000-7f0060000000 rw-s 00000000 00:0f 8                          /memfd:pageone-ppr (deleted)
VmFlags: rd wr sh mr mw me ms 
7f0070000000-7f0090000000 rw-s 00000000 00:0f 8                          anon_inode:[vfio-device]
VmFlags: rd wr sh mr mw me ms pf io 
7f00a0000000-7f00a2000000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me mg 
");
        let sizes = [memory.private, memory.shared, memory.copied, memory.huge].map(|bytes| bytes / MIB);
        assert_eq!((sizes, memory.ksm / MIB), ([32, 256, 32, 64], 32), "{memory:?}");
        assert_eq!(memory.file, "/memfd:memory-backend-memfd (deleted)");
        assert_eq!(memory.device, rustix::fs::makedev(0, 1));
    }
}
