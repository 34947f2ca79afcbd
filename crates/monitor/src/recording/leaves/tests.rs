use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Any value of a given shape: an array of four leaves, one in an object.
fn moments() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-1e6..1e6f64).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    (prop::collection::vec(leaf.clone(), 3), leaf).prop_map(|(items, last)| json!([items, { "a": last, "b": [] }]))
}

proptest! {
    #[test]
    fn a_difference_makes_the_new_moment_of_the_old(mut old in moments(), mut new in moments()) {
        round(&mut old);
        round(&mut new);
        let changes = difference(&old, &new).unwrap();
        apply(&mut old, &changes).unwrap();
        prop_assert_eq!(old, new);
    }

    #[test]
    fn arbitrary_changes_are_applied_or_refused(mut old in moments(), changes in prop::collection::vec(any::<u8>(), 0..40)) {
        let _ = apply(&mut old, &changes);
        let _ = inflate(&changes);
    }
}

#[test]
fn small_changes_are_small_and_another_shape_has_no_difference() {
    let old = json!({ "a": [1_000_000, 2, 3], "cpu": 17.25, "name": "web" });
    let new = json!({ "a": [1_000_001, 2, 3], "cpu": 17.26, "name": "web" });
    assert_eq!(difference(&old, &new).unwrap().len(), 3 + 4);
    assert!(difference(&old, &old).unwrap().is_empty());
    for other in [json!({ "a": [1, 2], "cpu": 1, "name": 2 }), json!({ "a": [1, 2, 3], "cpu": 1, "nam": 2 }), json!(7)]
    {
        assert_eq!(difference(&old, &other), None);
    }
    assert_eq!(apply(&mut json!([1]), &[1, NULL]), Err(Malformed), "a leaf that is not there");
}

#[test]
fn a_bomb_does_not_inflate() {
    assert_eq!(inflate(&deflate(&vec![0; MAX_PAYLOAD + 1])), Err(Malformed));
    assert_eq!(inflate(&deflate(&[7; 100])).unwrap(), [7; 100]);
}
