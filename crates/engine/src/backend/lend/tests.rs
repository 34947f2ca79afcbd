//! Files and a store of one domain, over the model of the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kmem::pageonefs::{Ask, Bits, Entry as Pairing};
use proptest::prelude::*;
use wire::PageNo;

use super::bridge::Bridge;
use super::join::join;
use super::loans::{Lend, Segment};
use super::stores::StoreKernel;
use crate::backend::module::USER;
use crate::backend::module::kernel::Kernel;
use crate::backend::module::tests::{Rounds, World, listed, number, scan, step};
use crate::config::Config;
use crate::core::ledger::Entry;
use crate::core::merge::pass;
use crate::store::Cursor;
use crate::store::domain::{Domain, DomainKey, InFiles};

/// Files and a store over the model.
struct Both {
    world: World,
    domain: Arc<Domain>,
    bridge: Arc<Bridge>,
}

impl std::ops::Deref for Both {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Rounds for Both {
    fn world(&self) -> &World {
        &self.world
    }

    fn open(&mut self) {
        self.world.open();
        self.bridge = Bridge::new(self.world.contents.clone(), &self.domain);
        self.fill();
    }

    fn round(&self) {
        let slots: Vec<_> = self.segments().into_iter().filter(|segment| scan(segment) > 0).collect();
        slots.iter().for_each(|segment| self.lend(segment));
        self.world.round();
        join(&self.shared, &self.bridge, &self.files);
    }
}

impl Both {
    /// The last of these is a store's file; 0: a slot that is no frame.
    fn with_store(files: &[Vec<u64>], max_users: u32) -> Self {
        let mut world = World::new(files, max_users);
        world.fake.0.lock().stores.insert(files.len() as u64);
        world.open();
        let domain = Arc::new(Domain::new(DomainKey::named(None, "lends"), &Config::default()));
        let bridge = Bridge::new(world.contents.clone(), &domain);
        let both = Self { world, domain, bridge };
        both.fill();
        both
    }

    /// The store's files are lent.
    fn fill(&self) {
        let mut model = self.fake.0.lock();
        for id in model.stores.clone() {
            let pages = model.files.get_mut(&id).unwrap();
            pages.iter_mut().for_each(|page| page.dirty = true);
            let segment = self.bridge.open(&listed(id, pages.len()), number(id), self.fake.clone());
            self.bridge.segments.write().insert(segment.number, Arc::new(segment));
        }
    }

    fn lend(&self, segment: &Segment) {
        pass::run(&mut Lend::new(segment), &self.shared.pace(USER), PageNo(0)).unwrap();
    }

    fn segments(&self) -> Vec<Arc<Segment>> {
        self.bridge.segments.read().values().cloned().collect()
    }

    /// As [`World::check`], of slots, too.
    fn check(&self) {
        let mut used = self.world.check();
        let model = self.fake.0.lock();
        for segment in self.segments() {
            let state = segment.state();
            for (at, page) in model.files[&segment.id].iter().enumerate() {
                let entry = state.region.entry(PageNo(at as u32));
                assert!(!matches!(entry, Entry::Merged(_)) || page.lent.is_some(), "slot {at} of {}", segment.id);
                self.check_entry(entry, page.content, &mut used);
            }
        }
    }

    /// The frames that pages of files with this content use, and those that stores lend.
    fn frames_of(&self, content: u64) -> (BTreeSet<Option<u64>>, BTreeSet<u64>) {
        let model = self.fake.0.lock();
        let (mut used, mut lent) = (BTreeSet::new(), BTreeSet::new());
        for (id, file) in &model.files {
            for page in file.iter().filter(|page| page.content == content) {
                match model.stores.contains(id) {
                    true => lent.extend(page.lent),
                    false => _ = used.insert(page.frame),
                }
            }
        }
        (used, lent)
    }

    /// Pages of files with this content use the one frame that a store lends.
    fn is_shared(&self, content: u64) -> bool {
        let (used, lent) = self.frames_of(content);
        lent.len() == 1 && used.iter().all(|frame| frame.is_some_and(|frame| lent.contains(&frame)))
    }
}

#[test]
fn files_that_were_merged_before_join_a_stores_slot() {
    let world = Both::with_store(&[vec![1, 2, 3], vec![1, 2, 4], vec![0; 70]], 100);
    world.rounds(4);
    let before = world.fake.0.lock().frames.len();
    world.write(3, 65, 1);
    world.write(3, 2, 4);
    world.rounds(4);
    world.check();
    assert!(world.is_shared(1) && world.is_shared(4), "{:?} {:?}", world.frames_of(1), world.frames_of(4));
    assert_eq!((before, world.fake.0.lock().frames.len()), (2, 3), "the old frame of 1 is gone");
    assert!(world.frames_of(2).1.is_empty());
}

#[test]
fn a_page_that_comes_after_the_slot_uses_it() {
    let world = Both::with_store(&[vec![0; 8], vec![5, 6, 7, 0]], 100);
    world.rounds(4);
    assert_eq!(world.fake.0.lock().frames.len(), 0, "nothing is lent that nobody has");
    (0..3).for_each(|page| world.write(1, page, 5));
    world.write(1, 4, 7);
    world.rounds(4);
    world.check();
    assert!(world.is_shared(5) && world.is_shared(7));
    assert_eq!(world.fake.0.lock().frames.len(), 2);
}

#[test]
fn users_keep_the_frame_of_a_slot_that_dies_and_join_the_next() {
    let world = Both::with_store(&[vec![1, 1, 2], vec![1, 3, 0]], 100);
    world.rounds(4);
    assert!(world.is_shared(1));
    world.write(2, 0, 0);
    world.rounds(4);
    world.check();
    let (used, lent) = world.frames_of(1);
    assert!(used.len() == 1 && used.iter().all(Option::is_some) && lent.is_empty(), "{used:?}");
    world.write(2, 2, 1);
    world.rounds(4);
    world.check();
    assert!(world.is_shared(1));
    assert_eq!(world.fake.0.lock().frames.len(), 1);
    world.files.values().for_each(|file| file.reap());
    world.segments().iter().for_each(|segment| segment.reap());
    assert_eq!(world.contents.index.len(), 0);
    assert_eq!(world.bridge.loans.frame(0), None);
}

#[test]
fn of_two_slots_with_one_content_one_is_lent_and_the_other_takes_its_place() {
    let world = Both::with_store(&[vec![1, 1, 9], vec![1, 1, 8, 8]], 100);
    world.rounds(9);
    world.check();
    assert!(world.is_shared(1));
    assert!(world.frames_of(8).1.is_empty(), "no file has it");
    let first = world.fake.0.lock().files[&2].iter().position(|page| page.lent.is_some()).unwrap();
    world.write(2, first, 0);
    world.rounds(10);
    world.check();
    assert!(world.is_shared(1));
    assert_eq!(world.fake.0.lock().frames.len(), 1);
}

#[test]
fn a_whole_image_is_joined_whichever_came_first() {
    let image: Vec<u64> = (1..=3000).collect();
    let reversed: Vec<u64> = image.iter().rev().copied().collect();
    let world = Both::with_store(&[image.clone(), image.clone(), vec![0; 3000]], 100);
    world.rounds(4);
    reversed.iter().enumerate().for_each(|(page, &content)| world.write(3, page, content));
    world.rounds(4);
    world.check();
    assert!(image.iter().all(|&content| world.is_shared(content)));
    assert_eq!(world.fake.0.lock().frames.len(), 3000);
    let world = Both::with_store(&[image.clone(), image.clone(), reversed], 100);
    world.rounds(5);
    world.check();
    assert!(image.iter().all(|&content| world.is_shared(content)));
}

#[test]
fn a_held_page_joins_later_and_a_full_frame_is_not_joined() {
    let world = Both::with_store(&[vec![1, 2], vec![1, 2], vec![0, 0]], 3);
    world.rounds(4);
    world.fake.0.lock().files.get_mut(&3).unwrap()[0].held = true;
    world.write(3, 0, 1);
    world.rounds(4);
    world.check();
    assert!(world.frames_of(1).1.is_empty());
    world.fake.0.lock().files.get_mut(&3).unwrap()[0].held = false;
    world.rounds(4);
    world.check();
    assert!(world.is_shared(1));
    let world = Both::with_store(&[vec![1; 8], vec![1]], 3);
    world.rounds(8);
    world.check();
    let merged = world.fake.0.lock().files[&1].iter().filter(|page| page.frame.is_some()).count();
    assert_eq!((merged, world.fake.0.lock().frames.len()), (8, 3));
}

#[test]
fn a_content_is_in_files_if_a_page_of_theirs_has_it() {
    let world = Both::with_store(&[vec![1, 2, 2, 3], vec![3, 4, 0]], 100);
    world.rounds(4);
    let digest = |content: u64| {
        kmem::pageonefs::digest_of(xxhash_rust::xxh3::xxh3_64_with_seed(
            &content.to_ne_bytes(),
            world.contents.seed.get(),
        ))
    };
    let is_in_files = |content| world.bridge.has(digest(content));
    assert_eq!([1, 2, 3, 4, 5].map(is_in_files), [true, true, true, false, false]);
    world.write(1, 3, 6);
    world.rounds(4);
    assert!(!is_in_files(3), "only the store has it now");
}

#[test]
fn only_frames_of_a_segment_are_looked_at_and_lent() {
    let domain = Arc::new(Domain::new(DomainKey::named(None, "lends"), &Config::default()));
    domain.store.grow_lendable(1);
    let mut cursor = Cursor::new(&domain.store, None);
    let frames = [1, 2].map(|byte| cursor.put(&[byte; kmem::PAGE_SIZE], 1).unwrap());
    drop(cursor);
    let [slot, dying] = frames.map(|frame| frame.slot().index());
    let world = Both::with_store(&[vec![9; wire::SEGMENT_PAGES as usize]], 100);
    let lendable = domain.store.lendable();
    let [(first, segment)] = &lendable[..] else { panic!("one segment") };
    let kernel = StoreKernel::new(&domain, *first, segment, world.fake.clone());
    let mut bits = [0; wire::SEGMENT_PAGES as usize / 64];
    assert_eq!(kernel.harvest(1, 0, Bits::Written, &mut bits).map(|found| found.dirty), Ok(2));
    assert!(bits[slot / 64] >> (slot % 64) & 1 == 1);
    domain.release(frames[1]);
    assert_eq!(kernel.harvest(1, 0, Bits::Written, &mut bits).map(|found| found.dirty), Ok(1));
    assert!(bits[dying / 64] >> (dying % 64) & 1 == 1);
    let start = slot / 64 * 64;
    let mut words = [0; 64];
    let ask = Ask { id: 1, start: start as u64, only: Some(&[!0]), ..Ask::default() };
    assert_eq!(kernel.digest(&ask, &mut words), Ok(1));
    assert!((0..64).all(|at| (words[at] != 0) == (at == slot - start)));
    let mut entries = [slot, dying].map(|slot| Pairing::new(slot as u64, None));
    assert_eq!(kernel.merge(1, &mut entries), Ok(1));
    assert_eq!((entries[0].result(), entries[1].result()), (Ok(()), Err(rustix::io::Errno::AGAIN)));
    assert_eq!(domain.store.users(frames[0]), 1, "the lending has no reference");
    segment.changes_all();
    assert_eq!(kernel.harvest(1, 0, Bits::Written, &mut bits).map(|found| found.dirty), Ok(1));
    drop(lendable);
    domain.release(frames[0]);
    domain.store.tidy(std::time::Instant::now() + std::time::Duration::from_secs(3600));
    assert!(domain.store.lendable().is_empty(), "the kernel of a segment does not keep it");
    assert_eq!(kernel.harvest(1, 0, Bits::Written, &mut bits), Err(rustix::io::Errno::SRCH));
}

#[test]
fn several_threads_lend_and_merge() {
    let image = |shift: u64| (0..1500).map(|page| (page + shift) % 1000 + 1).collect::<Vec<u64>>();
    let world = Both::with_store(&[image(0), image(0), image(700), image(300)], 10_000);
    for round in 0..12 {
        let segments = world.segments();
        segments.iter().for_each(|segment| _ = scan(segment));
        world.files.values().for_each(|file| _ = scan(file));
        std::thread::scope(|scope| {
            for segment in &segments {
                scope.spawn(|| world.lend(segment));
            }
            for file in world.files.values() {
                scope.spawn(|| world.merge(file).unwrap());
            }
        });
        join(&world.shared, &world.bridge, &world.files);
        (0..50).for_each(|page| world.write(1 + round % 4, page * 29, 1 + page as u64));
    }
    world.rounds(12);
    world.check();
    let held: BTreeSet<u64> = world.fake.0.lock().files[&4].iter().map(|page| page.content).collect();
    let used: BTreeSet<u64> = (1..4).flat_map(|id| world.fake.0.lock().files[&id].clone()).map(|p| p.content).collect();
    assert!(held.intersection(&used).all(|&content| world.is_shared(content)));
}

proptest! {
    #[test]
    fn files_use_what_stores_lend_whatever_happens(steps in prop::collection::vec(step(70), 1..60)) {
        let mut world = Both::with_store(&[vec![1; 70], (1..71).collect(), (0..70).map(|page| page / 3).collect()], 1000);
        world.take(steps);
        world.rounds(16);
        world.check();
        let contents: BTreeMap<u64, usize> = {
            let model = world.fake.0.lock();
            let mut counts = BTreeMap::new();
            let pages = model.files.iter().filter(|(id, _)| **id != 3).flat_map(|(_, file)| file);
            pages.filter(|page| page.content != 0).for_each(|page| *counts.entry(page.content).or_default() += 1);
            counts
        };
        for (content, count) in contents {
            let (used, _) = world.frames_of(content);
            let in_store = world.fake.0.lock().files[&3].iter().any(|page| page.content == content);
            prop_assert_eq!(used.len(), 1, "content {} has one place", content);
            let lent = world.fake.0.lock().files[&3].iter().filter_map(|page| page.lent).collect::<BTreeSet<_>>();
            let is_lent = used.iter().all(|frame| frame.is_some_and(|frame| lent.contains(&frame)));
            prop_assert_eq!(is_lent, in_store, "content {}: {:?}", content, used);
            prop_assert!(count == 1 || used.iter().all(Option::is_some));
        }
    }
}
