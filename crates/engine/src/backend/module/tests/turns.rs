//! Many files, and large ones: each has its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kmem::pageonefs::File as Listed;

use super::{Rounds, World, scan};
use crate::backend::module::contents::Contents;
use crate::backend::module::kernel::MountPoint;
use crate::backend::module::merge::Merge;
use crate::backend::module::mounts::{Files, Mount, Numbers};
use crate::backend::module::round;
use crate::core::content::index::MAX_CLIENTS;
use crate::core::content::seed::Seed;

#[test]
fn a_user_may_have_as_many_numbers_as_there_are_left() {
    let mut numbers = Numbers::default();
    let mut of = |uid| std::iter::from_fn(|| numbers.take(Some(uid))).collect::<Vec<_>>();
    let (first, second, third) = (of(1), of(2), of(3));
    assert_eq!([&first, &second, &third].map(Vec::len), [1 << 15, 1 << 14, 1 << 13]);
    first.into_iter().for_each(|number| numbers.give_back(number, Some(1)));
    let own = std::iter::from_fn(|| numbers.take(None)).count();
    assert_eq!(own, MAX_CLIENTS as usize - (1 << 14) - (1 << 13), "the daemon's own have no bound");
    assert_eq!(numbers.take(Some(1)), None);
    second.into_iter().for_each(|number| numbers.give_back(number, Some(2)));
    assert!(numbers.take(Some(1)).is_some());
}

/// Files of a mount that nobody has mounted.
fn of_mount() -> Files {
    let files = Files::default();
    let point = MountPoint { path: "/nowhere".into(), device: 1, domain: String::new() };
    files.state.lock().mounts.insert(1, Mount::new(point, Arc::new(Contents::new(Seed::random()))));
    files
}

fn listed(ids: impl Iterator<Item = u64>, uid: u32) -> Vec<Listed> {
    let of = |id| {
        let mut listed = super::listed(id, 1);
        (listed.inode, listed.uid) = (7 * id, uid);
        listed
    };
    ids.map(of).collect()
}

#[test]
fn files_come_and_go_and_no_user_takes_the_numbers_of_all() {
    let files = of_mount();
    let mine = listed(1..60_000, 1000);
    let all = [mine.clone(), listed(60_000..60_100, 1001)].concat();
    files.take_in(1, &all);
    let of = |files: &Files| {
        let told = files.tell().swap_remove(0);
        (told.files.len(), told.left_out.get(&1000).copied(), told.left_out.get(&1001).copied())
    };
    assert_eq!(of(&files), ((1 << 15) + 100, Some(59_999 - (1 << 15)), None), "the other user's are all there");
    // Those that are left take the places of those that go.
    files.take_in(1, &all[50_000..]);
    assert_eq!(of(&files), (10_099, None, None));
    let inodes: Vec<u64> = files.state.lock().mounts[&1].inodes.keys().copied().collect();
    assert_eq!((inodes.len(), inodes[0]), (10_099, 7 * 50_001));
    files.take_in(1, &[]);
    assert_eq!(of(&files), (0, None, None));
    let mut state = files.state.lock();
    assert_eq!(std::iter::from_fn(|| state.numbers.take(None)).count(), MAX_CLIENTS as usize, "all were given back");
}

#[test]
fn a_file_that_gets_another_length_is_the_same_file() {
    let files = of_mount();
    files.take_in(1, &listed(1..2, 0));
    let before = files.tell()[0].files[0].clone();
    for size in [1 << 60, 0, 5, 1 << 30] {
        let mut listed = listed(1..2, 0);
        listed[0].size = size;
        files.take_in(1, &listed);
        let after = files.tell()[0].files[0].clone();
        assert!(Arc::ptr_eq(&before, &after) && after.state().size == size);
    }
}

#[test]
fn a_large_file_lets_the_others_have_their_turn_and_the_round_end() {
    let image = |file: u64| (0..40_000).map(|page| page % 20_000 + 1 + file * 100_000).collect::<Vec<u64>>();
    let small = |file: u64| (0..100).map(|page| page % 50 + 1 + file * 100_000).collect::<Vec<u64>>();
    let world = World::new(&[image(1), small(2), small(3)], 10_000);
    (0..2).for_each(|_| world.files.values().for_each(|file| _ = scan(file)));
    let merged = |id: u64| world.fake.0.lock().files[&id].iter().filter(|page| page.frame.is_some()).count();
    let asked = AtomicBool::new(true);
    let merge = || {
        let due: Vec<_> = world.files.values().filter(|file| scan(file) > 0).cloned().collect();
        round::merge(&world.shared, &due, |file| Merge::new(&world.shared, file, &world.files), || asked.load(Relaxed));
    };
    merge();
    assert_eq!((merged(2), merged(3)), (100, 100));
    let of_large = merged(1);
    assert!(of_large < 40_000, "the next round was due");
    merge();
    assert!(merged(1) > of_large && merged(1) < 40_000, "it goes on where it was");
    asked.store(false, Relaxed);
    (0..4).for_each(|_| merge());
    assert_eq!(merged(1), 40_000);
    world.check();
    world.rounds(1);
}

#[test]
fn nothing_is_merged_once_the_engine_stops() {
    let world = World::new(&[vec![1; 100], vec![1; 100]], 10_000);
    (0..3).for_each(|_| world.files.values().for_each(|file| _ = scan(file)));
    world.shared.stop();
    let due: Vec<_> = world.files.values().cloned().collect();
    round::merge(&world.shared, &due, |file| Merge::new(&world.shared, file, &world.files), || false);
    assert_eq!(world.fake.0.lock().frames.len(), 0);
}
