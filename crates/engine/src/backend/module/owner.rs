//! Which process a file belongs to: the first that has it open.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use guests::Names;
use kmem::memfd::FileId;
use kmem::pidfd::PidFd;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, StatxFlags, makedev, openat, statx};
use rustix::path::Arg;

/// Device and inode number.
pub(super) type Key = (u64, u64);

/// A process that has a file open.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) name: String,
    /// Another process may have its number by now.
    pub(crate) process: PidFd,
    /// How its guest calls itself, once it was asked: that may take for ever.
    pub(crate) own: OnceLock<Names>,
}

impl Owner {
    pub(crate) fn lives(&self) -> bool {
        !self.process.has_exited()
    }
}

/// A process's turn in a walk.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) pid: i32,
    /// Where its directory of descriptors is read on.
    pub(super) from: i64,
    /// How many descriptors are looked at.
    pub(super) most: usize,
}

pub(super) struct Looked {
    pub(super) descriptors: usize,
    /// Where there may be more.
    pub(super) next: Option<i64>,
}

/// All processes, with their users, in the order of their numbers.
pub(super) fn processes() -> Vec<(claims::Owner, i32)> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<i32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().filter_map(|pid| Some((claims::Owner::of(user(pid)?), pid))).collect()
}

/// Of a process that cannot be dumped, too.
fn user(pid: i32) -> Option<u32> {
    std::fs::metadata(format!("/proc/{pid}")).ok().map(|process| process.uid())
}

/// Calls `found` with the files of these mounts (path and device) that a process has open.
pub(super) fn look(turn: &Turn, mounts: &[(PathBuf, u64)], found: &mut dyn FnMut(Key, &Arc<Owner>)) -> Looked {
    let mut looked = Looked { descriptors: 0, next: None };
    let Ok(process) = PidFd::open(turn.pid) else { return looked };
    let mut files = BTreeSet::new();
    each_descriptor(turn, &mut looked, |fd| {
        // By its name first: to ask a file of another file system may take long.
        if std::fs::read_link(fd).is_ok_and(|name| mounts.iter().any(|(path, _)| name.starts_with(path))) {
            files.extend(identity(fd).filter(|id| mounts.iter().any(|&(_, device)| device == id.dev)));
        }
    });
    let Some(uid) = user(turn.pid).filter(|_| !files.is_empty()) else { return looked };
    let name = std::fs::read_to_string(format!("/proc/{}/comm", turn.pid)).unwrap_or_default().trim_end().to_owned();
    let owner = Arc::new(Owner { pid: turn.pid, uid, name, process, own: OnceLock::new() });
    // All that was asked by its number was asked of this process.
    if owner.lives() {
        files.into_iter().for_each(|id| found((id.dev, id.ino), &owner));
    }
    looked
}

/// Calls `each` with the descriptors of a process, by path. Another process may have its number by
/// now: that one's first ones are then left out.
fn each_descriptor(turn: &Turn, looked: &mut Looked, mut each: impl FnMut(&str)) {
    let all = format!("/proc/{}/fd", turn.pid);
    let Ok(directory) = openat(CWD, &all, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
        return;
    };
    let Ok(mut directory) = Dir::new(directory) else { return };
    if directory.seek(turn.from).is_err() {
        return;
    }
    let mut end = turn.from;
    while let Some(Ok(entry)) = directory.read() {
        let Some(number) = entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if looked.descriptors == turn.most {
            looked.next = Some(end);
            return;
        }
        looked.descriptors += 1;
        end = entry.offset();
        each(&format!("{all}/{number}"));
    }
}

/// Asks no slow file system: in a mount namespace of its own, another's name may be a mount's.
fn identity(path: impl Arg) -> Option<FileId> {
    let stat = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some(FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino })
}

/// Descriptors of a process that are looked at for its RAM.
const DESCRIPTORS: usize = 1 << 16;

/// The files that a process has open, with descriptor numbers: its lowest ones.
pub(super) fn descriptors(pid: i32) -> Vec<(FileId, u32)> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten().take(DESCRIPTORS);
    let of = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((identity(entry.path())?, number))
    };
    open.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Owner {
        /// This process.
        pub(in super::super) fn this() -> Arc<Self> {
            let pid = std::process::id() as i32;
            let process = PidFd::open(pid).unwrap();
            Arc::new(Self { pid, uid: 0, name: String::new(), process, own: OnceLock::new() })
        }
    }

    #[test]
    fn the_process_that_has_a_file_open_is_found_behind_others_in_its_next_turn() {
        let directory = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(directory.path().join("ram")).unwrap();
        std::fs::remove_file(directory.path().join("ram")).unwrap();
        let of_file = file.metadata().unwrap();
        let pid = std::process::id() as i32;
        let all = processes();
        assert!(all.is_sorted_by_key(|&(_, pid)| pid) && all.contains(&(claims::Owner::of(user(pid).unwrap()), pid)));
        // Behind all that the other tests open.
        let behind = rustix::io::fcntl_dupfd_cloexec(&file, 900).unwrap();
        drop(file);
        let mounts = [(directory.path().to_owned(), of_file.dev())];
        let (mut turn, mut turns, mut owners) = (Turn { pid, from: 0, most: 2 }, 0, Vec::new());
        loop {
            turns += 1;
            let looked = look(&turn, &mounts, &mut |key, owner| owners.push((turns, key, owner.clone())));
            assert!(looked.descriptors <= 2);
            let Some(next) = looked.next else { break };
            turn.from = next;
        }
        let [(at, key, owner)] = &owners[..] else { panic!("{owners:?}") };
        assert_eq!((*at, *key, owner.pid), (turns, (of_file.dev(), of_file.ino()), pid));
        assert!(turns > 1 && owner.lives() && !owner.name.is_empty());
        let id = kmem::memfd::identity(&behind).unwrap();
        let number = descriptors(owner.pid).into_iter().find(|&(other, _)| other == id).unwrap().1;
        assert_eq!(number, std::os::fd::AsRawFd::as_raw_fd(&behind) as u32);
        drop(behind);
        look(&Turn { pid, from: 0, most: 4096 }, &mounts, &mut |key, _| panic!("{key:?} is closed"));
    }

    #[test]
    fn an_owner_that_has_ended_lives_no_more_though_its_number_is_taken() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = PidFd::open(child.id() as i32).unwrap();
        // Its number is this process's, which lives all the time.
        let owner = Owner { process, ..Arc::into_inner(Owner::this()).unwrap() };
        assert!(owner.lives());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!owner.lives());
    }
}
