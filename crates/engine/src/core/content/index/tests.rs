use super::*;

fn sighting(page: u32) -> Sighting {
    Sighting { client: ClientId(MAX_CLIENTS - 1), region: RegionId(MAX_REGIONS - 1), page: PageNo(page) }
}

#[test]
fn places_survive_their_word() {
    for place in [Place::Sighted(sighting(u32::MAX)), Place::Sighted(sighting(0)), Place::Frame(Frame(u32::MAX))] {
        assert_eq!(Place::from_word(place.word()), Some(place));
    }
    assert_eq!(Place::from_word(0), None);
}

#[test]
fn the_second_sighting_finds_the_first_and_promotes_it_once() {
    let index = Index::new();
    let Some(Seen::First(handle)) = index.see(42, Place::Sighted(sighting(1))) else { panic!("first") };
    assert_eq!(index.see(42, Place::Sighted(sighting(2))), Some(Seen::Known(handle)));
    assert_eq!(index.place(handle, 42), Some(Place::Sighted(sighting(1))));
    assert_eq!(index.place(handle, 43), None, "another content");
    assert!(index.promote(handle, sighting(1), Frame(5)));
    assert!(!index.promote(handle, sighting(1), Frame(6)), "only once");
    assert_eq!(index.place(handle, 42), Some(Place::Frame(Frame(5))));
    assert!(!index.forget(handle, Place::Sighted(sighting(1))), "it is a frame now");
    assert!(index.forget(handle, Place::Frame(Frame(5))));
    assert!(matches!(index.see(42, Place::Sighted(sighting(3))), Some(Seen::First(_))));
}

#[test]
fn neighbours_are_found_together() {
    let index = Index::new();
    for digest in 10..20u64 {
        index.see(digest * 3, Place::Sighted(sighting(digest as u32)));
    }
    let digests: Vec<u64> = [30, 33, 34, 39, 57, 0].into();
    let mut found = Vec::new();
    for hint in [0, 1, 7, u32::MAX - 1] {
        index.find(&digests, hint, &mut found);
        assert_eq!(found, [Some(0), Some(1), None, Some(3), Some(9), None], "hint {hint}");
    }
}

#[test]
fn a_chunk_whose_contents_are_all_forgotten_takes_no_memory_and_is_used_again() {
    let index = Index::new();
    let all = 3 * u64::from(CHUNK);
    let see = |digest: u64| match index.see(digest, Place::Sighted(sighting(digest as u32))) {
        Some(Seen::First(handle)) => handle,
        other => panic!("{other:?}"),
    };
    let handles: Vec<u32> = (1..=all).map(see).collect();
    assert_eq!(index.slots().bytes(), all * 16);
    let forget = |at: usize| assert!(index.forget(handles[at], Place::Sighted(sighting(at as u32 + 1))));
    (CHUNK as usize..2 * CHUNK as usize).for_each(forget);
    assert_eq!(index.slots().bytes(), all * 16 * 2 / 3);
    assert_eq!(index.get(handles[CHUNK as usize]), None, "a late reader finds nothing");
    (0..10).for_each(forget);
    assert_eq!(see(all + 1), CHUNK, "freed ones of the first chunk still rest");
    assert!(index.is(CHUNK, all + 1) && index.is(handles[10], 11));
    assert_eq!(index.len(), all - u64::from(CHUNK) - 10 + 1);
}

#[test]
fn a_freed_handle_is_not_reused_at_once() {
    let index = Index::new();
    let Some(Seen::First(handle)) = index.see(1, Place::Sighted(sighting(1))) else { panic!("first") };
    assert!(index.forget(handle, Place::Sighted(sighting(1))));
    for digest in 2..100 {
        assert_ne!(index.see(digest, Place::Sighted(sighting(1))), Some(Seen::First(handle)));
    }
}
