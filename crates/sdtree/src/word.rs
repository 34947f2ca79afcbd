//! The link word.
//!
//! ```text
//!  bit   63 ───────── 48 47 ────────────── 4   3     2     1      0
//!       ┌───────────────┬───────────────────┬─────┬─────┬──────┬──────┐
//!       │ position, 16  │ node address / 16 │  0  │ TAG │  0   │ LEAF │   inner node: LEAF = 0
//!       ├───────────────┴───────┬───────────┼─────┼─────┼──────┼──────┤
//!       │ handle, 40            │ finger-   │ LIST│ TAG │ FLAG │ LEAF │   leaf:       LEAF = 1
//!       │                       │ print, 20 │     │     │      │      │
//!       └───────────────────────┴───────────┴─────┴─────┴──────┴──────┘
//!        63 ───────────────── 24 23 ────── 4
//! ```
//!
//! A *record* is a node of one key only: a key that came so far that its far head was computed. Its
//! link 0 leads to the key's leaf. Its link 1 is a removed leaf, of the same fingerprint, with
//! further bits of the key in place of the handle. All keys have bit 0 at a record's position, so a
//! search needs to know nothing of records.
//!
//! The position of a node is in the link that leads to it, so that the node itself is two links and
//! nothing else. Nodes are aligned to 16 bytes and lie below 2⁴⁸. The kernel places all mappings
//! there unless a process requests higher addresses.

/// The link leads to a leaf.
pub(crate) const LEAF: u64 = 1;
/// The leaf that this link leads to has been removed. Only on leaf links.
pub(crate) const FLAG: u64 = 2;
/// This link will not change any more: its node is being unlinked, or its slot is being moved to
/// another directory.
pub(crate) const TAG: u64 = 4;
/// Not a leaf but the link of a list of nodes. It reads as a removed leaf, because searches may
/// still meet it.
const LIST: u64 = 8;

/// A slot of a directory that nothing was ever stored in.
pub(crate) const VACANT: u64 = 0;
/// A slot that is known to be empty: a removed leaf.
pub(crate) const EMPTY: u64 = LEAF | FLAG;
/// The position of a [record](self), after those of all bits.
pub(crate) const RECORD: u16 = u16::MAX;
/// In debug builds, a word of a free node, which no search may read.
pub(crate) const POISON: u64 = LIST;
/// The end of a list of nodes.
pub(crate) const NIL: u64 = LEAF | FLAG | LIST;

/// The first bit of a key's head that is part of the fingerprint. The least number of bits of a
/// directory.
pub(crate) const FINGERPRINT_START: u32 = if cfg!(loom) { 1 } else { 8 };
const FINGERPRINT_BITS: u32 = 20;
/// The first position after the fingerprint. The greatest number of bits of a directory.
pub(crate) const FINGERPRINT_END: u32 = FINGERPRINT_START + FINGERPRINT_BITS;

const FINGERPRINT_SHIFT: u32 = 4;
const HANDLE_SHIFT: u32 = FINGERPRINT_SHIFT + FINGERPRINT_BITS;
const FINGERPRINT_MASK: u64 = (1 << HANDLE_SHIFT) - (1 << FINGERPRINT_SHIFT);
pub(crate) const MAX_HANDLE: u64 = u64::MAX >> HANDLE_SHIFT;
const POSITION_SHIFT: u32 = 48;
const ADDRESS_MASK: u64 = (1 << POSITION_SHIFT) - 16;

/// Whether a node may lie at this address.
pub(crate) fn is_address(address: u64) -> bool {
    address & !ADDRESS_MASK == 0 && address != 0
}

/// A link to the inner node at `address`, which branches at `position`.
#[inline]
pub(crate) fn inner(address: u64, position: u16) -> u64 {
    debug_assert!(is_address(address));
    u64::from(position) << POSITION_SHIFT | address
}

/// A link to the leaf `handle`, whose key has this head.
#[inline]
pub(crate) fn leaf(handle: u64, head: u64) -> u64 {
    debug_assert!(handle <= MAX_HANDLE);
    let fingerprint = (head << FINGERPRINT_START) >> (64 - FINGERPRINT_BITS);
    handle << HANDLE_SHIFT | fingerprint << FINGERPRINT_SHIFT | LEAF
}

#[inline]
pub(crate) fn is_record(word: u64) -> bool {
    is_inner(word) && position(word) == RECORD
}

#[inline]
pub(crate) fn is_inner(word: u64) -> bool {
    debug_assert!(word & (LEAF | LIST) != POISON, "{word:#x}: the word of a free node was read");
    word & LEAF == 0 && word & !TAG != VACANT
}

/// The address of an inner link's node, or of a list link's.
#[inline]
pub(crate) fn address(word: u64) -> u64 {
    word & ADDRESS_MASK
}

#[inline]
pub(crate) fn position(word: u64) -> u16 {
    (word >> POSITION_SHIFT) as u16
}

#[inline]
pub(crate) fn handle(word: u64) -> u64 {
    word >> HANDLE_SHIFT
}

#[inline]
pub(crate) fn same_fingerprint(a: u64, b: u64) -> bool {
    (a ^ b) & FINGERPRINT_MASK == 0
}

/// The first position at which the fingerprints of two leaves differ.
#[inline]
pub(crate) fn fingerprint_difference(a: u64, b: u64) -> Option<u16> {
    let difference = (a ^ b) & FINGERPRINT_MASK;
    let first = FINGERPRINT_START + difference.leading_zeros() - (64 - HANDLE_SHIFT);
    (difference != 0).then_some(first as u16)
}

/// The bit of a leaf's head at `position`, which lies in the fingerprint.
#[inline]
pub(crate) fn fingerprint_bit(word: u64, position: u32) -> usize {
    debug_assert!((FINGERPRINT_START..FINGERPRINT_END).contains(&position));
    (word >> (HANDLE_SHIFT - 1 - (position - FINGERPRINT_START))) as usize & 1
}

/// What a leaf and its slot tell of its key's head: `first_bits` are the slot's, as the most
/// significant bits of a number.
pub(crate) fn known_head(first_bits: u64, leaf: u64) -> u64 {
    let fingerprint = (leaf & FINGERPRINT_MASK) << (64 - HANDLE_SHIFT) >> FINGERPRINT_START;
    first_bits & !(u64::MAX >> FINGERPRINT_START) | fingerprint
}

/// A link in a list of unlinked or free nodes: the next node is at `address`, and the list's link
/// behind that is in its word `side`.
#[inline]
pub(crate) fn list(address: u64, side: usize) -> u64 {
    debug_assert!(is_address(address));
    (side as u64) << POSITION_SHIFT | address | NIL
}

#[inline]
pub(crate) fn is_list(word: u64) -> bool {
    word & NIL == NIL
}

#[inline]
pub(crate) fn list_side(word: u64) -> usize {
    (word >> POSITION_SHIFT) as usize & 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch() {
        let node = inner(ADDRESS_MASK, u16::MAX);
        assert!(is_inner(node) && is_inner(node | TAG) && !is_inner(VACANT) && !is_inner(VACANT | TAG));
        assert_eq!((address(node), position(node), node & (FLAG | TAG | LEAF)), (ADDRESS_MASK, u16::MAX, 0));
        let key = leaf(MAX_HANDLE, u64::MAX);
        assert!(!is_inner(key) && !is_list(key | FLAG | TAG));
        assert_eq!((handle(key), key & (FLAG | TAG)), (MAX_HANDLE, 0));
        assert!(same_fingerprint(key | FLAG, leaf(0, u64::MAX)));
        let link = list(0x7fff_ffff_fff0, 1);
        assert!(is_list(link) && is_list(link | TAG) && link & FLAG != 0);
        assert_eq!((address(link), list_side(link), list_side(list(16, 0))), (0x7fff_ffff_fff0, 1, 0));
        assert!(!is_address(0) && !is_address(1 << 48) && !is_address(8));
    }

    #[test]
    fn a_fingerprint_is_a_piece_of_the_head() {
        let head = 0x0012_3456_789a_bcde_u64;
        let word = leaf(7, head);
        for position in FINGERPRINT_START..FINGERPRINT_END {
            assert_eq!(fingerprint_bit(word, position) as u64, (head >> (63 - position)) & 1);
            let other = leaf(9, head ^ 1 << (63 - position));
            assert_eq!(known_head(head, other), (head ^ 1 << (63 - position)) >> 36 << 36);
            assert_eq!(fingerprint_difference(word, other), Some(position as u16));
        }
        for outside in [0, FINGERPRINT_START - 1, FINGERPRINT_END, 63] {
            assert_eq!(fingerprint_difference(word, leaf(7, head ^ 1 << (63 - outside))), None);
        }
    }
}
