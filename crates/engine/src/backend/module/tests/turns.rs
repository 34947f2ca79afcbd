//! Many files, and large ones: each has its turn.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use claims::Owner;
use kmem::pageonefs::File as Listed;

use super::model::Calls;
use super::{Rounds, World, scan};
use crate::backend::module::contents::Contents;
use crate::backend::module::kernel::MountPoint;
use crate::backend::module::merge::Merge;
use crate::backend::module::mounts::{Files, Mount};
use crate::backend::module::numbers::{Holder, Numbers, Taken};
use crate::backend::module::round;
use crate::core::content::index::MAX_CLIENTS;
use crate::core::content::seed::Seed;

const ALL: u32 = MAX_CLIENTS - (1 << 12);

#[test]
fn whoever_comes_later_finds_a_number_and_whoever_has_the_most_gives_way() {
    let mut numbers = Numbers::default();
    let mut given = BTreeMap::new();
    let mut take = |numbers: &mut Numbers, mount, user, id| {
        let holder = Holder { mount, user: Owner::numbered(user), id };
        loop {
            match numbers.take(Some(holder)) {
                Ok(number) => return given.insert(holder, number).is_none(),
                Err(Taken::By(other)) => numbers.give_back(given.remove(&other).unwrap()),
                Err(Taken::ForGood) => return false,
            }
        }
    };
    assert_eq!((1..=70_000).filter(|&id| take(&mut numbers, 1, 1000, id)).count(), ALL as usize);
    assert_eq!((1..=70_000).filter(|&id| take(&mut numbers, 1, 1001, id)).count(), ALL as usize / 2, "a half each");
    // Many users of one mount have no more of what is another's than one has.
    let users = (2000..2600).flat_map(|user| (1..=200).map(move |id| (user, id)));
    users.for_each(|(user, id)| _ = take(&mut numbers, 2, user, id));
    assert_eq!((1..=70_000).filter(|&id| take(&mut numbers, 3, 7, id)).count(), ALL as usize / 3);
    let of = |mount| given.keys().filter(|holder| holder.mount == mount).count() as u32;
    assert!([1, 2, 3].iter().all(|&mount| of(mount).abs_diff(ALL / 3) <= 1), "{:?}", [1, 2, 3].map(of));
    let of_user = |user| given.keys().filter(|holder| holder.user == Owner::numbered(user)).count() as u32;
    assert!(of_user(1000).abs_diff(of_user(1001)) <= 1);
    assert!((2000..2600).all(|user| of_user(user).abs_diff(ALL / 3 / 600) <= 1));
    let newest = given.keys().filter(|holder| holder.mount == 3).map(|holder| holder.id).max();
    assert!(newest <= Some(u64::from(ALL / 3) + 1), "its first ones stay");
    let own = std::iter::from_fn(|| numbers.take(None).ok()).count();
    assert_eq!(own, 1 << 12, "kept for segments");
    given.into_values().for_each(|number| numbers.give_back(number));
    assert_eq!(std::iter::from_fn(|| numbers.take(None).ok()).count() as u32, ALL);
}

/// Files of a mount that nobody has mounted.
fn of_mount() -> Files {
    let files = Files::default();
    let point = MountPoint { path: "/nowhere".into(), device: 1, ..MountPoint::default() };
    files.state.lock().mounts.insert(1, Mount::new(point, Arc::new(Contents::new(Seed::random()))));
    files
}

fn take_in(files: &Files, listed: &[Listed]) {
    files.take_in(1, listed);
}

fn listed(ids: impl Iterator<Item = u64>, uid: u32) -> Vec<Listed> {
    let of = |id| {
        let mut listed = super::listed(id, 1);
        (listed.inode, listed.uid, listed.private_pages) = (7 * id, uid, 1);
        listed
    };
    ids.map(of).collect()
}

#[test]
fn files_come_and_go_and_no_user_takes_the_numbers_of_all() {
    let files = of_mount();
    // All together have more than there are numbers.
    let users =
        |uids: std::ops::Range<u32>| uids.flat_map(|uid| listed((0..5000).map(|at| u64::from(uid) << 16 | at), uid));
    let mut all: Vec<Listed> = users(1000..1020).collect();
    all.iter_mut().for_each(|listed| listed.private_pages = 0);
    take_in(&files, &all);
    let of = |files: &Files| {
        let told = files.tell().swap_remove(0);
        (told.files.len(), told.left_out.values().sum::<u64>(), told.left_out.len())
    };
    assert_eq!(of(&files), (0, 0, 0), "files without pages have none");
    all.iter_mut().for_each(|listed| listed.merged_pages = 1);
    take_in(&files, &all);
    take_in(&files, &all);
    assert_eq!(of(&files), (ALL as usize, 100_000 - u64::from(ALL), 20));
    // Whoever comes then finds some.
    let more = [all.clone(), listed((0..2000).map(|at| 2000 << 16 | at), 2000)].concat();
    take_in(&files, &more);
    assert!(!files.tell()[0].left_out.contains_key(&Owner::of(2000)));
    assert_eq!(of(&files).0, ALL as usize);
    // Those that are left take the places of those that go.
    take_in(&files, &more[60_000..]);
    assert_eq!(of(&files), (42_000, 0, 0));
    let inodes: Vec<u64> = files.state.lock().mounts[&1].inodes.keys().copied().collect();
    assert_eq!((inodes.len(), inodes[0]), (42_000, 7 * (1012 << 16)));
    take_in(&files, &[]);
    assert_eq!(of(&files), (0, 0, 0));
    let mut state = files.state.lock();
    assert_eq!(
        std::iter::from_fn(|| state.numbers.take(None).ok()).count(),
        MAX_CLIENTS as usize,
        "all were given back"
    );
}

#[test]
fn a_file_that_has_no_pages_for_a_while_gives_its_number_back() {
    let files = of_mount();
    let mut all = listed(1..3, 0);
    take_in(&files, &all);
    all[0].private_pages = 0;
    (0..7).for_each(|_| take_in(&files, &all));
    let kept = files.tell()[0].files.len();
    all[0].merged_pages = 1;
    take_in(&files, &all);
    all[0].merged_pages = 0;
    (0..7).for_each(|_| take_in(&files, &all));
    assert_eq!((kept, files.tell()[0].files.len()), (2, 2), "it had some meanwhile");
    take_in(&files, &all);
    assert_eq!(files.tell()[0].files.len(), 1);
    all[0].merged_pages = 1;
    take_in(&files, &all);
    assert_eq!(files.tell()[0].files.len(), 2);
}

#[test]
fn it_is_looked_again_for_first_pages_ever_more_rarely() {
    let files = Files::default();
    let after = |newest| {
        let mut state = files.state.lock();
        (state.looked, state.look) = (Some(Instant::now()), None);
        state.look_again(newest);
        state.look.map(|look| (look - state.looked.unwrap()).as_secs())
    };
    assert_eq!(after(None), None);
    assert_eq!(after(Some(6)), Some(1));
    assert_eq!(
        [6; 8].map(|newest| after(Some(newest))),
        [2, 4, 8, 16, 32, 64, 0, 0].map(|pause| (pause > 0).then_some(pause))
    );
    assert_eq!(after(Some(9)), Some(1), "a new one");
    (0..10_000).for_each(|_| _ = after(Some(9)));
}

#[test]
fn a_file_that_gets_another_length_is_the_same_file() {
    let files = of_mount();
    take_in(&files, &listed(1..2, 0));
    let before = files.tell()[0].files[0].clone();
    for size in [1 << 60, 0, 5, 1 << 30] {
        let mut listed = listed(1..2, 0);
        listed[0].size = size;
        take_in(&files, &listed);
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

#[test]
fn the_same_pages_in_many_files_cost_a_call_of_each_kind_for_each_file() {
    const PAGES: u64 = 1200;
    let calls = |files: u64| {
        let pages = |file: u64| (file..PAGES).step_by(files as usize).map(|page| 1 + page % 50).collect::<Vec<u64>>();
        let world = World::new(&(0..files).map(pages).collect::<Vec<_>>(), 10_000);
        world.rounds(4);
        let model = world.fake.0.lock();
        assert_eq!(model.files.values().flatten().filter(|page| page.frame.is_some()).count() as u64, PAGES);
        model.calls
    };
    let few = calls(10);
    assert!((few.harvests, few.words, few.digests) == (40, 80, 10) && few.merges <= 20, "{few:?}");
    let many = Calls { harvests: 4 * PAGES, words: 4 * PAGES, digests: PAGES, merges: PAGES };
    assert_eq!(calls(PAGES), many);
}
