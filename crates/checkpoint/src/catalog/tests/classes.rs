//! A pool with a staging class.

use mpool::MediaClass;

use super::*;

/// Mblocks of a class, and of them those that hold pages.
fn of(pool: &Pool, class: MediaClass) -> (usize, usize) {
    let catalog = Catalog::open(pool).unwrap();
    let all: Vec<u64> = pool.mblocks().iter().filter(|m| m.class == class).map(|m| m.id).collect();
    (all.len(), all.iter().filter(|id| catalog.data.contains_key(id)).count())
}

#[test]
fn new_pages_maps_and_what_is_beside_lie_in_staging_and_repacking_moves_earlier_pages_on() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("slow"), "classes").unwrap();
    pool.add_class(MediaClass::Staging, &dir.path().join("fast")).unwrap();
    store(&pool, "few-1", &[1, 2, 3, 4]);
    store(&pool, "few-2", &[1, 2, 5, 6]);
    assert_eq!(of(&pool, MediaClass::Capacity), (0, 0), "all is new");
    Catalog::open(&pool).unwrap().repack(None).unwrap();
    assert_eq!(of(&pool, MediaClass::Capacity), (1, 1), "the pages of the first one moved");
    assert_eq!(of(&pool, MediaClass::Staging).1, 1, "those that only the newest has stay");
    assert!(of(&pool, MediaClass::Staging).0 > 1, "and so do maps, and what is kept beside");
    Catalog::open(&pool).unwrap().repack(None).unwrap();
    assert_eq!(of(&pool, MediaClass::Staging).1, 1, "once more moves nothing");
    for (name, seeds) in [("few-1", [1, 2, 3, 4]), ("few-2", [1, 2, 5, 6])] {
        assert!(load(&pool, name) == pages_of(&seeds), "{name}");
    }
    assert!(pool.check(mpool::Depth::Data).unwrap().is_clean());
}

#[test]
fn without_a_staging_class_all_lies_in_capacity() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "classes").unwrap();
    store(&pool, "one", &[1, 2, 3]);
    assert_eq!(of(&pool, MediaClass::Capacity).1, 1);
    assert!(load(&pool, "one") == pages_of(&[1, 2, 3]));
}
