use super::*;
use proptest::prelude::*;

const LOG: Object = Object::Mlog(9);

/// A log to which batches were appended, each of which was synced.
fn log(generation: u64, batches: &[&[&[u8]]]) -> Vec<u8> {
    let (mut out, mut number) = (Vec::new(), 0);
    for batch in batches {
        let durable = out.len() as u64;
        out.resize(out.len().next_multiple_of(BLOCK), 0);
        for payload in *batch {
            number += 1;
            let position = out.len() as u64;
            Frame { position, number, kind: Kind::Record, durable, payload }.encode(generation, &mut out);
        }
    }
    out
}

fn closed(generation: u64, batches: &[&[&[u8]]]) -> Vec<u8> {
    let mut out = log(generation, batches);
    let (durable, number) = (out.len() as u64, batches.iter().map(|batch| batch.len() as u32).sum());
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    let position = out.len() as u64;
    Frame { position, number, kind: Kind::Close, durable, payload: b"" }.encode(generation, &mut out);
    out
}

fn records(copies: [&[u8]; 2], generation: u64) -> (Vec<Vec<u8>>, Walk) {
    let mut all = Vec::new();
    let walk = walk(copies, generation, LOG, &mut |frame| {
        if frame.kind == Kind::Record {
            all.push(frame.payload.to_vec());
        }
    });
    (all, walk)
}

#[test]
fn the_layout_is_fixed() {
    let mut bytes = Vec::new();
    Frame { position: 32, number: 5, kind: Kind::Record, durable: 8, payload: b"abc" }.encode(1, &mut bytes);
    assert_eq!(bytes.len(), frame_len(3));
    assert_eq!(&bytes[4..], b"\x03\0\0\0\x05\0\0\0\x01\0\0\0\x08\0\0\0\0\0\0\0abc\0\0\0\0\0");
    let mut all = [1u64.to_le_bytes(), 32u64.to_le_bytes()].concat();
    all.extend(b"\x03\0\0\0\x05\0\0\0\x01\0\0\0\x08\0\0\0\0\0\0\0abc");
    assert_eq!(bytes[..4], crc32c::crc32c(&all).to_le_bytes());
}

#[test]
fn an_unfinished_end_is_cut_and_damage_is_not() {
    let whole = log(4, &[&[b"one"], &[b"two", b"three"]]);
    let (all, found) = records([&whole, &whole], 4);
    assert_eq!((all.len(), found.end, found.next_number), (3, whole.len() as u64, 4));
    assert!(found.damage.is_empty() && !found.torn, "the rest of a block is no damage: {found:?}");
    assert_eq!(records([&whole, &whole], 5).0.len(), 0, "another generation's frames are none");

    // Of the last batch nobody knows that it was durable, also when its second record is whole.
    let mut torn = whole.clone();
    torn[BLOCK + HEADER] ^= 1;
    let (all, found) = records([&torn, &torn], 4);
    assert_eq!(all, [b"one".to_vec()]);
    assert!(found.torn && found.damage.is_empty() && found.end == frame_len(3) as u64, "{found:?}");

    // The batch behind it says so.
    let mut damaged = log(4, &[&[b"one"], &[b"two", b"three"], &[b"four"]]);
    damaged[BLOCK + HEADER] ^= 1;
    let (all, found) = records([&damaged, &damaged], 4);
    assert_eq!(all, [b"one".to_vec(), b"three".to_vec(), b"four".to_vec()]);
    assert_eq!(
        (found.damage.len(), found.damage[0].offset, found.lost, found.torn),
        (1, frame_len(3) as u64, 1, false)
    );
}

#[test]
fn an_end_that_is_missing_in_both_files_after_a_clean_close_is_damage() {
    let mut bytes = closed(4, &[&[b"one"], &[b"two"], &[b"three"]]);
    bytes[2 * BLOCK..3 * BLOCK].fill(0);
    let (all, found) = records([&bytes, &bytes], 4);
    assert_eq!((all.len(), found.damage.len(), found.lost, found.next_number), (2, 1, 1, 4));
}

#[test]
fn one_whole_file_is_enough_and_the_other_is_named() {
    let whole = closed(1, &[&[b"one"], &[b"two", b"three"], &[b"four"]]);
    for at in (0..whole.len()).step_by(8) {
        for len in [1, 512, BLOCK, whole.len()] {
            for copy in 0..2 {
                let mut bad = whole.clone();
                bad[at..(at + len).min(whole.len())].fill(0);
                let same = bad == whole;
                let copies = if copy == 0 { [&bad[..], &whole[..]] } else { [&whole[..], &bad[..]] };
                let (all, found) = records(copies, 1);
                assert_eq!((all.len(), found.lost, found.torn, found.end), (4, 0, false, whole.len() as u64));
                // Behind the last record there is only the frame that says so.
                let close = at >= 2 * BLOCK + frame_len(4);
                assert_eq!(found.damage.is_empty(), same || close, "{len} bytes at {at}: {found:?}");
                assert_eq!(found.single.is_some(), !same && at + len > 3 * BLOCK, "{len} bytes at {at}: {found:?}");
            }
        }
    }
}

#[test]
fn a_crash_between_the_files_loses_nothing_and_is_no_damage() {
    let whole = log(1, &[&[b"one"], &[b"two"]]);
    let short = log(1, &[&[b"one"]]);
    for copies in [[&whole[..], &short[..]], [&short[..], &whole[..]]] {
        let (all, found) = records(copies, 1);
        assert_eq!((all.len(), found.damage.len(), found.lost, found.torn), (2, 0, 0, false));
    }
}

proptest! {
    #[test]
    fn any_bytes_can_be_walked(
        one in prop::collection::vec(any::<u8>(), 0..400),
        mut two in prop::collection::vec(any::<u8>(), 0..400),
        generation in 0u64..3,
    ) {
        let (_, found) = records([&one, &two], generation);
        prop_assert!(found.end <= one.len().max(two.len()) as u64);
        // And with a real log in front.
        let mut log = log(generation, &[&[b"x"], &[b"y"]]);
        let front = log.len() as u64;
        log.append(&mut two);
        prop_assert!(records([&log, &one], generation).1.end >= front);
    }

    #[test]
    fn any_cut_leaves_whole_records(lens in prop::collection::vec(0usize..40, 1..12), cut in 0usize..600) {
        let payloads: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, &len)| vec![i as u8; len]).collect();
        let batch: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        let mut bytes = log(7, &[&batch]);
        bytes.truncate(cut);
        let (all, found) = records([&bytes, &bytes], 7);
        prop_assert_eq!(&all[..], &payloads[..all.len()]);
        prop_assert_eq!(found.end as usize, payloads[..all.len()].iter().map(|p| frame_len(p.len())).sum::<usize>());
    }
}
