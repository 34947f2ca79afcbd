use super::*;
use std::collections::BTreeMap;

/// A number that looks random (splitmix64's mixer).
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn see(index: &Index, reserved: &mut Reserved, target: u16, digests: &[u64]) -> Vec<Seen> {
    let mut seen = Vec::new();
    for batch in digests.chunks(64) {
        let mut some = Vec::new();
        index.see(batch, target, reserved, &mut some);
        seen.extend(some);
    }
    seen
}

#[test]
fn counts_are_exact_for_each_target() {
    let index = Index::new(1 << 30);
    let mut model: BTreeMap<u64, BTreeMap<u16, u64>> = BTreeMap::new();
    for target in 0..4u16 {
        let mut reserved = Reserved::default();
        let digests: Vec<u64> = (0..20_000).map(|i| mix(mix(i + u64::from(target) * 77) % 3000)).collect();
        see(&index, &mut reserved, target, &digests);
        digests.iter().for_each(|&d| *model.entry(d).or_default().entry(target).or_default() += 1);
    }
    let mut seen: Vec<Vec<(u16, u64)>> = Vec::new();
    index.for_each(|weight, sightings| {
        assert_eq!(weight, 1.0);
        seen.push(sightings.iter().rev().copied().collect());
    });
    let mut expected: Vec<Vec<(u16, u64)>> = model.into_values().map(|counts| counts.into_iter().collect()).collect();
    seen.sort();
    expected.sort();
    assert_eq!(seen, expected);
}

#[test]
fn threads_count_together() {
    let index = Index::new(1 << 30);
    for target in 0..3 {
        std::thread::scope(|scope| {
            for me in 0..3u64 {
                let index = &index;
                scope.spawn(move || {
                    let digests: Vec<u64> = (0..30_000).map(|i| mix((i + me * 10_000) % 40_000)).collect();
                    see(index, &mut Reserved::default(), target, &digests);
                });
            }
        });
    }
    let mut contents = 0;
    let mut sums = [0; 3];
    index.for_each(|_, sightings| {
        contents += 1;
        assert_eq!(sightings.len(), 3);
        sightings.iter().for_each(|&(target, count)| sums[usize::from(target)] += count);
    });
    assert_eq!((contents, sums), (40_000, [90_000; 3]));
}

#[test]
fn a_full_count_goes_on_in_a_record() {
    let index = Index::new(1 << 30);
    let digests = vec![64; COUNT_MAX as usize * 2 + 5];
    see(&index, &mut Reserved::default(), 3, &digests);
    index.for_each(|_, sightings| assert_eq!(sightings, [(3, COUNT_MAX * 2 + 5)]));
    assert!(index.bytes() < 100_000);
}

#[test]
fn one_worker_numbers_contents_in_order() {
    let index = Index::new(1 << 30);
    let mut reserved = Reserved::default();
    let digests: Vec<u64> = (1..=3).map(mix).collect();
    assert_eq!(see(&index, &mut reserved, 0, &digests), [Seen::New(0), Seen::New(1), Seen::New(2)]);
    assert_eq!(see(&index, &mut reserved, 0, &digests[1..]), [Seen::Known(1), Seen::Known(2)]);
    assert_eq!(see(&index, &mut reserved, 0, &[mix(4)]), [Seen::New(3)], "no number is lost");
}

/// In a sixteenth of the memory that it would take: within the limit, and right on the whole. One
/// content is a third of all sightings: it must not be lost, whatever its digest.
#[test]
fn a_sample_is_within_its_limit_and_unbiased() {
    const CONTENTS: u64 = 400_000;
    let limit = CONTENTS * CONTENT_BYTES / 16;
    let index = Index::new(limit);
    let mut reserved = Reserved::default();
    let mut pages = 0u64;
    for target in 0..2u16 {
        let mut digests: Vec<u64> = (0..CONTENTS / 2 + CONTENTS / 4)
            .flat_map(|i| {
                let content = mix(i + u64::from(target) * CONTENTS / 4);
                if i % 2 == 0 { vec![content, 0xcccc_cccc_cccc_cccd] } else { vec![content] }
            })
            .collect();
        pages += digests.len() as u64;
        see(&index, &mut reserved, target, &digests);
        digests.clear();
        assert!(index.bytes() <= limit, "{} of {limit} bytes", index.bytes());
    }
    assert!(index.level() >= 4);
    let (mut contents, mut all, mut both, mut heavy) = (0.0, 0.0, 0.0, 0);
    index.for_each(|weight, sightings| {
        let count: u64 = sightings.iter().map(|s| s.1).sum();
        contents += weight;
        all += weight * count as f64;
        if sightings.len() == 2 {
            both += weight;
        }
        if count > 1000 {
            heavy += 1;
            assert_eq!((weight, count), (1.0, CONTENTS / 2 + CONTENTS / 4));
        }
    });
    assert_eq!(heavy, 1);
    let near = |is: f64, should: f64| assert!((is / should - 1.0).abs() < 0.05, "{is} for {should}");
    near(contents, CONTENTS as f64);
    near(all, pages as f64);
    near(both, CONTENTS as f64 / 2.0);
}
