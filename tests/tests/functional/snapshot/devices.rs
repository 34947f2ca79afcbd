//! Devices that fail, file systems that are full, and hosts whose power fails, at random moments of
//! commands on snapshots.
//!
//! The pool lies on one device ([`Medium`]) and the guest's disks on another, each with one of
//! three file systems. The guest is the boot sector of [`crashes`](super::crashes), which says what
//! it has written; that is noted elsewhere. What was told, and what a command that ended well has
//! made, is there later.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::time::Instant;

use super::crashes::{Bounds, Kind, ROUNDS_OF_A_PLACE, Writer, end_all_in, look_at, rounds, runs, words_of};
use super::goes_on::{Random, end_of};
use super::medium::{Fault, Medium, Power};
use super::*;

const FILE_SYSTEMS: [&str; 3] = ["xfs", "ext4", "btrfs"];

/// More requests than a save makes to the pool's device.
const POOL_WRITES: u64 = 60;

/// A host with a guest.
struct Host {
    place: Place,
    pool: Medium,
    disks: Medium,
    power: Power,
    writer: Writer,
    random: Random,
    /// Of the snapshots that may be there.
    known: BTreeMap<String, Bounds>,
    /// Those that must be there.
    stored: BTreeSet<String>,
    /// How long a save takes.
    takes: Duration,
}

/// A command that runs.
struct Running {
    op: &'static str,
    new: String,
    bounds: Bounds,
    child: Child,
    ended_well: bool,
}

impl Host {
    /// `Err`: there can be none here, and why.
    fn new(number: usize, random: &mut Random) -> Result<Self, String> {
        let place = Place::empty();
        let fs = |number: usize| FILE_SYSTEMS[number % FILE_SYSTEMS.len()];
        let power = Power::default();
        let pool = Medium::new(&place, "pool", fs(number / 3 + number + 1), &power, random.other())?;
        let disks = Medium::new(&place, "disks", fs(number), &power, random.other())?;
        place.ok(&["pool", "create", "store", "--capacity", pool.at.join("pool").to_str().unwrap()]);
        let mut all = vec![disks.at.join("disk.qcow2")];
        e2e::qmp::make_disk(&all[0]);
        // Raw ones are copied by their blocks.
        if disks.fs != "ext4" {
            all.push(disks.at.join("disk.img"));
            File::create(&all[1]).unwrap().set_len(64 << 20).unwrap();
        }
        // The disks are there after a failure of power.
        rustix::fs::syncfs(File::open(&disks.at).unwrap()).unwrap();
        let words = Kind::BootSector.words(&place).ok_or("no guest")?;
        let writer = Writer::boot(&place, words, all, 0);
        let (from, begin) = (writer.told(), Instant::now());
        place.save(writer.machine.pid(), "first");
        let (takes, first) = (begin.elapsed(), String::from("first"));
        let known = BTreeMap::from([(first.clone(), (from, writer.told()))]);
        let (stored, random) = (BTreeSet::from([first]), random.other());
        Ok(Self { place, pool, disks, power, writer, random, known, stored, takes })
    }

    /// A moment within the time that a command takes, and a little longer.
    fn moment(&mut self) -> Duration {
        Duration::from_micros(self.random.below(self.takes.as_micros() as u64 * 5 / 4))
    }

    fn begin(&mut self, round: u64) -> Running {
        let all: Vec<&String> = self.stored.iter().collect();
        let some = all[self.random.below(all.len() as u64) as usize].clone();
        let ops = ["save", "save", "save", "save", "import", "prune", "repack", "compress", "checkpoint", "run"];
        let op = ops[self.random.below(ops.len() as u64) as usize];
        let pid = self.writer.machine.pid();
        // Again what has failed, too.
        let failed = self.known.keys().find(|name| !self.stored.contains(*name) && self.random.below(2) == 0).cloned();
        let new = failed.filter(|_| op != "checkpoint").unwrap_or_else(|| format!("s{round}"));
        let from = self.writer.told();
        println!("round {round}: {op} ({some}), {from} told");
        let words = words_of(op, &self.place, pid, (&some, &new), &self.disks.at.join(format!("imported-{round}")));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let child = self.place.command(&words).stdout(Stdio::null()).process_group(0).spawn().unwrap();
        let bounds = if op == "import" { self.known[&some] } else { (from, from) };
        Running { op, new, bounds, child, ended_well: false }
    }

    /// After a command's end, when all is well: what must be there is, whole.
    fn look(&mut self, running: &Running) {
        let Running { op, new, bounds: (from, to), .. } = running;
        let (is_made, to) = (matches!(*op, "save" | "import"), if *op == "save" { self.writer.told() } else { *to });
        if is_made && !self.stored.contains(new) {
            self.known.insert(new.clone(), (*from, to));
        }
        if is_made && running.ended_well {
            self.stored.insert(new.clone());
        }
        let names: BTreeSet<String> = self.place.names().into_iter().collect();
        assert!(names.iter().all(|name| self.known.contains_key(name)), "{names:?}");
        let lost: Vec<_> = self.stored.difference(&names).collect();
        assert!(!names.is_empty() && (lost.is_empty() || *op == "prune"), "{lost:?} are lost: {names:?}");
        self.place.ok(&["pool", "check", "store"]);
        for name in &names {
            self.place.ok(&["snapshot", "verify", "store", name, "--read-only"]);
        }
        self.stored = names;
    }

    /// Lets a clone of a snapshot go on, mostly of this one.
    fn try_some(&mut self, new: &str) {
        let all: Vec<&String> = self.stored.iter().collect();
        let new = all.iter().find(|name| **name == new && self.random.below(4) > 0);
        let some: &String = new.unwrap_or(&all[self.random.below(all.len() as u64) as usize]);
        look_at(&self.place, some, self.known[some]);
        let before = self.writer.told();
        eventually("the guest writes on", Duration::from_secs(60), || (self.writer.told() > before).then_some(()));
    }

    /// The power fails while a command runs.
    fn lose_power(&mut self, round: u64) {
        let mut running = self.begin(round);
        let begin = Instant::now();
        // At a moment, where only the command writes, or as soon as it has ended.
        let (when, mut limit) = (self.random.below(3), self.moment());
        if when > 0 {
            limit = self.takes * 10;
        }
        if when == 1 {
            self.pool.cut_after(self.random.below(POOL_WRITES));
        }
        while !self.power.is_cut() && begin.elapsed() < limit {
            if when == 2 && running.child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.power.cut();
        while end_all_in(self.place.dir.path()) + end_all_in(self.place.daemon.dir.path()) > 0 {}
        running.ended_well = running.child.wait().unwrap().success();
        self.writer.end();
        self.place.daemon.kill();
        // What the directory in /run has is gone.
        let _ = std::fs::remove_dir_all(self.place.daemon.dir.path().join("stopped"));
        let media = [&self.pool, &self.disks];
        media.iter().for_each(|medium| medium.unmount());
        let lost = media.map(Medium::lose);
        self.power.is_back();
        media.iter().for_each(|medium| medium.mount().unwrap());
        println!(
            "  {} blocks of the pool and {} of the disks were lost, ended {}",
            lost[0], lost[1], running.ended_well
        );
        self.place.daemon.restart();
        self.look(&running);
        self.writer.start_again(&self.place);
        self.try_some(&running.new);
    }

    /// A device fails while a command runs, or its file system is full.
    fn fail(&mut self, round: u64) {
        let mut running = self.begin(round);
        std::thread::sleep(self.moment());
        let faults = [Some(Fault::Writes), Some(Fault::Reads), Some(Fault::All), Some(Fault::Some), None];
        let fault = faults[self.random.below(faults.len() as u64) as usize];
        let is_pool = self.random.below(2) == 0;
        let failing = if is_pool { &self.pool } else { &self.disks };
        let filler = failing.at.join("filler");
        println!("  {fault:?} of the {}'s {}", if is_pool { "pool" } else { "guest" }, failing.fs);
        match fault {
            Some(fault) => failing.fail(fault),
            None => fill(&filler),
        }
        if is_pool {
            let before = self.writer.told();
            eventually("the guest writes on", Duration::from_secs(60), || (self.writer.told() > before).then_some(()));
        }
        std::thread::sleep(Duration::from_micros(self.random.below(800_000)));
        failing.be_well();
        let _ = std::fs::remove_file(&filler);
        if running.op == "run" {
            let _ = running.child.kill();
        }
        running.ended_well = end_of(&mut running.child).success();
        end_all_in(&self.place.path("run"));
        // QEMU opens its images anew in `cont`, and may abort if they cannot be read just then.
        let has_aborted = !is_pool && self.writer.machine.child.try_wait().unwrap().is_some();
        if has_aborted {
            println!("  its QEMU has aborted");
        } else {
            runs(&self.writer);
        }
        // After a failed flush QEMU has all later ones fail.
        let (is_writable, was_told) = (failing.is_writable(), self.writer.told_an_error());
        if !is_pool && (!is_writable || was_told || has_aborted) {
            self.writer.end();
        }
        if !is_writable {
            failing.unmount();
            failing.mount().unwrap();
        }
        println!("  ended {}, mounted again {}, guest was told {was_told}", running.ended_well, !is_writable);
        self.look(&running);
        if self.writer.machine.child.try_wait().unwrap().is_some() {
            self.writer.start_again(&self.place);
        }
        self.try_some(&running.new);
    }
}

fn names_in(directory: &Path) -> Vec<String> {
    let all = std::fs::read_dir(directory).unwrap().flatten();
    all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Leaves a file system no room.
fn fill(filler: &Path) {
    let free = rustix::fs::statvfs(filler.parent().unwrap()).unwrap();
    let mut file = File::create(filler).unwrap();
    let most = (free.f_bavail * free.f_frsize).saturating_sub(8 << 20);
    let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, most);
    let _ = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0));
    for len in [1 << 16, 4096] {
        while file.write_all(&vec![1; len]).is_ok() {}
    }
}

fn rounds_of(what: &str, round: fn(&mut Host, u64)) {
    if !can_run() {
        return;
    }
    let (mut random, rounds) = (Random::new(), rounds());
    for number in 0..rounds.div_ceil(ROUNDS_OF_A_PLACE) {
        let mut host = match Host::new(number as usize, &mut random) {
            Ok(host) => host,
            Err(why) => return skipped(&format!("no file system on a device that fails: {why}")),
        };
        println!("the pool on {}, the disks on {}", host.pool.fs, host.disks.fs);
        let done = number * ROUNDS_OF_A_PLACE;
        (done..rounds.min(done + ROUNDS_OF_A_PLACE)).for_each(|number| round(&mut host, number));
        for name in &host.stored {
            look_at(&host.place, name, host.known[name]);
        }
        // What was cut short can be done again, and what it has left is no more then.
        let again = host.known.keys().find(|name| !host.stored.contains(*name));
        host.place.save(host.writer.machine.pid(), again.map_or("last", String::as_str));
        let left = names_in(&host.disks.at).into_iter().filter(|name| name.starts_with('.'));
        assert_eq!(left.clone().count(), 1, "{:?}", left.collect::<Vec<_>>());
        host.writer.restart(&host.place);
        println!("{what} {} rounds, 0 lost, 0 mixed", rounds.min(done + ROUNDS_OF_A_PLACE));
    }
}

#[test]
fn nothing_told_is_lost_and_each_snapshot_is_of_one_moment_when_the_power_fails() {
    rounds_of("POWER", Host::lose_power);
}

#[test]
fn nothing_told_is_lost_and_each_snapshot_is_of_one_moment_when_devices_fail() {
    rounds_of("DEVICES", Host::fail);
}
