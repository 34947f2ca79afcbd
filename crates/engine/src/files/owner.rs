//! Which process a file belongs to: the first that has it open.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that has a file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) name: String,
}

impl Owner {
    /// Whether the process lives.
    pub(super) fn lives(&self) -> bool {
        Path::new(&format!("/proc/{}", self.pid)).exists()
    }
}

/// The owners of the files of the mount at `path`, by inode number.
pub(super) fn of(path: &Path, device: u64) -> HashMap<u64, Owner> {
    let mut owners = HashMap::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<i32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for fd in open.map(|entry| entry.path()) {
            // By its name first: to ask a file of another file system may take long.
            let here = std::fs::read_link(&fd).is_ok_and(|name| name.starts_with(path));
            let Some(file) = here.then(|| std::fs::metadata(&fd).ok()).flatten() else { continue };
            if file.dev() == device && !owners.contains_key(&file.ino()) {
                let process = std::fs::metadata(format!("/proc/{pid}"));
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let uid = process.map_or(0, |process| process.uid());
                owners.insert(file.ino(), Owner { pid, uid, name: name.trim_end().into() });
            }
        }
    }
    owners
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
        let owner = of(directory.path(), of_file.dev()).remove(&of_file.ino()).unwrap();
        assert_eq!(owner.pid, std::process::id() as i32);
        assert!(owner.lives() && !owner.name.is_empty());
        drop(file);
        assert_eq!(of(directory.path(), of_file.dev()).get(&of_file.ino()), None);
    }
}
