use wire::RegionId;

use super::*;
use crate::core::content::index::Seen;

#[test]
fn a_sighting_goes_when_its_page_changes_unless_a_page_is_about_to_use_the_content() {
    let contents = Contents::new(Seed::random());
    let there = Sighting { client: ClientId(3), region: RegionId(0), page: PageNo(5) };
    let Some(Seen::First(handle)) = contents.index.add(9, Place::Sighted(there)) else { panic!("known") };
    assert!(contents.enter(handle));
    contents.unsight(handle, there);
    assert_eq!(contents.index.place(handle, 9), Some(Place::Sighted(there)));
    contents.leave(handle);
    assert_eq!(contents.index.place(handle, 9), Some(Place::Sighted(there)), "it is there still");
    contents.unsight(handle, there);
    assert_eq!((contents.index.get(handle), contents.index.len()), (None, 0));
}

#[test]
fn a_content_is_forgotten_with_its_last_user_and_not_before() {
    let contents = Contents::new(Seed::random());
    let Some(Seen::First(handle)) = contents.index.add(9, Place::Below(1)) else { panic!("known") };
    assert!(contents.enter(handle) && contents.enter(handle));
    contents.leave(handle);
    assert!(contents.index.change(handle, Place::Below(1), Place::Below(2)));
    assert_eq!(contents.index.place(handle, 9), Some(Place::Below(2)));
    contents.leave(handle);
    assert_eq!((contents.index.get(handle), contents.index.len()), (None, 0));
    contents.leave(handle);
    assert!(contents.enter(handle), "the handle can be another content's");
}

#[test]
fn users_that_come_and_go_at_once_leave_nothing_behind() {
    let contents = Contents::new(Seed::random());
    let turns = |from: u64| {
        for turn in 0..20_000u64 {
            let digest = 1 + (turn + from) % 3;
            let handle = match contents.index.see(digest, Place::Below(digest)) {
                Some(Seen::First(handle) | Seen::Known(handle)) => handle,
                None => panic!("the index is full"),
            };
            if contents.enter(handle) {
                contents.leave(handle);
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|from| drop(scope.spawn(move || turns(from)))));
    // What was seen and never entered stays: nobody has left it.
    for digest in 1..=3 {
        if let Some(Seen::Known(handle) | Seen::First(handle)) = contents.index.see(digest, Place::Below(digest)) {
            assert!(contents.enter(handle));
            contents.leave(handle);
        }
        assert!(matches!(contents.index.see(digest, Place::Below(digest)), Some(Seen::First(_))), "{digest}");
    }
}

#[test]
fn a_content_costs_under_one_percent_of_its_page() {
    let (contents, count) = (Contents::new(Seed::random()), 1u64 << 20);
    for number in 0..count {
        let digest = xxhash_rust::xxh3::xxh3_64_with_seed(&number.to_ne_bytes(), contents.seed.get()) & !1;
        let Some(Seen::First(handle)) = contents.index.see(digest, Place::Below(number)) else { continue };
        assert!(contents.enter(handle));
    }
    let of_one = contents.bytes() as f64 / contents.index.len() as f64;
    println!("{of_one:.1} bytes for each of {} contents", contents.index.len());
    assert!(of_one < kmem::PAGE_SIZE as f64 / 100.0);
}
