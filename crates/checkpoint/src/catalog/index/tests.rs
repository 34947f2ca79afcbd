//! The index over data mblocks that are hashes only.

use std::collections::BTreeMap;

use super::*;

/// Data mblocks by identity.
#[derive(Default)]
struct Hashes(BTreeMap<u64, Vec<u128>>);

impl Known for Hashes {
    fn pages(&self, mblock: u64) -> u32 {
        self.0.get(&mblock).map_or(0, |hashes| hashes.len() as u32)
    }

    fn hashes(&self, mblock: u64) -> Result<Vec<u128>, PageFlaw> {
        Ok(self.0[&mblock].clone())
    }
}

/// A hash that looks like one.
fn hash(number: u64) -> u128 {
    xxhash_rust::xxh3::xxh3_128_with_seed(&number.to_le_bytes(), 3)
}

/// Adds mblocks of hashes that the index does not have; gives the first identity behind them.
fn add(index: &mut Index, known: &mut Hashes, from: u64, numbers: std::ops::Range<u64>, pages: usize) -> u64 {
    let all: Vec<u64> = numbers.collect();
    let mut id = from;
    for numbers in all.chunks(pages) {
        let hashes: Vec<u128> = numbers.iter().map(|number| hash(*number)).collect();
        known.0.insert(id, hashes.clone());
        for (page, hash) in hashes.into_iter().enumerate() {
            index.add(hash, id << 16 | page as u64, known).unwrap();
        }
        index.filled();
        id += 1;
    }
    id
}

fn found(index: &mut Index, known: &Hashes, numbers: std::ops::Range<u64>) -> usize {
    let hashes: Vec<Option<u128>> = numbers.map(|number| Some(hash(number))).collect();
    let batches = hashes.chunks(256).flat_map(|some| index.find_many(some, known).into_iter().zip(some));
    let right = |(at, hash): &(Option<u64>, &Option<u128>)| {
        at.is_some_and(|at| Some(known.0[&(at >> 16)][(at & 0xFFFF) as usize]) == **hash)
    };
    batches.filter(right).count()
}

const SMALL: Limits = Limits { entries: 1 << 20, collected: 3000, pieces: 64, lists: 2 };

#[test]
fn below_the_limit_everything_is_found_also_by_the_next_program() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut known = Hashes::default();
    let mut index = Index::new(&pool, SMALL, Vec::new(), 0);
    // Identities of data mblocks that no mblock of the index has.
    let end = add(&mut index, &mut known, 1 << 20, 0..40_000, 1000);
    assert_eq!(found(&mut index, &known, 0..40_000), 40_000);
    assert_eq!(found(&mut index, &known, 40_000..50_000), 0);
    let runs = index.write(&known).unwrap();
    assert_eq!(runs.iter().map(Run::entries).sum::<u64>(), 40_000);
    assert!(runs.windows(2).all(|two| two[1].entries() * 2 < two[0].entries()), "{runs:?}");
    assert_eq!(pool.mblocks().len(), runs.iter().map(|run| run.parts.len()).sum::<usize>(), "nothing is left over");
    assert_eq!(index.retired(), [0; 0]);
    let mut index = Index::new(&pool, SMALL, runs.clone(), 40_000);
    assert_eq!(found(&mut index, &known, 0..50_000), 40_000);
    // Some of it goes, and some comes.
    known.0.retain(|id, _| id % 3 != 0);
    let left: usize = known.0.values().map(Vec::len).sum();
    let mut index = Index::new(&pool, SMALL, runs.clone(), 40_000);
    assert_eq!(found(&mut index, &known, 0..40_000), left);
    add(&mut index, &mut known, end, 40_000..80_000, 1000);
    let later = index.write(&known).unwrap();
    assert_eq!(later.iter().map(Run::entries).sum::<u64>(), left as u64 + 40_000, "what is gone is left out");
    let mut old: Vec<u64> = runs.iter().flat_map(|run| &run.parts).map(|part| part.id).collect();
    assert!(old.iter().all(|id| pool.mblock(*id).is_ok()), "until the new runs are recorded");
    let mut retired = index.retired();
    retired.sort_unstable();
    old.sort_unstable();
    assert_eq!(retired, old);
    let mut index = Index::new(&pool, SMALL, later, left as u64 + 40_000);
    assert_eq!(found(&mut index, &known, 0..90_000), left + 40_000);
}

#[test]
fn above_the_limit_neighbours_are_found_by_samples() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut known = Hashes::default();
    let limits = Limits { entries: 10_000, lists: 4, ..SMALL };
    let mut index = Index::new(&pool, limits, Vec::new(), 0);
    add(&mut index, &mut known, 1 << 20, 0..160_000, 8000);
    let runs = index.write(&known).unwrap();
    let (entries, shift) = index.entries();
    assert!((4, true) == (shift, entries < 12_000), "{entries} {shift}");
    assert!(runs.iter().all(|run| run.shift == 4), "those with more were thinned: {runs:?}");
    let mut index = Index::new(&pool, limits, runs, 160_000);
    let all = found(&mut index, &known, 0..160_000);
    assert!(all >= 159_500, "in their order: {all}");
    // Every thousandth page alone has no neighbour.
    let alone = (0..160).filter(|i| found(&mut index, &known, i * 1000..i * 1000 + 1) == 1).count();
    println!("{all} of 160000 in order; {alone} of 160 alone");
    assert!(alone < 80, "4 of 20 mblocks are in memory: {alone}");
}

#[test]
fn memory_stays_within_the_limits() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut known = Hashes::default();
    let limits = Limits { entries: 1 << 20, collected: 5000, pieces: 3, lists: 3 };
    let mut index = Index::new(&pool, limits, Vec::new(), 0);
    let most = 3 * ((64 << 10) + 1024) + 3 * 8192 * 48 + 8192 * 20 + (64 << 10);
    let mut from = 1 << 20;
    for part in 0..10 {
        from = add(&mut index, &mut known, from, part * 20_000..part * 20_000 + 20_000, 2000);
        assert_eq!(found(&mut index, &known, 0..part * 20_000), part as usize * 20_000);
        assert!(index.memory() < most, "{} of {most}", index.memory());
    }
}

#[test]
fn of_two_pages_with_one_hash_the_later_one_counts() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let mut known = Hashes(BTreeMap::from([(100, vec![hash(1), hash(2)]), (200, vec![hash(2)])]));
    let mut index = Index::new(&pool, SMALL, Vec::new(), 0);
    for (id, hashes) in &known.0 {
        for (page, hash) in hashes.iter().enumerate() {
            index.enter(*hash, id << 16 | page as u64, &known).unwrap();
        }
        index.write(&known).unwrap();
    }
    assert_eq!(index.find(key(hash(2)), &known), Some(200 << 16));
    known.0.remove(&200);
    assert_eq!(index.find(key(hash(1)), &known), Some(100 << 16));
}
