//! Which process a file belongs to: the first that has it open.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kmem::memfd::FileId;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

/// A process that has a file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) name: String,
}

impl Owner {
    pub(super) fn lives(&self) -> bool {
        Path::new(&format!("/proc/{}", self.pid)).exists()
    }
}

/// The processes that have files of a mount open, by inode number, in the order of their numbers.
pub(super) fn of(path: &Path, device: u64) -> HashMap<u64, Vec<Owner>> {
    let mut owners: HashMap<u64, Vec<Owner>> = HashMap::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<i32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for fd in open.map(|entry| entry.path()) {
            // By its name first: to ask a file of another file system may take long.
            let here = std::fs::read_link(&fd).is_ok_and(|name| name.starts_with(path));
            let Some(file) = here.then(|| std::fs::metadata(&fd).ok()).flatten() else { continue };
            let known = owners.get(&file.ino()).and_then(|owners| owners.last());
            if file.dev() == device && known.is_none_or(|last| last.pid != pid) {
                let process = std::fs::metadata(format!("/proc/{pid}"));
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let uid = process.map_or(0, |process| process.uid());
                owners.entry(file.ino()).or_default().push(Owner { pid, uid, name: name.trim_end().into() });
            }
        }
    }
    owners
}

/// The files that a process has open, with descriptor numbers. Asks no slow file system.
pub(super) fn descriptors(pid: i32) -> Vec<(FileId, u32)> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let of = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let stat = statx(CWD, entry.path(), AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
        Some((FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino }, number))
    };
    open.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_has_a_file_open_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(directory.path().join("ram")).unwrap();
        std::fs::remove_file(directory.path().join("ram")).unwrap();
        let of_file = file.metadata().unwrap();
        let owners = of(directory.path(), of_file.dev()).remove(&of_file.ino()).unwrap();
        let [owner] = &owners[..] else { panic!("{owners:?}") };
        assert_eq!(owner.pid, std::process::id() as i32);
        assert!(owner.lives() && !owner.name.is_empty());
        let id = kmem::memfd::identity(&file).unwrap();
        let number = descriptors(owner.pid).into_iter().find(|&(other, _)| other == id).unwrap().1;
        assert_eq!(number, std::os::fd::AsRawFd::as_raw_fd(&file) as u32);
        drop(file);
        assert_eq!(of(directory.path(), of_file.dev()).get(&of_file.ino()), None);
    }
}
