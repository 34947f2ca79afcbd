//! Both back ends in one domain: clients with an agent, and files of a mount with the name of their
//! domain, have the same pages of memory. No guest is needed, so `make test-pageonefs` runs this.
//! On Linux 6.1 there are no agents, and nothing to test.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
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
        let here = tempfile::tempdir().unwrap();
        let options = format!("domain={domain}");
        let mount = Command::new("mount").args(["-t", "pageonefs", "-o", &options, "none"]).arg(here.path()).status();
        assert!(mount.unwrap().success());
        Self(here)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    fn stats(&self) -> Stats {
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

#[test]
fn clients_and_files_of_one_domain_have_the_same_memory() {
    if !is_loaded() {
        return skipped("pageonefs is not loaded: `make test-pageonefs` boots guests with it");
    }
    if let Some(release) = kmem::pagemap::too_old() {
        return println!("there are no agents on Linux {release}");
    }
    let mounted = Mounted::new("uid-0");
    let mut daemon = Daemon::with(&["--merge-period", "0.5"]);
    // The file's contents are known before there is a store, and after.
    let mut first = Held::new(&mounted, 3);
    let wait = Duration::from_secs(20);
    let mut clients = [client(&daemon, OF_TWO, 1), client(&daemon, OF_TWO, 1), client(&daemon, OF_ONE, 2)];
    let join = |clients: &mut [Client; 3], held: &Held, what: &str| {
        let (two, one) = eventually(what, wait, || {
            clients.iter_mut().for_each(Client::go);
            let found = (shared(&clients[0], held, 0..OF_TWO), shared(&clients[2], held, OF_TWO..OF_TWO + OF_ONE));
            (found.0 + 50 > OF_TWO && found.1 + 50 > OF_ONE).then_some(found)
        });
        println!("{what}: {two} of {OF_TWO} pages are two clients', {one} of {OF_ONE} one client's");
    };
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
