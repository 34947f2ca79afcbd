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
//! All of it is a function of the key, and the bytes are there, so different keys differ somewhere.
//!
//! The head is what makes the trie balanced, whatever the keys look like. Without it, keys that
//! start with zeros of random length would make a comb as deep as the zeros are long; with it, only
//! keys that agree in all words that go into the head meet bits of their own, and then at the first
//! that differs. Of a key of up to 64 bytes all words go into the head; of a longer one eight,
//! evenly spread, among them the first and the last, then the length of the *run* at its start, and
//! the word that follows it. The run goes up to the first byte that is unlike the one eight bytes
//! before it: zeros, or any fill pattern of up to eight bytes. For a page that does not begin with
//! a run these are eight cache lines of 64, 1.8 % of its bits.

use std::array;

/// The longest key that a tree takes, in bytes.
pub const MAX_KEY_LEN: usize = 4096;

/// Up to this length, all of a key goes into its head.
const SHORT: usize = 64;
/// Words of a long key that go into its head.
const SAMPLES: usize = 8;
const WORD: usize = 8;
/// The start of a long key in which its run is looked for first, and the steps of that.
const STRIDE: usize = 32;
const STRIDES: usize = 8;
const PROBED: usize = STRIDES * STRIDE + WORD;

/// The first position of the length.
const LENGTH: u16 = 64;
/// The first position of the bytes.
const BYTES: u16 = 128;

/// What heads are mixed with: numbers that differ from tree to tree, so that nobody can choose keys
/// with equal heads.
pub(crate) struct Mixer {
    secrets: [u64; SAMPLES + 1],
    /// Bits of the head that count; the others are 0. A test makes heads equal with it.
    #[cfg(any(test, fuzzing, feature = "check"))]
    pub(crate) mask: u64,
}

/// A key and its head.
#[derive(Copy, Clone)]
pub(crate) struct Key<'k> {
    pub(crate) head: u64,
    pub(crate) bytes: &'k [u8],
}

/// The product, folded: each bit of the result depends on all bits of both.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |&word| u64::from_le_bytes(word))
}

/// The length of the run at the start of a key of more than [`SHORT`] bytes: where it ends.
///
/// Looked for coarsely and then finely, so that neither step makes the processor guess: a wrong
/// guess about bytes that are still on their way from memory costs as much as fetching them. A
/// deviation that both steps jump over does not end a run.
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
        // Digits of a spiral (splitmix64); odd, so that none is zero.
        let secrets = array::from_fn(|i| {
            let z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) | 1
        });
        Mixer {
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

    /// Models choose the shapes of their trees.
    #[cfg(loom)]
    fn head(&self, bytes: &[u8]) -> u64 {
        let _ = (&self.secrets, common_prefix, fold, word, SHORT);
        bytes.iter().take(WORD).enumerate().fold(0, |head, (i, &byte)| head | u64::from(byte) << (56 - 8 * i))
    }

    /// Where the words lie that go into the head of a key of this length, for prefetching.
    #[inline]
    pub(crate) fn samples(len: usize) -> impl Iterator<Item = usize> {
        let (count, step) = if len > SHORT { (SAMPLES, (len - WORD) / (SAMPLES - 1)) } else { (len.min(1), 0) };
        (0..count).map(move |i| if i == SAMPLES - 1 { len - WORD } else { i * step })
    }

    /// How many bits of the key are read for its head.
    pub(crate) fn examined(bytes: &[u8]) -> u64 {
        let examined = match bytes.len() {
            len @ 0..=SHORT => len,
            len @ ..PROBED => SAMPLES * WORD + (run(bytes) + WORD).min(len),
            // Samples; the coarse and the fine steps, which have one word in common; the word after
            // the run.
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

/// The first position at which the two keys differ; `None` if they are equal. One of them is at
/// most [`MAX_KEY_LEN`] long.
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

/// How many leading bytes the two slices share, within the shorter one.
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(prop_oneof![Just(0u8), Just(1), Just(0x80), any::<u8>()], 0..90)
    }

    /// Heads cut down to nothing, to something, and whole.
    fn mixers() -> [Mixer; 3] {
        [0, 0xff << 40, u64::MAX].map(|mask| Mixer { mask, ..Mixer::new(1) })
    }

    #[test]
    fn positions() {
        let key = Key { head: 1 << 63 | 1, bytes: &[0b1010_0101, 0xff] };
        let all = |range: std::ops::Range<u16>| range.map(|position| key.bit(position)).collect::<Vec<_>>();
        assert_eq!((key.bit(0), key.bit(1), key.bit(63)), (1, 0, 1));
        assert_eq!(all(124..128), [0, 0, 1, 0], "the length, 2");
        assert_eq!(all(128..136), [1, 0, 1, 0, 0, 1, 0, 1]);
        assert_eq!((key.bit(143), key.bit(144), key.bit(u16::MAX)), (1, 0, 0), "past the end");
    }

    #[test]
    fn the_last_bit_of_the_longest_key() {
        let a = vec![0; MAX_KEY_LEN];
        let mut b = a.clone();
        b[MAX_KEY_LEN - 1] = 1;
        let [mixer, ..] = mixers();
        assert_eq!(first_difference(&mixer.key(&a), &mixer.key(&b)), Some(128 + 32767));
        assert_eq!(first_difference(&mixer.key(&a), &mixer.key(&a)), None);
    }

    #[test]
    fn heads_tell_apart_what_they_should() {
        let mixer = Mixer::new(1);
        let page = vec![7u8; MAX_KEY_LEN];
        let heads = |change: &dyn Fn(usize, &mut Vec<u8>)| -> usize {
            let head = |i| {
                let mut page = page.clone();
                change(i, &mut page);
                mixer.key(&page).head
            };
            (0..1000).map(head).collect::<std::collections::BTreeSet<_>>().len()
        };
        let put = |page: &mut Vec<u8>, at: usize, i: usize| page[at..at + 8].copy_from_slice(&(i as u64).to_le_bytes());
        assert_eq!(heads(&|i, page| put(page, 0, i)), 1000, "the first word");
        assert_eq!(heads(&|i, page| put(page, MAX_KEY_LEN - 8, i)), 1000, "the last word");
        assert_eq!(heads(&|i, page| page[270 + 3 * i] = 8), 1000, "the length of the run");
        assert_eq!(heads(&|i, page| put(page, 8 * (i % 20) + 300, i << 8 | 1)), 1000, "the word after it");
        assert_eq!(heads(&|i, page| page.truncate(MAX_KEY_LEN - i)), 1000, "the length");
        assert_eq!(heads(&|i, page| (page[0], page[1000]) = (9, i as u8)), 1, "a byte that is not looked at");
        let short = |i: u64| mixer.key(&i.to_le_bytes()).head;
        assert_eq!((0..1000).map(short).collect::<std::collections::BTreeSet<_>>().len(), 1000);
        assert_ne!(mixer.key(&[]).head, mixer.key(&[0]).head);
        assert_ne!(mixer.key(&[1]).head, Mixer::new(2).key(&[1]).head);
    }

    #[test]
    fn samples_are_where_the_head_looks() {
        let mixer = Mixer::new(1);
        for len in [65, 71, 100, 4095, 4096] {
            let at: Vec<usize> = Mixer::samples(len).collect();
            assert_eq!(at.len(), SAMPLES);
            for at in at {
                let mut page = vec![3; len];
                page[0] = 4; // no run
                let before = mixer.key(&page).head;
                page[at] ^= 2;
                assert_ne!(mixer.key(&page).head, before, "{at} of {len}");
            }
        }
        assert_eq!(Mixer::samples(8).collect::<Vec<_>>(), [0]);
        assert_eq!(Mixer::examined(&[0; 8]), 64);
        assert!(Mixer::examined(&random_page(1)) < 4096 * 8 / 25, "under 4 %");
    }

    fn random_page(seed: u64) -> Vec<u8> {
        let mut random = crate::tests::Random(seed);
        (0..MAX_KEY_LEN).map(|_| random.next() as u8).collect()
    }

    /// Runs of any length and period end where they end, as long as what comes after is not like
    /// them.
    #[test]
    fn runs() {
        for (period, len) in [1usize, 2, 4, 8].into_iter().flat_map(|p| (8..600).map(move |len| (p, len))) {
            let mut page = random_page(len as u64);
            let fill: Vec<u8> = page[..period].to_vec();
            (0..len).for_each(|i| page[i] = fill[i % period]);
            page[len] = page[len - 8] ^ 1;
            assert_eq!(run(&page), len, "period {period}");
            for cut in [65, 100, 264, 265] {
                let exact = (8..cut).find(|&i| page[i] != page[i - 8]).unwrap_or(cut);
                assert_eq!(run(&page[..cut]), exact, "period {period}, run {len}, cut at {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn first_difference_is_the_first(a in bytes(), b in bytes()) {
            for mixer in mixers() {
                let (a, b) = (mixer.key(&a), mixer.key(&b));
                let slow = (0..2000u16).find(|&position| a.bit(position) != b.bit(position));
                prop_assert_eq!(first_difference(&a, &b), slow);
                prop_assert_eq!(slow.is_none(), a.bytes == b.bytes);
            }
        }
    }
}
