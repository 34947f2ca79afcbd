use proptest::prelude::*;

use super::*;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(prop_oneof![Just(0u8), Just(1), Just(0x80), any::<u8>()], 0..90)
}

/// Heads cut down to nothing, to something behind the fingerprint, to something in it, and whole;
/// and those of an ordered tree.
fn mixers() -> [Mixer; 5] {
    let [a, b, c, d] = [0, 0xff << 24, 0xff << 40, u64::MAX].map(|mask| Mixer { mask, ..Mixer::new(1) });
    [a, b, c, d, Mixer::ordered()]
}

#[test]
fn positions() {
    let mixer = Mixer::new(1);
    let key = mixer.with_head(1 << 63 | 1 << 16, &[0b1010_0101, 0xff]);
    let all = |range: std::ops::Range<u16>| range.map(|position| key.bit(position)).collect::<Vec<_>>();
    assert_eq!((FAR, BYTES, LENGTH), (48, 112, 32_880), "as the module's page says");
    assert_eq!((key.bit(0), key.bit(1), key.bit(47)), (1, 0, 1));
    let far = mixer.far_head(key.bytes);
    assert!((0..64).all(|i| key.bit(48 + i) as u64 == far >> (63 - i) & 1), "the far head");
    assert_eq!(all(112..120), [1, 0, 1, 0, 0, 1, 0, 1]);
    assert_eq!((key.bit(127), key.bit(128), key.bit(LENGTH - 1)), (1, 0, 0), "past the end");
    assert_eq!(all(LENGTH + 60..LENGTH + 64), [0, 0, 1, 0], "the length, 2");
    assert_eq!((key.bit(LENGTH + 64), key.bit(u16::MAX)), (0, 0), "past the end");
}

#[test]
fn the_last_bit_of_the_longest_key() {
    let a = vec![0; MAX_KEY_LEN];
    let mut b = a.clone();
    b[MAX_KEY_LEN - 1] = 1;
    let [mixer, ..] = mixers();
    assert_eq!(first_difference(&mixer.key(&a), &mixer.key(&b)), Some(112 + 32767));
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
    assert_eq!(mixer.examined(&[0; 8]), 64);
    assert!(mixer.examined(&random_page(1)) < 4096 * 8 / 25, "under 4 %");
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
            let slow = (0..=u16::MAX).find(|&position| a.bit(position) != b.bit(position));
            prop_assert_eq!(first_difference(&a, &b), slow);
            if slow.is_none_or(|slow| slow >= FINGERPRINT_END as u16) {
                let recorded = slow.filter(|&slow| slow < FINGERPRINT_END as u16 + RECORDED as u16);
                prop_assert_eq!(a.recorded_difference(b.recorded()), recorded);
            }
            prop_assert_eq!(slow.is_none(), a.bytes == b.bytes);
        }
    }
}
