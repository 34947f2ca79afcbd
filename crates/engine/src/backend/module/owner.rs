//! Which process a file belongs to: the first that has it open.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use guests::Names;
use kmem::memfd::FileId;
use kmem::pidfd::PidFd;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

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

/// The processes that have files of a mount open, by inode number, in the order of their numbers.
pub(super) fn of(path: &Path, device: u64) -> HashMap<u64, Vec<Arc<Owner>>> {
    let mut owners: HashMap<u64, Vec<Arc<Owner>>> = HashMap::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<i32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids {
        let Ok(process) = PidFd::open(pid) else { continue };
        let mut inodes = BTreeSet::new();
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for fd in open.map(|entry| entry.path()) {
            // By its name first: to ask a file of another file system may take long.
            let here = std::fs::read_link(&fd).is_ok_and(|name| name.starts_with(path));
            let Some(file) = here.then(|| std::fs::metadata(&fd).ok()).flatten() else { continue };
            if file.dev() == device {
                inodes.insert(file.ino());
            }
        }
        if inodes.is_empty() {
            continue;
        }
        let uid = std::fs::metadata(format!("/proc/{pid}")).map_or(0, |process| process.uid());
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
        let owner = Arc::new(Owner { pid, uid, name, process, own: OnceLock::new() });
        // All that was asked by its number was asked of this process.
        if owner.lives() {
            inodes.into_iter().for_each(|inode| owners.entry(inode).or_default().push(owner.clone()));
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

    impl Owner {
        /// This process.
        pub(in super::super) fn this() -> Arc<Self> {
            let pid = std::process::id() as i32;
            let process = PidFd::open(pid).unwrap();
            Arc::new(Self { pid, uid: 0, name: String::new(), process, own: OnceLock::new() })
        }
    }

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
        assert!(!of(directory.path(), of_file.dev()).contains_key(&of_file.ino()));
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
