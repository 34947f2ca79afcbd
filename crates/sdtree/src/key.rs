//! Keys as rows of bits.
//!
//! A key is read as its *head*, its length, and its bytes:
//!
//! | positions | bits |
//! |---|---|
//! | 0 to 63 | the head: a mix of a few of the key's words |
//! | 64 to 127 | the length in bytes |
//! | 128 to 32,895 | the bytes, most significant bit first |
//!
//! All of it is a function of the key, and contains the key's bytes. Different keys therefore
//! differ at some position.
//!
//! The head keeps the trie balanced, whatever the keys look like. Without it, keys that start with
//! zeros of random length would make a comb as deep as the zeros are long. With it, only keys that
//! agree in all words of the head branch at their own bits, and at the first one that differs. All
//! words of a key of up to 64 bytes go into the head. Of a longer key these go into it: eight
//! words, evenly spread, among them the first and the last; the length of the *run* at its start;
//! and the word behind the run. The run ends at the first byte that differs from the one eight
//! bytes before it: zeros, or any fill pattern of up to eight bytes. For a page that does not begin
//! with a run these are eight cache lines of 64, or 1.8 % of its bits.

use std::array;

/// The longest key that a tree takes, in bytes.
pub const MAX_KEY_LEN: usize = 4096;

/// The longest key, in bytes, of which all words go into the head.
const SHORT: usize = 64;
/// Words of a long key that go into its head.
const SAMPLES: usize = 8;
/// Bytes of a word.
const WORD: usize = 8;
/// Bytes between the places at the start of a long key where its run is probed first.
const STRIDE: usize = 32;
/// Places that are probed.
const STRIDES: usize = 8;
/// Bytes of a key that probing reads.
const PROBED: usize = STRIDES * STRIDE + WORD;

/// The first position of the length.
const LENGTH: u16 = 64;
/// The first position of the bytes.
const BYTES: u16 = 128;

/// The numbers that heads are mixed with. They differ from tree to tree, so that an attacker cannot
/// choose keys with equal heads.
pub(crate) struct Mixer {
    secrets: [u64; SAMPLES + 1],
    /// Bits of the head that count; the others are 0. Tests make heads equal with it.
    #[cfg(any(test, fuzzing, feature = "check"))]
    pub(crate) mask: u64,
}

/// A key and its head.
#[derive(Copy, Clone)]
pub(crate) struct Key<'k> {
    pub(crate) head: u64,
    pub(crate) bytes: &'k [u8],
}

/// The folded product: each bit of the result depends on all bits of both numbers.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |&word| u64::from_le_bytes(word))
}

/// The length in bytes of the run at the start of a key of more than [`SHORT`] bytes.
///
/// It is probed coarsely and then finely, both without a branch. A branch that the processor
/// predicts wrongly, while the bytes are still on their way from memory, costs as much as fetching
/// them. A deviation between the probed places does not end a run.
#[inline]
fn run(bytes: &[u8]) -> usize {
    let first = word(bytes, 0);
    let Some(start) = bytes.first_chunk::<PROBED>() else { return long_run(bytes, WORD) };
    let unlike = |at: usize| word(start, at) ^ first;
    let coarse: u32 = (1..=STRIDES).fold(0, |mask, i| mask | u32::from(unlike(i * STRIDE) != 0) << i);
    if coarse == 0 {
        return long_run(bytes, PROBED);
    }
    let begin = (coarse.trailing_zeros() as usize - 1) * STRIDE;
    let fine: u32 = (1..=STRIDE / WORD).fold(0, |mask, i| mask | u32::from(unlike(begin + i * WORD) != 0) << i);
    let at = begin + fine.trailing_zeros() as usize * WORD;
    at + unlike(at).trailing_zeros() as usize / 8
}

#[cold]
fn long_run(bytes: &[u8], from: usize) -> usize {
    from + common_prefix(&bytes[from..], &bytes[from - WORD..])
}

impl Mixer {
    pub(crate) fn new(seed: u64) -> Self {
        // The generator splitmix64. The numbers are odd, so that none is zero.
        let secrets = array::from_fn(|i| {
            let z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) | 1
        });
        Self {
            secrets,
            #[cfg(any(test, fuzzing, feature = "check"))]
            mask: u64::MAX,
        }
    }

    /// The key with its head.
    #[inline]
    pub(crate) fn key<'k>(&self, bytes: &'k [u8]) -> Key<'k> {
        let head = self.head(bytes);
        #[cfg(any(test, fuzzing, feature = "check"))]
        let head = head & self.mask;
        Key { head, bytes }
    }

    #[cfg(not(loom))]
    #[inline]
    fn head(&self, bytes: &[u8]) -> u64 {
        let s = &self.secrets;
        let (mixed, run, after) = if bytes.len() > SHORT {
            let step = (bytes.len() - WORD) / (SAMPLES - 1);
            let sample = |i: usize| s[i] ^ word(bytes, if i == SAMPLES - 1 { bytes.len() - WORD } else { i * step });
            let pair = |i| fold(sample(i), sample(i + 1));
            let run = run(bytes);
            (pair(0) ^ pair(2) ^ pair(4) ^ pair(6), run, word(bytes, run.min(bytes.len() - WORD)))
        } else {
            let (words, rest) = bytes.as_chunks::<WORD>();
            let mut last = [0; WORD];
            last[..rest.len()].copy_from_slice(rest);
            let words = words.iter().chain((!rest.is_empty()).then_some(&last));
            let mix = |mixed, (i, &word): (usize, &[u8; WORD])| mixed ^ fold(s[i] ^ u64::from_le_bytes(word), s[i + 1]);
            (words.enumerate().fold(0, mix), 0, 0)
        };
        let shape = (run as u64) << 32 | bytes.len() as u64;
        fold(mixed ^ fold(after ^ s[0], s[SAMPLES] ^ shape), s[1])
    }

    /// In models the head is the key's first bytes, so that a model can choose the shape of its
    /// tree.
    #[cfg(loom)]
    fn head(&self, bytes: &[u8]) -> u64 {
        let _ = (&self.secrets, common_prefix, fold, word, SHORT);
        bytes.iter().take(WORD).enumerate().fold(0, |head, (i, &byte)| head | u64::from(byte) << (56 - 8 * i))
    }

    /// The byte offsets of the words that go into the head of a key of this length, for
    /// prefetching.
    #[inline]
    pub(crate) fn samples(len: usize) -> impl Iterator<Item = usize> {
        let (count, step) = if len > SHORT { (SAMPLES, (len - WORD) / (SAMPLES - 1)) } else { (len.min(1), 0) };
        (0..count).map(move |i| if i == SAMPLES - 1 { len - WORD } else { i * step })
    }

    /// The number of bits of the key that are read for its head.
    pub(crate) fn examined(bytes: &[u8]) -> u64 {
        let examined = match bytes.len() {
            len @ 0..=SHORT => len,
            len @ ..PROBED => SAMPLES * WORD + (run(bytes) + WORD).min(len),
            // The samples; the coarse and the fine steps, which share one word; the word behind the
            // run.
            len => {
                let long = run(bytes).saturating_sub(PROBED);
                (SAMPLES + STRIDES + STRIDE / WORD) * WORD + long.min(len)
            }
        };
        examined as u64 * 8
    }
}

impl Key<'_> {
    /// The bit at `position`: 0 or 1.
    #[inline]
    pub(crate) fn bit(&self, position: u16) -> usize {
        if position < LENGTH { (self.head >> (63 - position)) as usize & 1 } else { self.far_bit(position) }
    }

    #[cold]
    fn far_bit(&self, position: u16) -> usize {
        if position < BYTES {
            return self.bytes.len() >> (BYTES - 1 - position) & 1;
        }
        let at = position - BYTES;
        self.bytes.get(usize::from(at >> 3)).map_or(0, |byte| usize::from(byte >> (7 - (at & 7)) & 1))
    }
}

/// The first position at which the two keys differ; `None` if they are equal. At least one of them
/// is at most [`MAX_KEY_LEN`] bytes long.
pub(crate) fn first_difference(a: &Key<'_>, b: &Key<'_>) -> Option<u16> {
    let head = a.head ^ b.head;
    if head != 0 {
        return Some(head.leading_zeros() as u16);
    }
    let length = a.bytes.len() as u64 ^ b.bytes.len() as u64;
    if length != 0 {
        return Some(LENGTH + length.leading_zeros() as u16);
    }
    let same = common_prefix(a.bytes, b.bytes);
    let (x, y) = (a.bytes.get(same)?, b.bytes.get(same)?);
    Some(BYTES + (same * 8) as u16 + (x ^ y).leading_zeros() as u16)
}

/// The number of leading bytes that the two slices share.
#[inline]
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let (a_words, _) = a[..len].as_chunks::<WORD>();
    let (b_words, _) = b[..len].as_chunks::<WORD>();
    for (i, (x, y)) in a_words.iter().zip(b_words).enumerate() {
        let difference = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if difference != 0 {
            return i * WORD + difference.trailing_zeros() as usize / 8;
        }
    }
    let done = a_words.len() * WORD;
    done + a[done..len].iter().zip(&b[done..len]).take_while(|(x, y)| x == y).count()
}

#[cfg(all(test, not(loom)))]
mod tests;
