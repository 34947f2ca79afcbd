use super::*;

/// A host: its processes with their users, and how many descriptors each has.
struct Host {
    processes: Vec<(u32, i32, usize)>,
    walk: Walk,
    /// In the last round: what was looked at, by process.
    looked: BTreeMap<i32, usize>,
    /// Rounds in which it was asked for all processes.
    asked: usize,
}

impl Host {
    fn new(processes: &[(u32, i32, usize)]) -> Self {
        Self { processes: processes.to_vec(), walk: Walk::default(), looked: BTreeMap::new(), asked: 0 }
    }

    /// Returns how many descriptors were looked at.
    fn round(&mut self, missing: &[u64], turns: usize) -> usize {
        let Self { processes, walk, looked, asked } = self;
        looked.clear();
        let seen = std::cell::Cell::new(0);
        let all = || {
            *asked += 1;
            processes.iter().map(|&(user, pid, _)| (Owner::of(user), pid)).collect()
        };
        let look = |turn: &Turn| {
            seen.set(seen.get() + 1);
            let all = processes.iter().find(|process| process.1 == turn.pid).map_or(0, |process| process.2);
            let descriptors = turn.most.min(all - turn.from as usize);
            *looked.entry(turn.pid).or_default() += descriptors;
            let end = turn.from as usize + descriptors;
            Looked { descriptors, next: (end < all).then_some(end as i64) }
        };
        walk.go_on(missing.iter().map(|&inode| (1, inode)).collect(), all, look, || seen.get() == turns);
        looked.values().sum()
    }
}

#[test]
fn a_round_looks_at_so_many_descriptors_and_the_next_one_goes_on() {
    let mut host = Host::new(&[(7, 1, 10 * ROUND)]);
    let mut all = 0;
    for _ in 0..10 {
        let looked = host.round(&[1], usize::MAX);
        assert!(looked <= ROUND && looked > ROUND - 2 * TURN, "{looked}");
        all += looked;
    }
    assert!(all > 9 * ROUND, "{all}");
    // Processes without descriptors cost something, too.
    let mut host = Host::new(&(0..3 * ROUND as i32).map(|pid| (7, pid, 0)).collect::<Vec<_>>());
    host.round(&[1], usize::MAX);
    assert_eq!(host.looked.len(), ROUND);
}

#[test]
fn who_has_many_descriptors_or_processes_holds_up_no_other_user() {
    let mut host = Host::new(&[(0, 5, 300), (9, 7000, 20), (9, 7001, TURN + 20)]);
    host.processes.extend((0..1000).map(|n| (3, 100 + n, 100_000)));
    host.round(&[1], usize::MAX);
    assert_eq!((host.looked[&5], host.looked[&7000], host.looked[&7001]), (300, 20, TURN + 20));
    // A guest that comes later, while that user's walk goes on.
    host.processes.push((9, 8000, 40));
    host.round(&[1, 2], usize::MAX);
    assert_eq!((host.looked[&7000], host.looked[&8000]), (20, 40));
}

#[test]
fn a_walk_in_which_the_last_owner_was_found_goes_on_to_its_end() {
    let mut host = Host::new(&[(7, 1, 2 * ROUND), (7, 2, 3)]);
    let mut looked = host.round(&[1], usize::MAX);
    for _ in 0..3 {
        looked += host.round(&[], usize::MAX);
    }
    assert_eq!((looked, host.asked), (2 * ROUND + 3, 1));
    assert_eq!((host.round(&[], usize::MAX), host.asked), (0, 1));
}

#[test]
fn it_ends_when_the_engine_stops() {
    let mut host = Host::new(&(0..1000).map(|pid| (7, pid, 5)).collect::<Vec<_>>());
    assert_eq!(host.round(&[1], 3), 15);
}

#[test]
fn for_files_that_nobody_has_open_it_begins_less_and_less_often() {
    let mut host = Host::new(&[(0, 5, 300)]);
    let mut begins = |missing: &[u64], rounds| {
        let before = host.asked;
        (0..rounds).for_each(|_| _ = host.round(missing, usize::MAX));
        host.asked - before
    };
    assert_eq!(begins(&[1, 2], 1), 1);
    assert_eq!(begins(&[1, 2], 80), 12);
    assert_eq!(begins(&[2], 80), 10, "one was found");
    assert_eq!(begins(&[2, 3], 1), 1, "at once for a new one");
    assert_eq!((begins(&[], 80), begins(&[2], 1)), (0, 1));
}
