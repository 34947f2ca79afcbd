use super::*;
use std::collections::HashSet;

fn contents(case: Case, pages: usize) -> Vec<Content> {
    (0..4).map(|client| Content::new(case, client, pages).unwrap()).collect()
}

#[test]
fn identity_decides_on_the_bytes() {
    let bytes = |content: &Content, page| {
        let mut words = vec![u64::MAX; WORDS];
        content.write(page, |word, value| words[word] = value);
        assert!((0..WORDS).all(|word| words[word] == content.word(page, word)));
        words
    };
    for case in [
        Case::Random,
        Case::ZeroPrefix,
        Case::Zero,
        Case::Clones,
        Case::Idle,
        Case::Steady,
        Case::Quarter,
        Case::Unique,
    ] {
        let contents = contents(case, 300);
        let pages = || contents.iter().flat_map(|client| (0..300).map(move |page| (client, page)));
        let identities: HashSet<_> = pages().map(|(client, page)| client.identity(page).unwrap()).collect();
        let distinct: HashSet<_> = pages().map(|(client, page)| bytes(client, page)).collect();
        assert_eq!(identities.len(), distinct.len(), "{case:?}");
        for (client, page) in pages() {
            let zero = bytes(client, page).iter().all(|&word| word == 0);
            assert_eq!(zero, client.identity(page) == Some(0), "{case:?}");
        }
    }
}

#[test]
fn reach_is_what_the_case_says() {
    let pages = 2 * STRETCH;
    let all = 4 * pages as u64;
    let clones = reach(&contents(Case::Clones, pages), false);
    assert_eq!(clones, Reach { resident: all, mergeable: all, zero: 0, frames: pages as u64 });
    assert_eq!(reach(&contents(Case::Clones, pages), true).mergeable, all - written(pages).count() as u64);
    assert_eq!(written(pages).count(), pages / 64);
    assert_eq!(reach(&contents(Case::Idle, pages), false).zero, all / 8);
    let unique = reach(&contents(Case::Steady, pages.min(UNIQUE)), false);
    assert_eq!(unique, Reach { resident: all, ..Reach::default() });
    let quarter = reach(&contents(Case::Quarter, pages), false);
    assert_eq!((quarter.mergeable, quarter.frames as usize), (all / 4, common(pages)));
    let zero = reach(&contents(Case::Zero, pages), false).zero;
    assert!(zero.abs_diff(all / 3) < all / 50, "{zero} of {all}");
    // Four draws for each of as many contents: a page is alone with probability e^-4.
    let random = reach(&contents(Case::Random, pages), false);
    let expected = all as f64 * (1.0 - (-4.0f64).exp());
    assert!((random.mergeable as f64 - expected).abs() < all as f64 / 100.0, "{random:?}");
    assert_eq!(random, reach(&contents(Case::ZeroPrefix, pages), false));
}

#[test]
fn duplicates_are_equal_where_their_seeds_are() {
    let mut contents = contents(Case::Steady, 300);
    contents[0].duplicate(10..20, 7);
    contents[1].duplicate(10..20, 7);
    contents[2].duplicate(10..20, 8);
    assert_eq!(reach(&contents, false).frames, 10);
    assert_eq!(contents[0].word(15, 3), contents[1].word(15, 3));
    assert_ne!(contents[0].word(15, 3), contents[2].word(15, 3));
    assert_ne!(contents[0].word(20, 3), contents[1].word(20, 3));
}

#[test]
fn prefixes_have_their_mean() {
    let content = Content::new(Case::ZeroPrefix, 0, STRETCH).unwrap();
    let lengths = (1..=STRETCH as u64).map(|identity| content.prefix(identity));
    let mean = lengths.sum::<usize>() as f64 / STRETCH as f64;
    assert!((mean - PREFIX).abs() < 8.0, "{mean}");
    assert_eq!(made(5, 2, 16), made(5, 2, 0));
    assert_eq!(made(5, 1, 16), 0);
    assert_eq!(made(5, 1, 11), made(5, 1, 0) & u64::MAX << 24);
}
