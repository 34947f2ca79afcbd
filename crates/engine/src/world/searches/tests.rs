use super::*;

#[test]
fn searches_of_one_user_are_counted_and_given_back() {
    let shared = Arc::new(crate::world::shared::tests::shared());
    let begin = || Search::begin(&shared, Some(Owner::of(7)));
    let mut searches: Vec<_> = (0..SEARCHES).map_while(|_| begin()).collect();
    assert_eq!(searches.len(), SEARCHES as usize);
    assert!(begin().is_none(), "one too many");
    assert!(Search::begin(&shared, Some(Owner::of(8))).is_some(), "of another user");
    searches.pop();
    assert!(begin().is_some() && searches[0].goes_on());
    shared.stop();
    assert!(!searches[0].goes_on(), "nobody waits for it");
    drop(searches);
    assert!(shared.searches.lock().is_empty());
}
