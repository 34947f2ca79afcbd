//! Keys as rows of bits.
//!
//! A key is read as its *head*, its *far head*, its bytes and its length:
//!
//! | positions | bits |
//! |---|---|
//! | 0 to 47 | the head: a mix of a few of the key's words |
//! | 48 to 111 | the far head: a keyed hash of all bytes |
//! | 112 to 32,879 | the bytes, most significant bit first, then zeros |
//! | 32,880 to 32,943 | the length in bytes |
//!
//! All of it is a function of the key, and contains the key's bytes. Different keys therefore
//! differ at some position.
//!
//! The head keeps the trie balanced, whatever the keys look like. Without it, keys that start with
//! zeros of random length would make a comb as deep as the zeros are long. All words of a key of up
//! to 64 bytes go into the head. Of a longer key these go into it: eight words, evenly spread,
//! among them the first and the last; the length of the *run* at its start; and the word behind the
//! run. The run ends at the first byte that differs from the one eight bytes before it: zeros, or
//! any fill pattern of up to eight bytes. For a page that does not begin with a run these are eight
//! cache lines of 64, or 1.8 % of its bits.
//!
//! Keys that agree in all words of the head have equal heads, and may be made on purpose. They
//! branch in the far head (module `far`), which is computed only for keys that come that far. So no
//! set of keys makes a comb, and keys that were not made to collide pay nothing for that.
//!
//! In an *ordered* tree nothing is mixed: the head is the key's first bytes, and the far head is
//! zero. Positions then follow the order of keys as byte strings: bytes after the end count as
//! zero, and of two keys that differ in such zeros only, the shorter one comes first.

use std::array;
use std::cell::Cell;

use self::far::FarMixer;
use crate::primitive::random_numbers;
use crate::word::FINGERPRINT_END;

mod far;

/// The longest key that a tree takes, in bytes.
pub const MAX_KEY_LEN: usize = 4096;

/// The longest key, in bytes, of which all words go into the head.
const SHORT: usize = 64;
/// Words of a long key that go into its head.
const SAMPLES: usize = 8;
const WORD: usize = 8;
/// Bytes between the places at the start of a long key where its run is probed first.
const STRIDE: usize = 32;
/// Places that are probed.
const STRIDES: usize = 8;
/// Bytes of a key that probing reads.
const PROBED: usize = STRIDES * STRIDE + WORD;

/// The first position of the far head: a head is 20 bits longer than what leaves tell of it.
pub(crate) const FAR: u16 = FINGERPRINT_END as u16 + 20;
/// The first position of the bytes.
const BYTES: u16 = FAR + 64;
/// The first position of the length.
const LENGTH: u16 = BYTES + 8 * MAX_KEY_LEN as u16;

/// Bits of a key that its record has (module `word`), and how many of them belong to the head.
const RECORDED: u32 = 40;
const RECORDED_HEAD: u32 = FAR as u32 - FINGERPRINT_END;

/// The numbers that heads are mixed with. They differ from tree to tree, so that an attacker cannot
/// choose keys with equal heads.
pub(crate) struct Mixer {
    secrets: [u64; SAMPLES + 1],
    /// For far heads; `None` in an ordered tree, which mixes nothing.
    far: Option<Box<FarMixer>>,
    /// Bits of both heads that count; the others are 0. Tests make heads equal with it.
    #[cfg(any(test, fuzzing, feature = "check"))]
    pub(crate) mask: u64,
}

/// A key and its head.
pub(crate) struct Key<'k> {
    /// The head begins at the most significant bit; those from [`FAR`] on are not used.
    pub(crate) head: u64,
    pub(crate) bytes: &'k [u8],
    mixer: &'k Mixer,
    /// The far head, once it was asked for.
    far: Cell<Option<u64>>,
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
            far: Some(Box::new(FarMixer::new(random_numbers()))),
            #[cfg(any(test, fuzzing, feature = "check"))]
            mask: u64::MAX,
        }
    }

    /// For a tree that keeps keys in their order.
    pub(crate) fn ordered() -> Self {
        Self { far: None, ..Self::new(0) }
    }

    pub(crate) fn is_ordered(&self) -> bool {
        self.far.is_none()
    }

    /// The key with its head.
    #[inline]
    pub(crate) fn key<'k>(&'k self, bytes: &'k [u8]) -> Key<'k> {
        let head = if self.is_ordered() { first_bytes(bytes) } else { self.head(bytes) };
        #[cfg(any(test, fuzzing, feature = "check"))]
        let head = head & self.mask;
        self.with_head(head, bytes)
    }

    /// The key `bytes`, which is said to have this head.
    #[inline]
    pub(crate) fn with_head<'k>(&'k self, head: u64, bytes: &'k [u8]) -> Key<'k> {
        Key { head, bytes, mixer: self, far: Cell::new(None) }
    }

    #[cold]
    pub(crate) fn far_head(&self, bytes: &[u8]) -> u64 {
        let far = self.far.as_ref().map_or(0, |far| far.mix(bytes));
        #[cfg(any(test, fuzzing, feature = "check"))]
        let far = far & self.mask;
        far
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
        first_bytes(bytes)
    }

    /// The byte offsets of the words that go into the head of a key of this length, for
    /// prefetching.
    #[inline]
    pub(crate) fn samples(len: usize) -> impl Iterator<Item = usize> {
        let (count, step) = if len > SHORT { (SAMPLES, (len - WORD) / (SAMPLES - 1)) } else { (len.min(1), 0) };
        (0..count).map(move |i| if i == SAMPLES - 1 { len - WORD } else { i * step })
    }

    /// The number of bits of the key that are read for its head.
    pub(crate) fn examined(&self, bytes: &[u8]) -> u64 {
        let examined = match bytes.len() {
            len if self.is_ordered() => len.min(WORD),
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
        if position < FAR { (self.head >> (63 - position)) as usize & 1 } else { self.far_bit(position) }
    }

    #[cold]
    fn far_bit(&self, position: u16) -> usize {
        match position {
            ..BYTES => (self.far() >> (BYTES - 1 - position)) as usize & 1,
            BYTES..LENGTH => {
                let at = position - BYTES;
                self.bytes.get(usize::from(at >> 3)).map_or(0, |byte| usize::from(byte >> (7 - (at & 7)) & 1))
            }
            _ => (LENGTH + 63).checked_sub(position).map_or(0, |shift| self.bytes.len() >> shift & 1),
        }
    }

    /// The far head.
    fn far(&self) -> u64 {
        self.far.get().unwrap_or_else(|| {
            let far = self.mixer.far_head(self.bytes);
            self.far.set(Some(far));
            far
        })
    }

    /// Whether the far head was computed, which reads all bytes.
    pub(crate) fn is_far(&self) -> bool {
        self.far.get().is_some() && !self.mixer.is_ordered()
    }

    /// The 40 bits behind the fingerprint: the rest of the head, and the first 20 bits of the far
    /// head.
    pub(crate) fn recorded(&self) -> u64 {
        let rest = (self.head << FINGERPRINT_END) >> (64 - RECORDED_HEAD);
        rest << (RECORDED - RECORDED_HEAD) | self.far() >> (64 - (RECORDED - RECORDED_HEAD))
    }

    /// The first position at which this key differs from another one of the same fingerprint, of
    /// which the recorded bits are known. `None`: not in these bits.
    pub(crate) fn recorded_difference(&self, recorded: u64) -> Option<u16> {
        // The far head is computed only if the heads are equal.
        let rest = (self.head << FINGERPRINT_END) >> (64 - RECORDED_HEAD);
        let head = rest ^ recorded >> (RECORDED - RECORDED_HEAD);
        if head != 0 {
            return Some((FINGERPRINT_END + head.leading_zeros() - (64 - RECORDED_HEAD)) as u16);
        }
        let difference = self.recorded() ^ recorded;
        let first = FINGERPRINT_END + difference.leading_zeros() - (64 - RECORDED);
        (difference != 0).then_some(first as u16)
    }
}

/// The first position at which the two keys differ; `None` if they are equal. At least one of them
/// is at most [`MAX_KEY_LEN`] bytes long.
pub(crate) fn first_difference(a: &Key<'_>, b: &Key<'_>) -> Option<u16> {
    let head = (a.head ^ b.head).leading_zeros() as u16;
    if head < FAR {
        return Some(head);
    }
    // Equal keys, which are likely, need no far heads.
    let bytes = byte_difference(a.bytes, b.bytes)?;
    match a.far() ^ b.far() {
        0 => Some(bytes),
        far => Some(FAR + far.leading_zeros() as u16),
    }
}

/// The first position at which the bytes or else the lengths differ.
fn byte_difference(a: &[u8], b: &[u8]) -> Option<u16> {
    let same = common_prefix(a, b);
    let at = |position: usize, difference: u8| Some(BYTES + (position * 8) as u16 + difference.leading_zeros() as u16);
    if let (Some(x), Some(y)) = (a.get(same), b.get(same)) {
        return at(same, x ^ y);
    }
    let longer = if a.len() > b.len() { a } else { b };
    if let Some(position) = longer.iter().take(MAX_KEY_LEN).skip(same).position(|&byte| byte != 0) {
        return at(same + position, longer[same + position]);
    }
    let length = a.len() as u64 ^ b.len() as u64;
    (length != 0).then(|| LENGTH + length.leading_zeros() as u16)
}

/// The first bytes, as the most significant ones of a number.
fn first_bytes(bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(first) => u64::from_be_bytes(*first),
        None => bytes.iter().zip((0..WORD).rev()).fold(0, |head, (&byte, at)| head | u64::from(byte) << (8 * at)),
    }
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
