use super::*;
use proptest::prelude::*;

const LOG: Object = Object::Mlog(9);

fn log(generation: u64, parts: &[(Kind, u32, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, number, payload) in parts {
        let position = out.len() as u64;
        encode(&mut out, generation, position, *number, *kind, payload);
    }
    out
}

fn records(bytes: &[u8], generation: u64) -> (Vec<Vec<u8>>, Walk) {
    let mut all = Vec::new();
    let walk = walk(bytes, generation, LOG, &mut |frame| {
        if frame.kind == Kind::Record {
            all.push(frame.payload.to_vec());
        }
    });
    (all, walk)
}

#[test]
fn the_layout_is_fixed() {
    let bytes = log(1, &[(Kind::Record, 5, b"abc")]);
    assert_eq!(bytes.len(), frame_len(3));
    assert_eq!(&bytes[4..], b"\x03\0\0\0\x05\0\0\0\x01\0\0\0abc\0\0\0\0\0");
    let mut all = 1u64.to_le_bytes().to_vec();
    all.extend([0; 8]);
    all.extend(b"\x03\0\0\0\x05\0\0\0\x01\0\0\0abc");
    assert_eq!(bytes[..4], crc32c::crc32c(&all).to_le_bytes());
}

#[test]
fn a_torn_tail_is_cut_and_damage_is_not() {
    let parts: [(Kind, u32, &[u8]); 4] =
        [(Kind::Record, 1, b"one"), (Kind::Mark, 1, b""), (Kind::Record, 2, b"two"), (Kind::Record, 3, b"three")];
    let whole = log(4, &parts);
    let (all, found) = records(&whole, 4);
    assert_eq!((all.len(), found.end, found.next_number), (3, whole.len() as u64, 4));
    assert_eq!(records(&whole, 5).0.len(), 0, "another generation's frames are none");

    // Behind the last mark: torn, also when a later unsynced record is whole.
    let mut torn = whole.clone();
    torn[frame_len(3) + HEADER + HEADER] ^= 1;
    let (all, found) = records(&torn, 4);
    assert_eq!(all, [b"one".to_vec()]);
    assert!(found.torn && found.damage.is_empty() && found.end == (frame_len(3) + HEADER) as u64);

    // Before it: damaged.
    let mut damaged = whole;
    damaged[HEADER] ^= 1;
    let (all, found) = records(&damaged, 4);
    assert_eq!(all, [b"two".to_vec(), b"three".to_vec()]);
    assert_eq!((found.damage.len(), found.damage[0].offset, found.lost, found.torn), (1, 0, 1, false));
}

#[test]
fn the_second_copy_saves_a_record() {
    let parts: [(Kind, u32, &[u8]); 5] = [
        (Kind::Record, 1, b"one"),
        (Kind::Record, 1, b"one"),
        (Kind::Record, 2, b"two"),
        (Kind::Record, 2, b"two"),
        (Kind::Mark, 2, b""),
    ];
    let whole = log(1, &parts);
    for bit in 0..(whole.len() - HEADER) * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let (all, found) = records(&bytes, 1);
        assert_eq!((found.damage.len(), found.lost), (1, 0), "bit {bit}");
        for one in [b"one", b"two"] {
            assert!(all.iter().any(|r| r == one), "bit {bit}");
        }
    }
}

#[test]
fn a_lost_record_before_the_mark_is_counted() {
    let mut bytes = log(1, &[(Kind::Record, 1, b"one"), (Kind::Record, 2, b"two"), (Kind::Mark, 2, b"")]);
    bytes[frame_len(3)] ^= 1;
    let (all, found) = records(&bytes, 1);
    assert_eq!((all.len(), found.lost, found.next_number), (1, 1, 3));
}

proptest! {
    #[test]
    fn any_bytes_can_be_walked(mut bytes in prop::collection::vec(any::<u8>(), 0..400), generation in 0u64..3) {
        let (_, found) = records(&bytes, generation);
        prop_assert!(found.end <= bytes.len() as u64);
        // And with a real log in front.
        let mut log = log(generation, &[(Kind::Record, 1, b"x"), (Kind::Mark, 1, b"")]);
        let front = log.len() as u64;
        log.append(&mut bytes);
        prop_assert!(records(&log, generation).1.end >= front);
    }

    #[test]
    fn any_cut_leaves_whole_records(lens in prop::collection::vec(0usize..40, 1..12), cut in 0usize..600) {
        let payloads: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, &len)| vec![i as u8; len]).collect();
        let parts: Vec<(Kind, u32, &[u8])> =
            payloads.iter().enumerate().map(|(i, p)| (Kind::Record, i as u32 + 1, p.as_slice())).collect();
        let mut bytes = log(7, &parts);
        bytes.truncate(cut);
        let (all, found) = records(&bytes, 7);
        prop_assert_eq!(&all[..], &payloads[..all.len()]);
        prop_assert_eq!(found.end as usize, payloads[..all.len()].iter().map(|p| frame_len(p.len())).sum::<usize>());
    }
}
