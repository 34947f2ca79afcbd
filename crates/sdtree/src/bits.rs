//! Keys as rows of bits.
//!
//! Each byte of a key gives nine bits: a 1 that says "there is a byte", then its eight bits, most significant
//! first. After the last byte come zeros without end. So keys of different lengths differ somewhere, even where one is
//! a prefix of the other, and the position of the first difference is a place to branch at.
//!
//! A position is numbered `16 · byte + k`: `k` = 0 is the presence bit, `k` = 1 to 8 are the byte's bits (9 to
//! 15 are not used). With keys of at most 4096 bytes a position fits 16 bits.

/// The longest key that a tree takes, in bytes.
pub const MAX_KEY_LEN: usize = 4096;

/// The bit of `key` at `position`: 0 or 1.
#[inline]
pub(crate) fn bit(key: &[u8], position: u16) -> usize {
    let nine = key.get(usize::from(position >> 4)).map_or(0, |&byte| 0x100 | usize::from(byte));
    (nine >> (8 - (position & 15))) & 1
}

/// The first position at which the two keys differ; `None` if they are equal.
///
/// Keys longer than [`MAX_KEY_LEN`] count as cut there (no such key gets into a tree).
#[inline]
pub(crate) fn first_difference(a: &[u8], b: &[u8]) -> Option<u16> {
    let len = a.len().min(b.len()).min(MAX_KEY_LEN);
    let same = common_prefix(&a[..len], &b[..len]);
    if same < len {
        let within = 1 + (a[same] ^ b[same]).leading_zeros() as u16;
        return Some((same as u16) << 4 | within);
    }
    // Positions end before MAX_KEY_LEN; two keys that share that much and are no longer are equal.
    (a.len() != b.len() && len < MAX_KEY_LEN).then_some((len as u16) << 4)
}

/// How many leading bytes the two slices, of equal length, share.
#[inline]
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let (a_words, _) = a.as_chunks::<8>();
    let (b_words, _) = b.as_chunks::<8>();
    for (i, (x, y)) in a_words.iter().zip(b_words).enumerate() {
        let difference = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if difference != 0 {
            return i * 8 + difference.trailing_zeros() as usize / 8;
        }
    }
    let done = a_words.len() * 8;
    done + a[done..].iter().zip(&b[done..]).take_while(|(x, y)| x == y).count()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(prop_oneof![Just(0u8), Just(1), Just(0x80), any::<u8>()], 0..20)
    }

    #[test]
    fn bits_of_a_byte() {
        let all: Vec<usize> = (0..9).map(|position| bit(&[0b1010_0101], position)).collect();
        assert_eq!(all, [1, 1, 0, 1, 0, 0, 1, 0, 1]);
        assert_eq!(bit(&[0xff], 16), 0, "past the end");
    }

    #[test]
    fn ends_of_the_longest_key() {
        let a = vec![0; MAX_KEY_LEN];
        let mut b = a.clone();
        b[MAX_KEY_LEN - 1] = 1;
        assert_eq!(first_difference(&a, &b), Some(65528));
        assert_eq!(first_difference(&a, &a[..MAX_KEY_LEN - 1]), Some(65520));
        assert_eq!(first_difference(&a, &a), None);
        assert_eq!(first_difference(&a, &[&a[..], &[1]].concat()), None, "cut");
    }

    proptest! {
        #[test]
        fn first_difference_is_the_first(a in key(), b in key()) {
            let slow = (0..400u16).filter(|p| p & 15 < 9).find(|&p| bit(&a, p) != bit(&b, p));
            prop_assert_eq!(first_difference(&a, &b), slow);
            prop_assert_eq!(slow.is_none(), a == b);
        }
    }
}
