//! Frames that are in swap.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use e2e::{Daemon, eventually, skipped};

use crate::failures::segments_of;

const PAGES: usize = 4096;
/// How often the kernel is asked to put frames into swap.
const TRIES: u32 = 500;

/// Swap space of this test's own, if the host has none that is free.
struct Swap(Option<PathBuf>);

impl Swap {
    /// `Err`: why there is none.
    fn new(directory: &Path) -> Result<Self, String> {
        if kmem::procfs::meminfo().unwrap().swap_free_kib > 256 << 10 {
            return Ok(Self(None));
        }
        let file = directory.join("swap");
        // A file with holes is no swap space.
        std::fs::write(&file, vec![0; 128 << 20]).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        for program in ["mkswap", "swapon"] {
            let out = Command::new(program).arg(&file).output().map_err(|e| format!("{program}: {e}"))?;
            if !out.status.success() {
                return Err(format!("{program}: {}", String::from_utf8_lossy(&out.stderr).trim()));
            }
        }
        Ok(Self(Some(file)))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let _ = Command::new("swapoff").arg(file).status();
        }
    }
}

/// A memory cgroup: what is charged to it can be put into swap. Its processes have ended when it
/// is dropped.
struct Group(PathBuf);

impl Group {
    /// `Err`: why there is none.
    fn new() -> Result<Self, String> {
        let tops = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.reclaim")];
        for (top, file) in tops {
            let path = Path::new(top).join(format!("pageone-swapped-{}", std::process::id()));
            let is_one = std::fs::create_dir(&path).is_ok();
            let group = Self(path);
            if is_one && group.0.join(file).exists() {
                return Ok(group);
            }
        }
        Err("there is no memory cgroup that could be emptied".into())
    }

    fn take(&self, pid: i32) -> std::io::Result<()> {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }

    /// Puts as much as possible of it into swap.
    fn empty(&self) {
        for (file, value) in
            [("memory.limit_in_bytes", "1M"), ("memory.limit_in_bytes", "-1"), ("memory.reclaim", "256M")]
        {
            let _ = std::fs::write(self.0.join(file), value);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Pages of frames that a process has in memory.
fn frames_in_memory(pid: i32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut is_store = false;
    let mut kib = 0;
    for line in smaps.lines() {
        match line.split_once(' ') {
            Some((word, _)) if !word.ends_with(':') => {
                is_store = line.contains("/memfd:pageone:") && line.split(' ').nth(1) == Some("rw-p");
            }
            Some(("Rss:", rest)) if is_store => {
                kib += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            }
            _ => {}
        }
    }
    kib / 4
}

#[test]
fn a_store_that_no_daemon_takes_back_is_left_by_its_clients_though_it_is_in_swap() {
    if !rustix::process::geteuid().is_root() {
        return skipped("not root: swap space and a memory cgroup are needed");
    }
    let directory = tempfile::tempdir().unwrap();
    let (swap, group) = match (Swap::new(directory.path()), Group::new()) {
        (Ok(swap), Ok(group)) => (swap, group),
        (Err(why), _) | (_, Err(why)) => return skipped(&why),
    };
    let mut daemon = Daemon::start();
    // From now on frames are charged to the group.
    group.take(daemon.pid()).unwrap();
    let [mut client, mut other] = [["hold", "4096", "1", "1"], ["hold", "8192", "2", "1"]].map(|w| daemon.scenario(&w));
    [&mut client, &mut other].into_iter().for_each(|client| client.expect("ready"));
    daemon.wait_merged(client.pid(), PAGES as u64);
    let before = segments_of(client.pid());
    // No other page has any of its contents.
    other.kill();
    daemon.stop();
    std::fs::remove_file(daemon.dir.path().join("segments")).unwrap();
    let is_empty = (0..TRIES).any(|_| {
        group.empty();
        // What is being written cannot go yet.
        std::thread::sleep(Duration::from_millis(20));
        frames_in_memory(client.pid()) < PAGES as u64 / 2
    });
    if !is_empty {
        return skipped("the kernel keeps the frames in memory");
    }
    daemon.restart();
    eventually("the segments of the earlier daemon are gone", Duration::from_secs(60), || {
        let now = segments_of(client.pid());
        now.iter().zip(&before).all(|(now, before)| now.is_disjoint(before)).then_some(())
    });
    client.go();
    drop((daemon, client, swap));
}
