//! The daemon where the module alone merges: there can be no agents before Linux 6.7. No guest is
//! needed, so `make test-pageonefs` runs this on Debian's 6.1 and 6.12.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, pattern, program, skipped};
use serde_json::Value;

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

/// What status says of a file of ours.
fn told(daemon: &Daemon, inode: u64) -> Option<Value> {
    let status = daemon.status();
    let clients = status["domains"].as_array()?.iter().flat_map(|domain| domain["clients"].as_array().into_iter());
    let is_it = |client: &&Value| client["name"].as_str().is_some_and(|name| name.contains(&format!("inode {inode})")));
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
