//! Far heads: a keyed hash of all bytes of a key.
//!
//! NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC", CRYPTO 1999) with words of 64 bits, and a
//! multilinear hash (Lemire, Kaser: "Strongly universal string hashing is fast", 2014) of its sum.
//! Two different keys have the same sum with a probability of about 2⁻⁶⁴; of different sums any two
//! hashes are independent. So for any set of *n* keys that is chosen without knowing the secrets, a
//! trie of the hashes has at most log₂ *n* + 2 nodes on the way to a key, on average over the
//! secrets.

use super::MAX_KEY_LEN;
use crate::prefetch::{LINE, prefetch};

/// Bytes of a pair of words.
const PAIR: usize = 16;

/// The secrets of a tree: 4 KiB.
pub(super) struct FarMixer {
    words: [[u64; 2]; MAX_KEY_LEN / PAIR],
    last: [u128; 4],
}

impl FarMixer {
    /// `random`: a number for each number.
    pub(super) fn new(random: impl Fn(u64) -> u64) -> Self {
        let words = std::array::from_fn(|i| [random(2 * i as u64), random(2 * i as u64 + 1)]);
        let wide = |i: u64| u128::from(random(1 << 32 | i)) << 64 | u128::from(random(1 << 33 | i));
        Self { words, last: [0, 1, 2, 3].map(wide) }
    }

    /// The hash of a key. Bytes beyond [`MAX_KEY_LEN`] are not read.
    pub(super) fn mix(&self, bytes: &[u8]) -> u64 {
        // A long key usually comes from memory, and the processor's own prefetching starts late.
        bytes.chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
        let (pairs, rest) = bytes.as_chunks::<PAIR>();
        let mut last = [0; PAIR];
        last[..rest.len()].copy_from_slice(rest);
        let (mut even, mut odd) = (0u128, 0u128);
        let (keys, single) = self.words.as_chunks::<2>();
        debug_assert!(single.is_empty());
        let (double, more) = pairs.as_chunks::<2>();
        for (pairs, keys) in double.iter().zip(keys) {
            even = even.wrapping_add(product(&pairs[0], &keys[0]));
            odd = odd.wrapping_add(product(&pairs[1], &keys[1]));
        }
        let rest = more.iter().chain([&last]).zip(self.words.iter().skip(2 * double.len()));
        let sum = rest.fold(even.wrapping_add(odd), |sum, (pair, keys)| sum.wrapping_add(product(pair, keys)));
        let [first, low, high, len] = self.last;
        let part = |secret: u128, word: u64| secret.wrapping_mul(u128::from(word));
        let hash = part(low, sum as u64).wrapping_add(part(high, (sum >> 64) as u64));
        (hash.wrapping_add(part(len, bytes.len() as u64)).wrapping_add(first) >> 64) as u64
    }
}

#[inline(always)]
fn product(pair: &[u8; PAIR], keys: &[u64; 2]) -> u128 {
    let both = u128::from_le_bytes(*pair);
    let [a, b] = [(both as u64).wrapping_add(keys[0]), ((both >> 64) as u64).wrapping_add(keys[1])];
    u128::from(a) * u128::from(b)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_the_length_count() {
        let mixer = FarMixer::new(|i| crate::tests::Random(i).next());
        for len in [0, 1, 15, 16, 17, 31, 32, 33, 100, 4080, 4095, MAX_KEY_LEN] {
            let key = vec![0; len];
            let mut seen = std::collections::HashSet::from([mixer.mix(&key)]);
            if len < MAX_KEY_LEN {
                assert!(seen.insert(mixer.mix(&[&key[..], &[0]].concat())), "{len} and a zero");
            }
            for bit in 0..8 * len {
                let mut key = key.clone();
                key[bit / 8] ^= 1 << (bit % 8);
                assert!(seen.insert(mixer.mix(&key)), "bit {bit} of {len} bytes");
            }
        }
        assert_ne!(mixer.mix(&[1; 8]), FarMixer::new(|i| i).mix(&[1; 8]), "keyed");
    }
}
