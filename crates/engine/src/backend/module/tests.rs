//! Files under the real scan and merge, over a model of the kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kmem::pageonefs::File as Listed;
use proptest::prelude::*;
use rustix::io::Errno;
use wire::PageNo;

pub(in crate::backend) use self::model::{Fake, Model, Page};
use super::USER;
use super::contents::Contents;
use super::file::{File, Kind, Mounted};
use super::merge::{ByNumber, Merge};
use crate::config::Config;
use crate::core::content::index::{ClientId, Content};
use crate::core::ledger::Entry;
use crate::core::merge::pass;
use crate::sync::Mutex;
use crate::world::shared::Shared;
use crate::world::state_file::StateFile;

mod far;
mod model;
mod turns;

/// Files over the model, and what a round needs.
pub(in crate::backend) struct World {
    pub(in crate::backend) fake: Arc<Fake>,
    pub(in crate::backend) shared: Shared,
    pub(in crate::backend) files: ByNumber,
    pub(in crate::backend) contents: Arc<Contents>,
    _directory: tempfile::TempDir,
}

/// Files, with a store or without.
pub(in crate::backend) trait Rounds {
    fn world(&self) -> &World;

    fn round(&self);

    /// As a new daemon finds the files.
    fn open(&mut self);

    fn rounds(&self, rounds: usize) {
        (0..rounds).for_each(|_| self.round());
    }

    /// Does these steps, and then lets all pages go.
    fn take(&mut self, steps: Vec<Step>) {
        let hold = |fake: &Fake, id, page: usize, held| fake.0.lock().files.get_mut(&id).unwrap()[page].held = held;
        for step in steps {
            match step {
                Step::Write(id, page, content) => self.world().write(id, page, content),
                Step::Hold(id, page, held) => hold(&self.world().fake, id, page, held),
                Step::Round => self.round(),
                Step::Restart => self.open(),
            }
        }
        self.world().fake.0.lock().files.values_mut().flatten().for_each(|page| page.held = false);
    }
}

impl Rounds for World {
    fn world(&self) -> &World {
        self
    }

    fn open(&mut self) {
        self.contents = Arc::new(Contents::new(crate::core::content::seed::Seed::random()));
        self.files.clear();
        let sizes: Vec<(u64, usize)> = {
            let model = self.fake.0.lock();
            let files = model.files.iter().filter(|(id, _)| !model.stores.contains(id));
            files.map(|(&id, pages)| (id, pages.len())).collect()
        };
        for (id, pages) in sizes {
            let number = number(id);
            let file = File::new(&listed(id, pages), number, self.contents.clone(), self.fake.clone(), Mounted);
            self.files.insert(number, Arc::new(file));
        }
    }

    fn round(&self) {
        let due: Vec<_> = self.files.values().filter(|file| scan(file) > 0).collect();
        due.into_iter().for_each(|file| self.merge(file).unwrap());
    }
}

/// What the kernel lists of a file.
pub(in crate::backend) fn listed(id: u64, pages: usize) -> Listed {
    let mut listed = Listed::default();
    (listed.id, listed.size) = (id, pages as u64 * kmem::PAGE_SIZE as u64);
    listed
}

/// A file of so many pages over the model, with contents of its own.
pub(in crate::backend) fn file(fake: Arc<Fake>, pages: usize) -> Arc<File> {
    let contents = Arc::new(Contents::new(crate::core::content::seed::Seed::random()));
    Arc::new(File::new(&listed(1, pages), ClientId(1), contents, fake, Mounted))
}

/// Scans a file. Returns how many candidates it has.
pub(in crate::backend) fn scan<K: Kind>(file: &File<K>) -> u64 {
    file.scan(|| false).unwrap().due
}

/// The number that a file gets.
pub(in crate::backend) fn number(id: u64) -> ClientId {
    ClientId(id as u32 + 7)
}

impl World {
    pub(in crate::backend) fn new(files: &[Vec<u64>], max_users: u32) -> Self {
        let page = |&content: &u64| Page { content, dirty: true, ..Page::default() };
        let of = |(id, file): (u64, &Vec<u64>)| (id, file.iter().map(page).collect());
        let files: BTreeMap<u64, Vec<Page>> = (1..).zip(files).map(of).collect();
        let model = Model { files, max_users, ..Model::default() };
        let directory = tempfile::tempdir().unwrap();
        let config = Config { mode: governor::Mode::None, ..Config::default() };
        let shared = Shared::new(config, StateFile::load(directory.path()).unwrap());
        let mut world = Self {
            fake: Arc::new(Fake(Mutex::new(model))),
            shared,
            files: ByNumber::new(),
            contents: Arc::new(Contents::new(crate::core::content::seed::Seed::random())),
            _directory: directory,
        };
        world.open();
        world
    }

    /// Looks at every candidate of a file once.
    pub(in crate::backend) fn merge(&self, file: &File) -> Result<(), Errno> {
        pass::run(&mut Merge::new(&self.shared, file, &self.files), &self.shared.pace(USER), PageNo(0))
    }

    pub(in crate::backend) fn write(&self, id: u64, page: usize, content: u64) {
        self.fake.0.lock().write(id, page, content);
    }

    /// Whether ledgers, index and model say the same, of memory that has been scanned since it was
    /// written. Returns the model's contents, by the handles that merged pages have.
    pub(in crate::backend) fn check(&self) -> HashMap<u32, u64> {
        let model = self.fake.0.lock();
        let mut used: HashMap<u32, u64> = HashMap::new();
        for file in self.files.values() {
            let state = file.state();
            for (at, page) in model.files[&file.id].iter().enumerate() {
                let entry = state.region.entry(PageNo(at as u32));
                assert_eq!(matches!(entry, Entry::Merged(_)), page.frame.is_some(), "page {at} of {}", file.id);
                self.check_entry(entry, page.content, &mut used);
                if let Some(frame) = page.frame {
                    assert_eq!(model.frames[&frame].content, page.content);
                }
            }
        }
        used
    }

    /// Whether the index knows the content that a page is merged with.
    pub(in crate::backend) fn check_entry(&self, entry: Entry<Content>, content: u64, used: &mut HashMap<u32, u64>) {
        if let Entry::Merged(Content(handle)) = entry {
            assert_eq!(*used.entry(handle).or_insert(content), content, "one handle, two contents");
            assert!(self.contents.index.get(handle).is_some(), "the content {content} of a page is not known");
        }
    }

    /// Frames, and contents that two pages or more have.
    pub(in crate::backend) fn frames_and_shared(&self) -> (usize, usize) {
        let model = self.fake.0.lock();
        let mut counts: HashMap<u64, u32> = HashMap::new();
        let pages = model.files.values().flatten().filter(|page| page.content != 0 && !page.held && !page.away);
        pages.for_each(|page| *counts.entry(page.content).or_default() += 1);
        (model.frames.len(), counts.values().filter(|&&count| count > 1).count())
    }
}

#[test]
fn equal_pages_share_frames_and_a_written_one_leaves_its_own() {
    let world = World::new(&[vec![1, 2, 3, 0, 9], vec![1, 2, 4, 0, 1]], 100);
    world.rounds(2);
    assert_eq!(world.frames_and_shared().0, 0, "two merge periods clean, first");
    world.rounds(2);
    assert_eq!(world.frames_and_shared(), (2, 2));
    world.check();
    world.write(1, 0, 5);
    world.write(2, 4, 5);
    world.rounds(4);
    assert_eq!(world.frames_and_shared(), (3, 2), "1 has one user left, and 5 is new");
    world.check();
    let merged: u64 = world.files.values().map(|file| file.state().totals.merged).sum();
    let unmerged: u64 = world.files.values().map(|file| file.state().totals.unmerged).sum();
    assert_eq!((merged, unmerged), (7, 2));
    world.files.values().for_each(|file| file.reap());
    assert_eq!(world.contents.index.len(), 0);
}

#[test]
fn the_same_memory_in_another_file_is_not_digested_again() {
    let image: Vec<u64> = (1..=4000).collect();
    let world = World::new(&[image.clone(), image.clone(), image], 100);
    world.rounds(4);
    assert_eq!(world.frames_and_shared(), (4000, 4000));
    let digested = world.fake.0.lock().digested;
    assert!(digested < 4000 + 2 * 600, "{digested} pages were digested");
    world.check();
}

#[test]
fn what_was_predicted_wrong_is_digested_and_merged_with_what_it_holds() {
    let image: Vec<u64> = (1..=3000).collect();
    let mut other = image.clone();
    for page in (600..3000).step_by(50) {
        other[page] = 10_000 + page as u64 / 100;
    }
    let world = World::new(&[image, other], 100);
    world.rounds(5);
    world.check();
    let (frames, shared) = world.frames_and_shared();
    assert!(frames >= shared && frames <= shared + 60, "{frames} frames for {shared} contents");
    let merged = world.fake.0.lock().files[&2].iter().filter(|page| page.frame.is_some()).count();
    assert_eq!(merged, 3000);
    let differed: u64 = world.files.values().map(|file| file.state().totals.differed).sum();
    assert!(differed > 0, "the predictions were tried");
}

#[test]
fn a_content_with_more_users_than_a_frame_may_have_gets_more_frames() {
    let world = World::new(&[vec![7; 1000], vec![7; 300]], 300);
    world.rounds(5);
    let frames = world.frames_and_shared().0;
    assert_eq!(frames, 5);
    let merged = world.fake.0.lock().files.values().flatten().filter(|page| page.frame.is_some()).count();
    assert_eq!(merged, 1300);
    world.check();
}

#[test]
fn pages_that_are_held_or_away_are_merged_when_they_come_back() {
    let world = World::new(&[vec![1, 2, 3], vec![1, 2, 3]], 100);
    {
        let mut model = world.fake.0.lock();
        model.files.get_mut(&1).unwrap()[0].held = true;
        model.files.get_mut(&2).unwrap()[1].held = true;
        model.files.get_mut(&2).unwrap()[2].away = true;
    }
    world.rounds(4);
    world.check();
    assert!(world.fake.0.lock().files[&1][0].frame.is_none());
    {
        let mut model = world.fake.0.lock();
        model.files.values_mut().flatten().for_each(|page| (page.held, page.away) = (false, false));
    }
    world.rounds(8);
    world.check();
    let merged = world.fake.0.lock().files.values().flatten().filter(|page| page.frame.is_some()).count();
    assert_eq!((merged, world.frames_and_shared().0), (6, 3));
}

#[test]
fn a_call_that_ends_early_leaves_the_rest_for_later() {
    let image: Vec<u64> = (1..=300).collect();
    let world = World::new(&[image.clone(), image, vec![7; 200]], 10_000);
    world.rounds(2);
    for file in world.files.values() {
        scan(file);
    }
    for (file, after) in world.files.values().zip([0, 100, 50]) {
        world.fake.0.lock().ends_after = Some(after);
        let _ = world.merge(file);
    }
    world.fake.0.lock().ends_after = None;
    world.check();
    world.rounds(8);
    world.check();
    let merged = world.fake.0.lock().files.values().flatten().filter(|page| page.frame.is_some()).count();
    assert_eq!(merged, 800);
    world.files.values().for_each(|file| file.reap());
    assert_eq!(world.contents.index.len(), 0);
}

#[test]
fn a_new_daemon_finds_what_is_merged_and_goes_on() {
    let mut world = World::new(&[vec![1, 2, 3, 1], vec![1, 2, 4, 8]], 100);
    world.rounds(4);
    let before = world.frames_and_shared();
    world.open();
    world.rounds(4);
    world.check();
    assert_eq!(world.frames_and_shared(), before);
    world.write(1, 3, 4);
    world.write(2, 3, 2);
    world.rounds(4);
    world.check();
    assert_eq!((before, world.frames_and_shared()), ((2, 2), (3, 3)));
    let model = world.fake.0.lock();
    let frames = |content| {
        let pages = model.files.values().flatten().filter(move |page| page.content == content);
        pages.map(|page| page.frame).collect::<BTreeSet<_>>()
    };
    assert_eq!(frames(2).len(), 1, "the page that came later uses the frame that was there");
}

#[test]
fn files_are_merged_by_several_threads() {
    let image = |shift: u64| (0..3000).map(|page| (page + shift) % 2000 + 1).collect::<Vec<u64>>();
    let world = World::new(&[image(0), image(0), image(700), image(1400)], 10_000);
    for round in 0..8 {
        for file in world.files.values() {
            scan(file);
        }
        std::thread::scope(|scope| {
            for file in world.files.values() {
                scope.spawn(|| world.merge(file).unwrap());
            }
        });
        (0..100).for_each(|page| world.write(1 + round % 4, page * 29, 1 + page as u64));
    }
    world.rounds(8);
    world.check();
    let merged = world.fake.0.lock().files.values().flatten().filter(|page| page.frame.is_some()).count();
    assert_eq!(merged, 12_000);
}

#[test]
fn hot_pages_keep_their_bits_and_merge_when_they_calm_down() {
    let world = World::new(&[vec![1; 130], vec![2; 130]], 1000);
    let mut taken = 0;
    for round in 0..40 {
        let pages = || (64..128).chain([0, 129]);
        let dirty = |page: usize| world.fake.0.lock().files[&1][page].dirty;
        let left = pages().filter(|&page| dirty(page)).count();
        assert!(round == 0 || matches!(left, 0 | 64) && !dirty(0), "by words: {left}");
        taken += usize::from(round >= 8 && left == 0);
        pages().for_each(|page| world.write(1, page, 2));
        world.round();
        world.check();
    }
    assert_eq!(taken, 32 / 8, "every eighth period");
    // The last writes are found after up to eight periods, their end after so many again.
    world.rounds(8 + 8 + 4);
    world.check();
    assert!(world.fake.0.lock().files[&1].iter().all(|page| page.frame.is_some()));
}

/// What a property test does to files 1, 2 and 3.
#[derive(Clone, Debug)]
pub(in crate::backend) enum Step {
    Write(u64, usize, u64),
    Hold(u64, usize, bool),
    Round,
    Restart,
}

pub(in crate::backend) fn step(pages: usize) -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..4u64, 0..pages, 0..12u64).prop_map(|(id, page, content)| Step::Write(id, page, content)),
        1 => (1..4u64, 0..pages, any::<bool>()).prop_map(|(id, page, held)| Step::Hold(id, page, held)),
        3 => Just(Step::Round),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn ledgers_and_kernel_agree_whatever_happens(steps in prop::collection::vec(step(80), 1..60), max_users in 40..300u32) {
        let mut world = World::new(&[vec![1; 80], (1..81).collect(), (0..80).map(|page| page / 2).collect()], max_users);
        world.take(steps);
        world.rounds(12);
        world.check();
        let model = world.fake.0.lock();
        let mut lonely: HashMap<u64, u32> = HashMap::new();
        for page in model.files.values().flatten().filter(|page| page.content != 0) {
            *lonely.entry(page.content).or_default() += 1;
        }
        for page in model.files.values().flatten().filter(|page| page.content != 0 && page.frame.is_none()) {
            prop_assert_eq!(lonely[&page.content], 1, "content {} is not merged", page.content);
        }
    }
}
