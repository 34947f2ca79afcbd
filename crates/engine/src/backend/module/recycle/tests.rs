//! Guests over a real pool and the model of the kernel.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::Duration;

use control::RecyclerState;
use kmem::memfd::SharedMap;
use kmem::pageonefs::Plain;
use proptest::prelude::*;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use serde_json::{Value, json};
use wire::recycle::{Extent, Refusal};
use wire::{PageNo, RegionId, Run};

use super::pool::Pool;
use super::pool::tests::take;
use super::process::{Ground, Punch, Qemu};
use super::sweep::Sweeper;
use crate::backend::module::file::File;
use crate::backend::module::kernel::Kernel;
use crate::backend::module::tests::{Fake, Rounds, World};
use crate::core::ledger::ALL;
use crate::core::ledger::free_pages::tests::{guest_side, pool};
use crate::core::ledger::free_pages::{FreePages, Marks};
use crate::core::recycle::device;
use crate::core::recycle::state::Recycling;
use crate::sync::Mutex;
use crate::world::shared::tests::shared;

/// Where the guest has the first page of its first file, and of its second.
const FRAMES: [u64; 2] = [256, 5000];

/// Files 1 and 2 of the model.
struct OfModel {
    fake: Arc<Fake>,
    files: Vec<Arc<File>>,
    /// Pages that counted as recycled before each punch.
    known: Arc<Mutex<Vec<u64>>>,
    pinned: Arc<AtomicBool>,
    /// How long each punch takes.
    takes: Duration,
}

impl Ground for OfModel {
    fn held(&self) -> Option<Refusal> {
        self.pinned.load(SeqCst).then_some(Refusal::Pinned)
    }

    fn open(&self) -> Result<Punch<'_>, Errno> {
        Ok(Box::new(|file, runs, punched| {
            for run in runs {
                self.known.lock().push(recycled(&self.files));
                std::thread::sleep(self.takes);
                self.fake.punch(file as u64 + 1, &[*run], punched)?;
            }
            Ok(())
        }))
    }

    fn drain(&self) {}
}

/// A guest whose RAM is files 1 and 2 of a world, and its host.
struct Guest {
    world: World,
    sweeper: Option<Sweeper>,
    recycling: Mutex<Recycling>,
    known: Arc<Mutex<Vec<u64>>>,
    pinned: Arc<AtomicBool>,
    takes: Duration,
    fd: OwnedFd,
    map: SharedMap,
}

impl Guest {
    fn new(files: &[Vec<u64>]) -> Self {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        guest_side(&map).initialise();
        let taken = take(&fd);
        let recycling = Recycling::new(taken.marks.clone(), Duration::from_secs(1));
        let pinned = Arc::new(AtomicBool::new(false));
        let (world, recycling) = (World::new(files, 1000), Mutex::new(recycling));
        let mut guest =
            Self { world, sweeper: None, recycling, known: Arc::default(), pinned, takes: Duration::ZERO, fd, map };
        guest.manage(taken);
        guest
    }

    fn manage(&mut self, pool: Pool) {
        let mut all = Vec::new();
        for (number, file) in self.files().iter().enumerate() {
            let pages = self.world.fake.0.lock().files[&file.id].len() as u32;
            let run = Run::new(PageNo(0), pages);
            let extent = Extent { frame: FRAMES[number], region: RegionId(number as u32), run };
            file.state().region.free = Some(FreePages::new(pool.marks.clone(), vec![extent]));
            all.push(extent);
        }
        self.recycling.lock().locate(all.clone());
        let (fake, known, pinned) = (self.world.fake.clone(), self.known.clone(), self.pinned.clone());
        let ground = OfModel { fake, files: self.files(), known, pinned, takes: self.takes };
        self.sweeper = Some(Sweeper::new(pool, all, Box::new(ground)));
    }

    /// The daemon dies, and another begins.
    fn restart(&mut self) {
        self.sweeper = None;
        self.world.open();
        self.manage(take(&self.fd));
    }

    fn files(&self) -> Vec<Arc<File>> {
        self.world.files.values().take(2).cloned().collect()
    }

    fn sweep(&mut self) {
        let files = self.files();
        let sweeper = self.sweeper.as_mut().unwrap();
        sweeper.sweep(&files, Duration::from_secs(60), &self.recycling, || false);
    }

    fn side(&self) -> ppr::Pool {
        guest_side(&self.map)
    }

    fn content(&self, file: usize, page: usize) -> u64 {
        self.world.fake.0.lock().files[&(file as u64 + 1)][page].content
    }

    fn recycled(&self) -> u64 {
        recycled(&self.files())
    }

    fn why(&self) -> Option<String> {
        self.recycling.lock().status().why
    }

    /// What counts as recycled is a hole.
    fn check(&self) {
        for (number, file) in self.files().iter().enumerate() {
            let state = file.state();
            for page in state.region.recycled(ALL) {
                assert_eq!(self.content(number, page.index()), 0, "page {page} of file {number} is in use");
            }
        }
    }
}

/// Sets a flag when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn recycled(files: &[Arc<File>]) -> u64 {
    files.iter().map(|file| file.state().region.counts().recycled).sum()
}

fn take_marks(fd: &OwnedFd) -> Arc<Marks> {
    Arc::new(Marks::open(fd).unwrap())
}

fn frame(file: usize, page: usize) -> u64 {
    FRAMES[file] + page as u64
}

#[test]
fn what_a_guest_frees_is_punched_out_of_its_frames_and_counts_until_it_is_written() {
    let image: Vec<u64> = (1..=200).collect();
    let mut guest = Guest::new(&[image.clone(), image.clone(), image]);
    guest.world.rounds(4);
    assert_eq!(guest.world.frames_and_shared(), (200, 200));
    let side = guest.side();
    let of_guest = ppr::Guest::new(&side);
    of_guest.mark(frame(0, 0)..frame(0, 50));
    of_guest.mark(frame(0, 60)..frame(0, 110));
    of_guest.mark(frame(1, 150)..frame(1, 200));
    // Neither of RAM, nor in a word of it.
    of_guest.mark(3000..3001);
    guest.sweep();
    assert_eq!(guest.recycled(), 150);
    assert_eq!(*guest.known.lock(), [0, 50, 100], "the ledger knows of pages before they are released");
    assert_eq!((guest.content(0, 109), guest.content(0, 110)), (0, 111));
    assert_eq!((guest.content(0, 49), guest.content(0, 50)), (0, 51));
    assert_eq!((guest.content(1, 149), guest.content(1, 150)), (150, 0));
    let metrics = guest.recycling.lock().status().metrics;
    assert_eq!((metrics.pages_recycled_total, metrics.managed_bytes), (150, 400 << 12));
    guest.world.rounds(4);
    assert_eq!(guest.recycled(), 150, "that it was punched is no write");
    guest.world.check();
    of_guest.cancel(frame(0, 7)..frame(0, 9), || false).unwrap();
    guest.world.write(1, 7, 8);
    guest.world.rounds(4);
    assert_eq!(guest.recycled(), 149, "what it has taken back and not written is a hole still");
    guest.world.check();
    let model = guest.world.fake.0.lock();
    assert_eq!(model.files[&1][7].frame, model.files[&2][7].frame, "it is merged again");
    assert!(model.files[&1][7].frame.is_some());
}

#[test]
fn nothing_is_punched_while_memory_is_pinned_or_once_the_header_is_spoilt() {
    let mut guest = Guest::new(&[vec![1; 80], vec![2; 80]]);
    let side = guest.side();
    ppr::Guest::new(&side).mark(frame(0, 0)..frame(0, 10));
    guest.pinned.store(true, SeqCst);
    guest.sweep();
    assert!(guest.why().unwrap().contains("pinned memory"));
    guest.pinned.store(false, SeqCst);
    guest.files()[1].state().plain = Some(Plain::Pinned);
    guest.sweep();
    assert!(guest.why().unwrap().contains("pinned memory"));
    assert_eq!((guest.recycled(), guest.content(0, 0)), (0, 1));
    guest.files()[1].state().plain = None;
    guest.sweep();
    assert_eq!((guest.why(), guest.recycled(), guest.content(0, 9), guest.content(0, 10)), (None, 10, 0, 1));
    ppr::Guest::new(&side).mark(frame(0, 10)..frame(0, 20));
    rustix::io::pwrite(&guest.fd, &[0; 8], 0).unwrap();
    guest.sweep();
    assert!(guest.why().unwrap().contains("overwritten"));
    assert_eq!((guest.recycling.lock().status().state, guest.content(0, 10)), (RecyclerState::Dropped, 1));
}

#[test]
fn pages_that_a_device_has_pinned_stay_and_status_says_so() {
    let mut guest = Guest::new(&[vec![1; 200], vec![2; 80]]);
    let side = guest.side();
    let pin = |guest: &Guest, pinned| {
        let mut model = guest.world.fake.0.lock();
        model.files.get_mut(&1).unwrap()[20..23].iter_mut().for_each(|page| page.pinned = pinned);
    };
    pin(&guest, true);
    ppr::Guest::new(&side).mark(frame(0, 10)..frame(0, 150));
    guest.sweep();
    let contents = [9, 10, 19, 20, 22, 23, 149, 150].map(|page| guest.content(0, page));
    assert_eq!((contents, guest.recycled()), ([1, 0, 0, 1, 1, 0, 0, 1], 137));
    assert_eq!(guest.recycling.lock().totals.pages, 137);
    assert!(guest.why().unwrap().contains("pinned memory"));
    guest.check();
    // They are taken when they are freed again.
    pin(&guest, false);
    ppr::Guest::new(&side).mark(frame(0, 20)..frame(0, 23));
    guest.sweep();
    assert_eq!((guest.content(0, 21), guest.recycled(), guest.why()), (0, 140, None));
}

#[test]
fn a_guest_whose_punches_take_long_is_swept_in_several_turns() {
    let mut guest = Guest::new(&[vec![1; 4096], vec![2; 80]]);
    guest.takes = Duration::from_millis(300);
    guest.restart();
    ppr::Guest::new(&guest.side()).mark(frame(0, 0)..frame(0, 4096));
    guest.sweep();
    let (first, punches) = (guest.recycled(), guest.known.lock().len());
    assert!(first > 0 && first < 4096, "{first} pages by {punches} punches");
    for _ in 0..8 {
        guest.sweep();
    }
    assert_eq!(guest.recycled(), 4096);
}

/// A monitor of a QEMU without a device, and what it is asked.
fn monitor() -> (OwnedFd, Arc<Mutex<Vec<String>>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = asked.clone();
    // It ends with our end of the socket.
    std::thread::spawn(move || {
        for line in BufReader::new(&theirs).lines().map_while(Result::ok) {
            let ask: Value = serde_json::from_str(&line).unwrap();
            let answer = match ask["execute"].as_str().unwrap() {
                "query-status" => json!({ "status": "running" }),
                "human-monitor-command" => json!(""),
                _ => json!([]),
            };
            heard.lock().push(format!("{} {}", ask["execute"].as_str().unwrap(), ask["arguments"]));
            writeln!(&theirs, "{}", json!({ "return": answer, "id": ask["id"] })).unwrap();
        }
    });
    (ours.into(), asked)
}

#[test]
fn no_mark_from_before_a_pause_is_applied_after_it() {
    let mut guest = Guest::new(&[vec![1; 80], vec![2; 80]]);
    let (side, files) = (guest.side(), guest.files());
    let of_guest = ppr::Guest::new(&side);
    of_guest.mark(frame(0, 0)..frame(0, 10));
    guest.sweep();
    assert_eq!(guest.recycled(), 10);
    // A driver that leaves marks behind.
    of_guest.mark(frame(0, 20)..frame(0, 30));
    let (monitor, asked) = monitor();
    let qemu = Arc::new(Qemu { owner: crate::backend::module::owner::Owner::this(), monitor, pool: 77 });
    let recycling = Arc::new(Mutex::new(Recycling::new(take_marks(&guest.fd), Duration::from_secs(1))));
    let sweeper = Mutex::new(guest.sweeper.take().unwrap());
    let kept = super::known::Guest { qemu, sweeper, recycling: recycling.clone(), files };
    recycling.lock().locate(vec![Extent { frame: FRAMES[0], region: RegionId(0), run: Run::new(PageNo(0), 80) }]);
    let shared = shared();
    kept.in_session(&shared, device::unplug).unwrap();
    assert_eq!((recycling.lock().status().state, guest.recycled()), (RecyclerState::Paused, 0));
    assert!(!recycling.lock().has_marks());
    // It was loaded: its pages hold something again.
    (0..80).for_each(|page| guest.world.write(1, page, 100 + page as u64));
    kept.look(&shared);
    kept.in_session(&shared, device::plug_again).unwrap();
    let asked = asked.lock().join("\n");
    let added = asked.lines().find(|line| line.starts_with("object-add")).unwrap();
    assert!(added.contains("/proc/self/fd/77") && asked.contains("device_add"), "{asked}");
    kept.look(&shared);
    assert_eq!((guest.recycled(), guest.content(0, 25)), (0, 125), "it was marked before");
    of_guest.mark(frame(0, 40)..frame(0, 50));
    kept.sweeper.lock().sweep(&kept.files, Duration::from_secs(60), &recycling, || false);
    assert_eq!((guest.recycled(), guest.content(0, 45), guest.content(0, 25)), (10, 0, 125));
    // While somebody has a session there is no other.
    let _session = kept.sweeper.lock();
    assert!(kept.look(&shared).is_some());
}

#[test]
fn pages_in_use_keep_what_they_hold_while_the_daemon_sweeps_and_merges() {
    const PAGES: usize = 256;
    let mut guest = Guest::new(&[vec![1; PAGES], vec![1; PAGES], vec![1; PAGES]]);
    let over = AtomicBool::new(false);
    let taken = AtomicU64::new(0);
    let (side, fake) = (guest.side(), guest.world.fake.clone());
    // Two processors of the guest, each with a file, take, write, check and free pages.
    let work = |file: usize| {
        // A page that was lost ends the others, too.
        let _over = Over(&over);
        let of_guest = ppr::Guest::new(&side);
        let (mut next, mut held) = (file as u64 + 7, HashMap::new());
        while !over.load(SeqCst) {
            next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (next >> 33) as usize % PAGES;
            match held.remove(&page) {
                Some(content) => {
                    assert_eq!(fake.0.lock().files[&(file as u64 + 1)][page].content, content, "page {page}");
                    of_guest.mark(frame(file, page)..frame(file, page + 1));
                }
                None => {
                    of_guest.cancel(frame(file, page)..frame(file, page + 1), || true).unwrap();
                    let content = 1 + (next >> 20) % 50;
                    fake.0.lock().write(file as u64 + 1, page, content);
                    held.insert(page, content);
                    taken.fetch_add(1, Relaxed);
                }
            }
        }
    };
    let files = guest.files();
    std::thread::scope(|scope| {
        for file in 0..2 {
            let work = &work;
            scope.spawn(move || work(file));
        }
        let (world, sweeper, recycling) = (&guest.world, guest.sweeper.as_mut().unwrap(), &guest.recycling);
        scope.spawn(|| {
            while !over.load(SeqCst) {
                sweeper.sweep(&files, Duration::from_millis(5), recycling, || false);
            }
        });
        let goes_on = || taken.load(Relaxed) < 100_000 || recycling.lock().totals.pages < 10_000;
        let _over = Over(&over);
        while !over.load(SeqCst) && goes_on() {
            world.round();
        }
    });
    // A marked page is not looked at: one that was merged just when it was written stays unknown.
    guest.sweep();
    // What was merged while its ledger changed is adopted, at the second or third look at times.
    guest.world.rounds(12);
    guest.check();
    guest.world.check();
}

#[derive(Clone, Debug)]
enum Step {
    Free(usize, usize, usize),
    Use(usize, usize, u64),
    Hold(usize, usize, bool),
    Round,
    Sweep,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..2usize, 0..80usize, 1..20usize).prop_map(|(file, page, pages)| Step::Free(file, page, pages)),
        5 => (0..2usize, 0..80usize, 1..12u64).prop_map(|(file, page, content)| Step::Use(file, page, content)),
        1 => (0..2usize, 0..80usize, any::<bool>()).prop_map(|(file, page, held)| Step::Hold(file, page, held)),
        3 => Just(Step::Round),
        2 => Just(Step::Sweep),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn what_is_in_use_stays_and_what_is_free_goes_whatever_happens(steps in prop::collection::vec(step(), 1..80)) {
        let mut guest = Guest::new(&[vec![1; 80], (1..81).collect(), (0..80).map(|page| page / 2).collect()]);
        let side = guest.side();
        let of_guest = ppr::Guest::new(&side);
        // What pages in use hold.
        let mut used = HashMap::new();
        for (file, page) in (0..2).flat_map(|file| (0..80).map(move |page| (file, page))) {
            used.insert((file, page), guest.content(file, page));
        }
        for step in steps {
            match step {
                Step::Free(file, page, pages) => {
                    let end = (page + pages).min(80);
                    of_guest.mark(frame(file, page)..frame(file, end));
                    used.retain(|&(other, at), _| other != file || !(page..end).contains(&at));
                }
                Step::Use(file, page, content) => {
                    of_guest.cancel(frame(file, page)..frame(file, page + 1), || false).unwrap();
                    guest.world.write(file as u64 + 1, page, content);
                    used.insert((file, page), content);
                }
                Step::Hold(file, page, held) => {
                    guest.world.fake.0.lock().files.get_mut(&(file as u64 + 1)).unwrap()[page].held = held;
                }
                Step::Round => guest.world.round(),
                Step::Sweep => guest.sweep(),
                Step::Restart => guest.restart(),
            }
            for (&(file, page), &content) in &used {
                prop_assert_eq!(guest.content(file, page), content, "page {} of file {}", page, file);
            }
        }
        guest.world.fake.0.lock().files.values_mut().flatten().for_each(|page| page.held = false);
        guest.sweep();
        guest.world.rounds(8);
        guest.check();
        guest.world.check();
        for (file, page) in (0..2).flat_map(|file| (0..80).map(move |page| (file, page))) {
            let expected = used.get(&(file, page)).copied().unwrap_or(0);
            prop_assert_eq!(guest.content(file, page), expected, "page {} of file {}", page, file);
        }
    }
}
