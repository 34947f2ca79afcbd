//! The daemon where the module alone merges: there can be no agents before Linux 6.7. No guest is
//! needed, so `make test-pageonefs` runs this on Debian's 6.1 and 6.12.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, eventually, pattern, program, skipped};
use kmem::memfd::map_shared;
use serde_json::Value;

use super::both::Mounted;

const PAGES: u64 = 2048;
const PAGE: usize = kmem::PAGE_SIZE;

fn page(seed: u64) -> Vec<u8> {
    (0..PAGE / 8).flat_map(|word| pattern(seed, word).to_ne_bytes()).collect()
}

/// A file of the mount, and which content each of its pages has.
struct Held {
    file: File,
    seeds: Vec<u64>,
}

impl Held {
    fn new(mount: &Path, name: &str) -> Self {
        let path = mount.join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let mut held = Self { file, seeds: vec![0; PAGES as usize] };
        (0..PAGES).for_each(|at| held.write(at, at % 300));
        held
    }

    fn write(&mut self, at: u64, seed: u64) {
        self.file.write_all_at(&page(seed), at * PAGE as u64).unwrap();
        self.seeds[at as usize] = seed;
    }

    /// How many bytes are wrong.
    fn wrong(&self) -> usize {
        let mut bytes = vec![0; PAGE];
        let wrong = |(at, &seed): (usize, &u64)| {
            self.file.read_exact_at(&mut bytes, (at * PAGE) as u64).unwrap();
            bytes.iter().zip(page(seed)).filter(|(is, should)| **is != *should).count()
        };
        self.seeds.iter().enumerate().map(wrong).sum()
    }
}

/// Pages that are merged now, by the kernel.
fn merged(mount: &Path) -> u64 {
    kmem::pageonefs::Mount::open(mount).unwrap().stats().unwrap().merged_pages
}

fn wait_merged(mount: &Path) -> u64 {
    let wanted = 2 * PAGES - 100;
    eventually("the files are merged", Duration::from_secs(60), || Some(merged(mount)).filter(|&pages| pages > wanted))
}

fn doctor(daemon: &Daemon) -> Vec<Value> {
    let output = daemon.pageone(&["doctor", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["host"].as_array().unwrap().clone()
}

#[test]
fn files_are_merged_also_where_there_can_be_no_agents() {
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        return skipped("pageonefs is not mounted: `make test-pageonefs` boots guests with it");
    };
    let mut daemon = Daemon::with(&["--merge-period", "0.5"]);
    let mut files = ["one", "two"].map(|name| Held::new(&mount.path, name));
    let before = wait_merged(&mount.path);
    let wrong = |files: &[Held; 2]| files.iter().map(Held::wrong).sum::<usize>();
    let mut sum = wrong(&files);
    // Written while it merges, and while no daemon is there.
    for round in 0..4 {
        for at in (round..PAGES).step_by(5) {
            files[(at % 2) as usize].write(at, 1000 + at % 70);
        }
        sum += wrong(&files);
        if round == 2 {
            daemon.kill();
        }
    }
    daemon.restart();
    let after = wait_merged(&mount.path);
    sum += wrong(&files);
    let release = kmem::procfs::kernel_release().2;
    println!("Linux {release}: {before} pages merged, then {after} of {}; {sum} wrong bytes", 2 * PAGES);
    assert_eq!(sum, 0);
    let domains = daemon.status()["domains"].as_array().unwrap().len();
    assert!(domains > 0, "status has the mount");
    says_what_is_possible(&daemon);
}

/// A file as long as any user can make one, with a page in each of so many places.
fn claim(mount: &Path, name: &str, len: u64, places: impl Iterator<Item = u64>) -> File {
    let path = mount.join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(len).unwrap();
    places.for_each(|at| file.write_all_at(b"x", at).unwrap());
    file
}

/// `VmRSS` is behind by up to 64 pages of each thread before Linux 6.2.
fn resident_kib(pid: i32) -> u64 {
    kmem::procfs::smaps_rollup(Some(pid)).unwrap().rss
}

/// Sets it when it goes, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Has the kernel's setting as it was when it goes.
struct Overcommit(String);

impl Overcommit {
    fn set(value: &str) -> Self {
        let before = std::fs::read_to_string(OVERCOMMIT).unwrap();
        std::fs::write(OVERCOMMIT, value).unwrap();
        Self(before)
    }
}

impl Drop for Overcommit {
    fn drop(&mut self) {
        let _ = std::fs::write(OVERCOMMIT, self.0.trim());
    }
}

const OVERCOMMIT: &str = "/proc/sys/vm/overcommit_memory";

const PAIRS: usize = 4;

/// How often a file was scanned.
fn scans(daemon: &Daemon, file: &File) -> u64 {
    let inode = file.metadata().unwrap().ino();
    eventually("the file is told", Duration::from_secs(30), || told(daemon, inode)?["full_scans"].as_u64())
}

#[test]
fn a_file_of_any_length_costs_neither_the_others_nor_the_daemon() {
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        return skipped("pageonefs is not mounted: `make test-pageonefs` boots guests with it");
    };
    // Otherwise no such file can be made.
    let _always = Overcommit::set("1");
    let mut daemon = Daemon::with(&["--merge-period", "0.5"]);
    let pair = || ["one", "two"].map(|name| Held::new(&mount.path, name));
    // How long some pairs take, and after how many scans each is merged.
    let time = || {
        let mut sum = (0.0, Vec::new());
        for _ in 0..PAIRS {
            let files = pair();
            let begin = Instant::now();
            wait_merged(&mount.path);
            sum.0 += begin.elapsed().as_secs_f64();
            sum.1.push(scans(&daemon, &files[0].file));
        }
        sum
    };
    time();
    let alone = time();
    let resident = resident_kib(daemon.pid());
    let scattered = (0..200).map(|at| at << 31);
    let claims = [
        claim(&mount.path, "16 TiB", 1 << 44, scattered),
        claim(&mount.path, "2^32 pages and one", ((1 << 32) + 1) << 12, [0, 1 << 44].into_iter()),
        claim(&mount.path, "2^52 bytes", 1 << 52, [1 << 40, (1 << 52) - 1].into_iter()),
    ];
    let beside = time();
    let ratio = beside.0 / alone.0;
    println!("files merge in {ratio:.2} of the time beside files of 2^44 to 2^52 bytes: {beside:?}, alone {alone:?}");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let toggled = claim(&mount.path, "any length", 0, std::iter::empty());
            for len in (0..48).cycle().map(|shift| 1 << shift).take_while(|_| !done.load(Relaxed)) {
                toggled.set_len(len).unwrap();
            }
        });
        let over = Over(&done);
        let files = pair();
        wait_merged(&mount.path);
        drop(over);
        assert_eq!(files.iter().map(Held::wrong).sum::<usize>(), 0);
        let grown = resident_kib(daemon.pid()).saturating_sub(resident);
        println!("the daemon has {grown} KiB more than {resident}");
        assert!(grown < 1024, "{grown} KiB");
    });
    let inode = claims[0].metadata().unwrap().ino();
    let why = eventually("what is left out is told", Duration::from_secs(30), || {
        told(&daemon, inode)?["limited"].as_str().map(String::from)
    });
    assert!(why.contains("scattered"), "{why}");
    // A new one finds it so.
    daemon.signal(libc::SIGTERM);
    eventually("the daemon ends", Duration::from_secs(3), || daemon.has_ended().then_some(()));
    daemon.restart();
    let files = pair();
    wait_merged(&mount.path);
    daemon.signal(libc::SIGTERM);
    eventually("the daemon ends", Duration::from_secs(3), || daemon.has_ended().then_some(()));
    drop((claims, files));
}

/// The same pages in few files and in many.
#[test]
fn many_small_files_are_merged() {
    const FILES: u64 = 12_000;
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        return skipped("pageonefs is not mounted: `make test-pageonefs` boots guests with it");
    };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let directory = mount.path.join("many");
    let time = |files: u64| {
        std::fs::create_dir(&directory).unwrap();
        let pages =
            |file: u64| (file..FILES).step_by(files as usize).flat_map(|at| page(at % 500)).collect::<Vec<u8>>();
        // It finds all of them at once.
        daemon.signal(libc::SIGSTOP);
        (0..files).for_each(|file| std::fs::write(directory.join(file.to_string()), pages(file)).unwrap());
        let last = File::open(directory.join((files - 1).to_string())).unwrap();
        let begin = Instant::now();
        daemon.signal(libc::SIGCONT);
        eventually("they are merged", Duration::from_secs(30), || (merged(&mount.path) == FILES).then_some(()));
        let elapsed = begin.elapsed().as_secs_f64();
        let time = (elapsed, scans(&daemon, &last));
        std::fs::remove_dir_all(&directory).unwrap();
        drop(last);
        eventually("they are gone", Duration::from_secs(30), || (merged(&mount.path) == 0).then_some(()));
        time
    };
    let (few, many) = (time(100), time(FILES));
    let ratio = many.0 / few.0;
    println!("{FILES} pages merge in {ratio:.2} of the time in as many files: {many:?}, in 100 {few:?}");
}

#[test]
fn files_without_pages_are_told_to_nobody_and_merge_once_they_have_some() {
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        return skipped("pageonefs is not mounted: `make test-pageonefs` boots guests with it");
    };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let empty: Vec<File> =
        (0..300).map(|at| claim(&mount.path, &format!("empty {at}"), 1 << 30, [].into_iter())).collect();
    let files = ["one", "two"].map(|name| Held::new(&mount.path, name));
    wait_merged(&mount.path);
    let clients = |daemon: &Daemon| {
        let status = daemon.status();
        let domains = status["domains"].as_array().unwrap();
        domains.iter().map(|domain| domain["clients"].as_array().map_or(0, Vec::len)).sum::<usize>()
    };
    assert_eq!(clients(&daemon), 2);
    empty[..2].iter().for_each(|file| file.write_all_at(&page(1), 0).unwrap());
    let wanted = 2 * PAGES + 2 - 100;
    eventually("their pages are merged, too", Duration::from_secs(60), || {
        (clients(&daemon) == 4 && merged(&mount.path) > wanted).then_some(())
    });
    // They have none any more.
    empty[..2].iter().for_each(|file| file.set_len(0).unwrap());
    eventually("they are forgotten", Duration::from_secs(60), || (clients(&daemon) == 2).then_some(()));
    drop(files);
}

/// How long it is done that the mount is full: `FULL` seconds, 10 if it is not set.
fn full_time() -> Duration {
    Duration::from_secs(std::env::var("FULL").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(10))
}

/// A page that cannot be had ends this program: SIGBUS.
#[test]
fn a_file_as_long_as_its_mount_is_read_and_written_whatever_merges() {
    const PAGES: usize = 64 << 8;
    if !kmem::pageonefs::is_loaded() {
        return skipped("pageonefs is not loaded: `make test-pageonefs` boots guests with it");
    }
    let mounted = Mounted::with("size=64M");
    let _daemon = Daemon::with(&["--merge-period", "0.5"]);
    let path = mounted.path().join("ram");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len((PAGES * PAGE) as u64).unwrap();
    let map = map_shared(&file, PAGES * PAGE).unwrap();
    let contents: Vec<[u8; PAGE]> = (0..70).map(|at| page(1000 + at).try_into().unwrap()).collect();
    (0..PAGES).for_each(|at| map.write_page(at, &contents[at % 70]));
    let end = Instant::now() + full_time();
    let guest = |of: usize| {
        let mut held: Vec<usize> = (0..PAGES).map(|at| at % 70).collect();
        let (mut random, mut counts) = (of as u64, [0u64; 3]);
        while Instant::now() < end {
            for turn in 0..64usize {
                // Each thread has its own pages, all over the file.
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (random >> 33) as usize % PAGES / 2 * 2 + of;
                if turn % 4 == 0 {
                    held[at] = (held[at] + turn + 1) % 70;
                    map.write_page(at, &contents[held[at]]);
                    counts[0] += 1;
                }
                counts[1] += 1;
                counts[2] += u64::from(!map.page_equals(at, &contents[held[at]]));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        counts
    };
    let mut thief = 0u64;
    let (one, two) = std::thread::scope(|scope| {
        let threads = [0, 1].map(|of| scope.spawn(move || guest(of)));
        let other = File::create(mounted.path().join("other")).unwrap();
        while Instant::now() < end {
            let refused = other.write_all_at(&contents[0], 0).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
            thief += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        let [one, two] = threads.map(|thread| thread.join().unwrap());
        (one, two)
    });
    let stats = mounted.stats();
    let [writes, reads, wrong] = [0, 1, 2].map(|at| one[at] + two[at]);
    println!(
        "a full mount, {:?}: {writes} writes, {reads} reads, {wrong} wrong, 0 SIGBUS; {} merges, {} copies; \
         {thief} pages of another refused",
        full_time(),
        stats.merges,
        stats.copies
    );
    assert!(wrong == 0 && stats.merges > 0 && stats.copies > 0, "{stats:?}");
    drop(map);
    drop(file);
}

/// What status says of a file of ours.
fn told(daemon: &Daemon, inode: u64) -> Option<Value> {
    let status = daemon.status();
    let clients = status["domains"].as_array()?.iter().flat_map(|domain| domain["clients"].as_array().into_iter());
    let is_it = |client: &&Value| {
        client["name"].as_str().is_some_and(|name| name.trim_end_matches(')').ends_with(&format!("inode {inode}")))
    };
    clients.flatten().find(is_it).cloned()
}

#[test]
fn the_daemon_hears_at_once_of_files_that_come_go_and_become_plain() {
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        return skipped("pageonefs is not mounted: `make test-pageonefs` boots guests with it");
    };
    // No second round comes while this runs.
    let daemon = Daemon::with(&["--merge-period", "3600"]);
    eventually("the mount is found", Duration::from_secs(30), || {
        (!daemon.status()["domains"].as_array()?.is_empty()).then_some(())
    });
    let held = Held::new(&mount.path, "news");
    let inode = held.file.metadata().unwrap().ino();
    eventually("the file is told, and whose it is", Duration::from_secs(30), || {
        (told(&daemon, inode)?["pid"] == std::process::id()).then_some(())
    });
    let control = kmem::pageonefs::Mount::open(&mount.path).unwrap();
    let id = control.files().unwrap().into_iter().find(|file| file.inode == inode).unwrap().id;
    control.make_plain(id).unwrap();
    let why = eventually("that it is plain", Duration::from_secs(30), || {
        told(&daemon, inode)?["refused"].as_str().map(String::from)
    });
    assert!(why.contains("made plain"), "{why}");
    drop(held);
    eventually("that it is gone", Duration::from_secs(30), || told(&daemon, inode).is_none().then_some(()));
}

/// `status` and `doctor` say it, and a program with the agent is told, and runs.
fn says_what_is_possible(daemon: &Daemon) {
    let status = daemon.status();
    let Some(release) = kmem::pagemap::too_old() else {
        return assert!(status["no_agents"].is_null(), "{status}");
    };
    let why = status["no_agents"].as_str().unwrap();
    assert!(
        why.contains(&format!("Linux {release} is too old")) && why.contains("files of pageonefs are merged"),
        "{why}"
    );
    let text = daemon.pageone(&["status"]).output().unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains(&format!("no agents: {why}")), "{text}");
    let checks = doctor(daemon);
    let verdict = |name: &str| checks.iter().find(|check| check["check"] == name).unwrap().clone();
    let kernel = verdict("kernel");
    assert_eq!(kernel["verdict"], "note", "{kernel}");
    assert!(kernel["found"].as_str().unwrap().contains("the module's back end is possible"), "{kernel}");
    println!("{kernel}");
    let blocks: Vec<&Value> = checks.iter().filter(|check| check["verdict"] == "blocks").collect();
    assert!(blocks.is_empty(), "{blocks:?}");
    // By the command, and by the library alone.
    let output = daemon.run(&[]).args(["echo", "it ran"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.stdout == b"it ran\n" && said.contains("is too old; 6.7 or later is needed"), "{said}");
    let log = daemon.dir.path().join("client");
    let mut command = Command::new(program("pageone-test-client"));
    command.args(["hold", "1024", "1"]).stderr(File::create(&log).unwrap());
    command.env("LD_PRELOAD", program("libpageone_agent.so")).env("PAGEONE_LOG", "1");
    command.env(wire::ENV_SOCKET, daemon.dir.path().join("agent.sock"));
    let mut client = Client::spawn(command);
    client.expect("ready");
    eventually("the agent says why nothing is merged", Duration::from_secs(30), || {
        std::fs::read_to_string(&log).unwrap().contains("Linux 6.7").then_some(())
    });
    client.go();
    assert!(daemon.client(client.pid()).is_none(), "it is no client");
}
