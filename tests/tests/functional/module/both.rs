//! Both back ends in one domain: clients with an agent, and files of a mount with the name of their
//! domain, have the same pages of memory. No guest is needed, so `make test-pageonefs` runs this.
//! On Linux 6.1 there are no agents, and nothing to test.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, pattern, skipped};
use kmem::PAGE_SIZE;
use kmem::memfd::{SharedMap, map_shared};
use kmem::pageonefs::{Mount, Stats, is_loaded};

/// What the path of a store's mappings has in it.
pub(super) const STORE: &str = "memfd:pageone:";

/// Pages that two clients have, one client, and none.
const OF_TWO: usize = 1024;
const OF_ONE: usize = 512;
const OWN: usize = 256;
const ALL: usize = OF_TWO + OF_ONE + OWN;

/// A mount of this domain, in a directory of its own.
pub(super) struct Mounted(tempfile::TempDir);

impl Mounted {
    pub(super) fn new(domain: &str) -> Self {
        Self::with(&format!("domain={domain}"))
    }

    pub(super) fn with(options: &str) -> Self {
        let here = tempfile::tempdir().unwrap();
        let mount = Command::new("mount").args(["-t", "pageonefs", "-o", options, "none"]).arg(here.path()).status();
        assert!(mount.unwrap().success());
        Self(here)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn stats(&self) -> Stats {
        Mount::open(self.0.path()).unwrap().stats().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0.path()).status();
        assert!(std::thread::panicking() || unmounted.is_ok_and(|status| status.success()));
    }
}

/// A page as the client has it that holds contents from this base on.
fn page(base: u64, at: usize) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    let words = page.as_chunks_mut::<8>().0.iter_mut().enumerate();
    words.for_each(|(word, bytes)| *bytes = pattern((base << 32) + 1 + at as u64, word).to_ne_bytes());
    page
}

/// A file of the mount, mapped.
struct Held {
    map: SharedMap,
    pages: Vec<[u8; PAGE_SIZE]>,
}

impl Held {
    /// Its pages are those of two clients, those of one, and its own.
    fn new(mounted: &Mounted, own: u64) -> Self {
        let of = |base, pages| (0..pages).map(move |at| page(base, at));
        Self::with(mounted, of(1, OF_TWO).chain(of(2, OF_ONE)).chain(of(own, OWN)).collect())
    }

    fn with(mounted: &Mounted, pages: Vec<[u8; PAGE_SIZE]>) -> Self {
        let path = mounted.0.path().join("guest");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let len = pages.len() * PAGE_SIZE;
        file.set_len(len as u64).unwrap();
        let held = Self { map: map_shared(&file, len).unwrap(), pages };
        (0..held.pages.len()).for_each(|at| held.map.write_page(at, &held.pages[at]));
        held
    }

    fn write(&mut self, at: usize, content: u64) {
        self.pages[at] = page(content, at);
        self.map.write_page(at, &self.pages[at]);
    }

    /// How many pages are wrong.
    fn wrong(&self) -> usize {
        self.pages.iter().enumerate().filter(|&(at, page)| !self.map.page_equals(at, page)).count()
    }
}

/// The pages of memory that are mapped in a part of a process's address space.
fn memory(pid: u32, start: usize, len: usize) -> Vec<u64> {
    let mut entries = vec![0; len / PAGE_SIZE * 8];
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    pagemap.read_exact_at(&mut entries, (start / PAGE_SIZE * 8) as u64).unwrap();
    let entries = entries.as_chunks::<8>().0.iter().map(|entry| u64::from_ne_bytes(*entry));
    entries.filter(|entry| entry >> 63 == 1).map(|entry| entry & ((1 << 55) - 1)).collect()
}

/// The pages of memory of a process's mappings whose path has this in it.
pub(super) fn memory_of(pid: i32, path: &str) -> HashSet<u64> {
    let mut found = HashSet::new();
    kmem::procfs::for_each_map(Some(pid), |line| {
        if line.path.contains(path) {
            found.extend(memory(pid as u32, line.range.start, line.range.len));
        }
    })
    .unwrap();
    found
}

/// How many of these pages of the file are the very pages that a client has of its store.
fn shared(client: &Client, held: &Held, pages: Range<usize>) -> usize {
    assert_eq!(held.wrong(), 0);
    let of_client = memory_of(client.pid(), STORE);
    let start = held.map.range().start + pages.start * PAGE_SIZE;
    let of_file = memory(std::process::id(), start, pages.len() * PAGE_SIZE);
    of_file.iter().filter(|page| of_client.contains(page)).count()
}

/// A client whose contents are each in it once.
fn client(daemon: &Daemon, pages: usize, base: u64) -> Client {
    let mut client = daemon.scenario(&["hold", &pages.to_string(), "1", &base.to_string()]);
    client.expect("ready");
    client
}

/// Whether the test can run here; else it says why not.
fn can_run() -> bool {
    if !is_loaded() {
        skipped("pageonefs is not loaded: `make test-pageonefs` boots guests with it");
        return false;
    }
    let too_old = kmem::pagemap::too_old();
    if let Some(release) = &too_old {
        println!("there are no agents on Linux {release}");
    }
    too_old.is_none()
}

/// Waits until the file's pages are those of the first two clients, and of the third.
fn join(clients: &mut [Client; 3], held: &Held, what: &str) {
    let (two, one) = eventually(what, Duration::from_secs(20), || {
        clients.iter_mut().for_each(Client::go);
        let found = (shared(&clients[0], held, 0..OF_TWO), shared(&clients[2], held, OF_TWO..OF_TWO + OF_ONE));
        (found.0 + 50 > OF_TWO && found.1 + 50 > OF_ONE).then_some(found)
    });
    println!("{what}: {two} of {OF_TWO} pages are two clients', {one} of {OF_ONE} one client's");
}

#[test]
fn clients_and_files_of_one_domain_have_the_same_memory() {
    if !can_run() {
        return;
    }
    let mounted = Mounted::new("uid-0");
    let mut daemon = Daemon::with(&["--merge-period", "0.5"]);
    // The file's contents are known before there is a store, and after.
    let mut first = Held::new(&mounted, 3);
    let wait = Duration::from_secs(20);
    let mut clients = [client(&daemon, OF_TWO, 1), client(&daemon, OF_TWO, 1), client(&daemon, OF_ONE, 2)];
    join(&mut clients, &first, "a file that was there first");
    let second = Held::new(&mounted, 4);
    join(&mut clients, &second, "a file that came later");
    // A prediction that failed may have made frames of the own contents, too.
    let most = (OF_TWO + OF_ONE + 2 * OWN + 100) as u64;
    let frames = eventually("the files' old frames go", Duration::from_secs(10), || {
        Some(mounted.stats().frames).filter(|&frames| frames < most)
    });
    println!("{frames} frames");
    // A client's contents that nobody else has, and then a file.
    let mut alone = client(&daemon, OF_ONE, 6);
    eventually("its contents are known", wait, || {
        let unshared = daemon.client(alone.pid())?["pages_unshared"].as_u64()?;
        (unshared + 50 > OF_ONE as u64).then_some(())
    });
    let third = Held::with(&mounted, (0..OF_ONE).map(|at| page(6, at)).collect());
    let found = eventually("a file that comes after a client", wait, || {
        alone.go();
        Some(shared(&alone, &third, 0..OF_ONE)).filter(|found| found + 50 > OF_ONE)
    });
    println!("{found} of {OF_ONE} pages are those of a client that was alone");
    drop(third);
    alone.kill();
    // Each is written, and the others do not see it.
    (0..ALL).step_by(7).for_each(|at| first.write(at, 5));
    let mut sum = first.wrong() + second.wrong();
    clients[1].tell("rewrite");
    clients[1].expect("ok");
    sum += first.wrong() + second.wrong();
    clients[0].go();
    // The store's frames go, and the files keep what they have.
    clients[0].kill();
    clients[1].kill();
    std::thread::sleep(Duration::from_secs(3));
    sum += first.wrong() + second.wrong();
    clients[2].go();
    daemon.kill();
    sum += first.wrong() + second.wrong();
    clients[2].go();
    daemon.restart();
    std::thread::sleep(Duration::from_secs(3));
    sum += first.wrong() + second.wrong();
    clients[2].go();
    clients[2].kill();
    sum += first.wrong() + second.wrong();
    println!("{sum} wrong pages");
    assert_eq!(sum, 0);
}

/// A control group of version 2 with memory, as the guest's start makes them.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Self {
        let path = Path::new("/sys/fs/cgroup").join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// What `start` starts is in the group, from its beginning.
    fn within<T>(&self, start: impl FnOnce() -> T) -> T {
        let enter = |group: &Path| std::fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        enter(&self.0);
        let started = start();
        enter(Path::new("/sys/fs/cgroup"));
        started
    }

    fn set(&self, name: &str, value: &str) {
        std::fs::write(self.0.join(name), value).unwrap();
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }

    /// A line of a file of several.
    fn count(&self, name: &str, line: &str) -> u64 {
        let text = self.file(name);
        let mut words = text.lines().filter_map(|words| words.split_once(' '));
        words.find(|(word, _)| *word == line).unwrap().1.parse().unwrap()
    }

    /// Pages of files that it is charged for.
    fn pages(&self) -> usize {
        self.count("memory.stat", "shmem") as usize / PAGE_SIZE
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            eventually("the group has no processes", Duration::from_secs(10), || std::fs::remove_dir(&self.0).ok());
        }
    }
}

#[test]
fn what_clients_and_files_share_is_charged_to_clients_and_within_their_limit() {
    if !can_run() {
        return;
    }
    let (of_daemon, of_clients, small) = (Group::new("daemon"), Group::new("clients"), Group::new("small"));
    let mounted = Mounted::new("uid-0");
    let daemon = of_daemon.within(|| Daemon::with(&["--merge-period", "0.5"]));
    let held = Held::new(&mounted, 3);
    let mut clients =
        of_clients.within(|| [client(&daemon, OF_TWO, 1), client(&daemon, OF_TWO, 1), client(&daemon, OF_ONE, 2)]);
    join(&mut clients, &held, "clients of a group");
    let both = OF_TWO + OF_ONE;
    let charged = || (of_clients.pages(), of_daemon.pages());
    println!("{both} pages are shared; clients are charged for {}, the daemon for {}", charged().0, charged().1);
    assert!(charged().0 + both / 20 > both && charged().1 < both / 20, "{:?}", charged());
    // A client whose group has little left makes no frames. It is not killed, and holds nobody up.
    let mut full = small.within(|| client(&daemon, OF_TWO, 6));
    let used: usize = small.file("memory.current").trim().parse().unwrap();
    small.set("memory.max", &(used + (32 << 20)).to_string());
    let files = Held::with(&mounted, (0..OF_TWO).map(|at| page(6, at)).collect());
    let mut others = of_clients.within(|| [client(&daemon, OF_TWO, 8), client(&daemon, OF_TWO, 8)]);
    daemon.wait_merged(others[1].pid(), OF_TWO as u64 - 50);
    let scans = || daemon.client(full.pid()).unwrap()["full_scans"].as_u64().unwrap();
    let before = scans();
    eventually("it is scanned", Duration::from_secs(20), || (scans() > before + 4).then_some(()));
    assert_eq!((shared(&full, &files, 0..OF_TWO), small.count("memory.events", "oom_kill")), (0, 0));
    let status = daemon.status();
    assert!(status["domains"].as_array().unwrap().iter().all(|domain| domain["paused"].is_null()), "{status}");
    small.set("memory.max", "max");
    eventually("there is room", Duration::from_secs(20), || {
        full.go();
        (shared(&full, &files, 0..OF_TWO) + 50 > OF_TWO).then_some(())
    });
    assert!(small.pages() + OF_TWO / 20 > OF_TWO, "{} pages are charged to it", small.pages());
    println!("the daemon is charged for {}", charged().1);
    assert!(charged().1 < both / 20);
    others.iter_mut().chain(&mut clients).chain([&mut full]).for_each(Client::kill);
}
