//! The link word.
//!
//! ```text
//!  bit   63 ────────────── 24 23 ───────── 3   2     1     0
//!       ┌────────────────────┬──────────────┬─────┬──────┬──────┐
//!       │ node index, 40 bits│ position, 16 │ TAG │ FLAG │ LEAF │   inner node: LEAF = 0
//!       │ handle, 40 bits    │ fingerprint  │ TAG │ FLAG │ LEAF │   leaf:       LEAF = 1
//!       └────────────────────┴──────────────┴─────┴──────┴──────┘
//! ```
//!
//! The position of a node stands in the link that leads to it, so that the node itself is two links and nothing else.
//! Node 0 is never used: the word 0 ([`EMPTY`]) is the root of a tree without keys.

/// The link leads to a leaf.
pub(crate) const LEAF: u64 = 1;
/// The leaf that this link leads to has been removed. Only on leaf links.
pub(crate) const FLAG: u64 = 2;
/// The node that holds this link is being unlinked: the link will not change any more.
pub(crate) const TAG: u64 = 4;

/// The root of an empty tree.
pub(crate) const EMPTY: u64 = 0;

/// Width of a fingerprint.
pub(crate) const FINGERPRINT_BITS: u32 = 21;
const MIDDLE_SHIFT: u32 = 3;
const PAYLOAD_SHIFT: u32 = MIDDLE_SHIFT + FINGERPRINT_BITS;
/// The greatest node index, and the greatest handle.
pub(crate) const MAX_PAYLOAD: u64 = u64::MAX >> PAYLOAD_SHIFT;

/// A link to the inner node `index`, which branches at `position`.
#[inline]
pub(crate) fn inner(index: u64, position: u16) -> u64 {
    debug_assert!(index != 0 && index <= MAX_PAYLOAD);
    index << PAYLOAD_SHIFT | u64::from(position) << MIDDLE_SHIFT
}

/// A link to the leaf `handle`; the fingerprint's low [`FINGERPRINT_BITS`] count.
#[inline]
pub(crate) fn leaf(handle: u64, fingerprint: u64) -> u64 {
    debug_assert!(handle <= MAX_PAYLOAD);
    handle << PAYLOAD_SHIFT | (fingerprint & ((1 << FINGERPRINT_BITS) - 1)) << MIDDLE_SHIFT | LEAF
}

/// Whether the word leads to an inner node ([`EMPTY`] does not).
#[inline]
pub(crate) fn is_inner(word: u64) -> bool {
    word & LEAF == 0 && word != EMPTY
}

/// The node index of an inner link, the handle of a leaf.
#[inline]
pub(crate) fn payload(word: u64) -> u64 {
    word >> PAYLOAD_SHIFT
}

/// The position at which the node of an inner link branches.
#[inline]
pub(crate) fn position(word: u64) -> u16 {
    (word >> MIDDLE_SHIFT) as u16
}

/// Whether two leaf links have the same fingerprint.
#[inline]
pub(crate) fn same_fingerprint(a: u64, b: u64) -> bool {
    (a ^ b) & (((1 << FINGERPRINT_BITS) - 1) << MIDDLE_SHIFT) == 0
}

/// A link in a list of unlinked or free nodes: the list goes on at node `index`, whose next such link is in its
/// word `side`. Index 0 ends the list.
///
/// It reads as a removed leaf, because searches may still come by: see `nodes`.
#[inline]
pub(crate) fn list(index: u64, side: usize) -> u64 {
    index << PAYLOAD_SHIFT | (side as u64) << MIDDLE_SHIFT | FLAG | LEAF
}

/// The side of a [`list`] link.
#[inline]
pub(crate) fn list_side(word: u64) -> usize {
    (word >> MIDDLE_SHIFT) as usize & 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch() {
        let node = inner(MAX_PAYLOAD, u16::MAX);
        assert!(is_inner(node) && !is_inner(EMPTY));
        assert_eq!((payload(node), position(node), node & (FLAG | TAG)), (MAX_PAYLOAD, u16::MAX, 0));
        let key = leaf(MAX_PAYLOAD, u64::MAX);
        assert!(!is_inner(key));
        assert_eq!((payload(key), key & (FLAG | TAG)), (MAX_PAYLOAD, 0));
        assert!(same_fingerprint(key | FLAG, leaf(0, u64::MAX)));
        assert!(!same_fingerprint(key, leaf(MAX_PAYLOAD, 1 << 20)));
        assert_ne!(leaf(0, 0), EMPTY);
        let link = list(7, 1);
        assert_eq!((payload(link), list_side(link), link & (FLAG | LEAF | TAG)), (7, 1, FLAG | LEAF));
    }
}
