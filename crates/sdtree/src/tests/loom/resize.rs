//! Growing and shrinking beside every other operation.

use super::*;

/// Growing beside each other operation: `a`, `b` and `c`'s node becomes two slots.
fn grow_beside(one: fn(&Tree), last: fn(&Tree)) {
    two_from(3, growing, one, |t| resize(t, 2), last);
}

#[test]
fn grow_beside_insert() {
    fn put(tree: &Tree) {
        assert_eq!(insert(tree, D), Insert::Inserted);
        assert!(found(tree, D));
    }
    grow_beside(put, |t| holds(t, &[A, B, C, D], &[]));
}

#[test]
fn grow_beside_remove_below() {
    grow_beside(|t| assert!(remove(t, A)), |t| holds(t, &[B, C], &[A]));
}

#[test]
fn grow_beside_remove_at_the_slot() {
    grow_beside(|t| assert!(remove(t, C)), |t| holds(t, &[A, B], &[C]));
}

#[test]
fn grow_beside_query() {
    grow_beside(|t| assert!(found(t, A) && found(t, B) && found(t, C)), |t| holds(t, &[A, B, C], &[]));
}

#[test]
fn grow_beside_walk() {
    fn walk(tree: &Tree) {
        let mut seen = 0;
        tree.for_each(|_| seen += 1);
        assert_eq!(seen, 3);
    }
    grow_beside(walk, |t| holds(t, &[A, B, C], &[]));
}

#[test]
fn grow_beside_grow() {
    grow_beside(|t| resize(t, 2), |t| holds(t, &[A, B, C], &[]));
}

/// A slot without a node at the new bit: the fingerprint of a leaf that is being removed tells the
/// side.
#[test]
fn grow_by_the_fingerprint() {
    two_from(3, || tree_of(1, &[A, B]), |t| assert!(remove(t, A)), |t| resize(t, 2), |t| holds(t, &[B], &[A]));
}

/// The leaf that is asked may be in a node that was just unlinked, where a list's link took its
/// place.
#[test]
fn grow_by_the_fingerprint_of_a_sibling() {
    let last: fn(&Tree) = |t| holds(t, &[F, G], &[C]);
    two_from(3, || tree_of(1, &[C, F, G]), |t| assert!(remove(t, C)), |t| resize(t, 2), last);
}

/// The node that became two slots is swept and used again, beside a query that may be at it.
#[test]
fn query_beside_sweep() {
    static SWEPT: Count = Count::new();
    fn change(tree: &Tree) {
        resize(tree, 2);
        insert(tree, D);
        for key in [C, A, C, A, C] {
            if !remove(tree, key) {
                insert(tree, key);
            }
        }
        if tree.left.load(loom::sync::atomic::Ordering::Relaxed).is_null() {
            SWEPT.more();
        }
    }
    two_from(3, growing, |t| assert!(found(t, B)), change, |t| holds(t, &[A, B, D], &[C]));
    assert!(SWEPT.any());
}

/// Shrinking beside each other operation: `c`'s slot is joined with that of `a` and `b`, whose node
/// is copied.
fn shrink_beside(one: fn(&Tree), last: fn(&Tree)) {
    two_from(2, shrinking, one, |t| resize(t, 1), last);
}

#[test]
fn shrink_beside_insert() {
    fn put(tree: &Tree) {
        assert_eq!(insert(tree, D), Insert::Inserted);
        assert!(found(tree, D));
    }
    shrink_beside(put, |t| holds(t, &[A, B, C, D], &[]));
}

#[test]
fn shrink_beside_remove_below() {
    shrink_beside(|t| assert!(remove(t, A)), |t| holds(t, &[B, C], &[A]));
}

#[test]
fn shrink_beside_remove_at_the_slot() {
    shrink_beside(|t| assert!(remove(t, C)), |t| holds(t, &[A, B], &[C]));
}

#[test]
fn shrink_beside_query() {
    shrink_beside(|t| assert!(found(t, A) && found(t, B) && found(t, C)), |t| holds(t, &[A, B, C], &[]));
}

#[test]
fn shrink_beside_shrink() {
    shrink_beside(|t| resize(t, 1), |t| holds(t, &[A, B, C], &[]));
}

/// The left directory and its nodes are dropped, beside a query that may be in it.
#[test]
fn query_beside_drop() {
    static DROPPED: Count = Count::new();
    fn change(tree: &Tree) {
        resize(tree, 1);
        for key in [C, C, C, C] {
            if !remove(tree, key) {
                insert(tree, key);
            }
        }
        if tree.doomed.load(loom::sync::atomic::Ordering::Relaxed).is_null() {
            DROPPED.more();
        }
    }
    two_from(3, shrinking, |t| assert!(found(t, B)), change, |t| holds(t, &[A, B, C], &[]));
    assert!(DROPPED.any());
}
