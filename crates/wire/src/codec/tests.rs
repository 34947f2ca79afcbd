use super::*;
use crate::{Digest, Digests, MAX_MESSAGE, PageNo, RegionId, Slot};

fn merge(runs: Vec<MergeRun>) -> Vec<u8> {
    encode(&ToAgent::Merge(Merge { batch: 1, region: RegionId(2), runs, calm: false }))
}

fn run(page: u32, len: u32, slot: u32) -> MergeRun {
    MergeRun { run: Run::new(PageNo(page), len), target: Target::Frames { segment: 9, slot: Slot(slot) } }
}

#[test]
fn messages_survive_the_wire() {
    let hello = ToDaemon::Hello { version: VERSION, domain: Some("a".into()), name: "qemu".into(), forks: 3 };
    assert_eq!(decode_to_daemon(&encode(&hello), VERSION).unwrap(), hello);
    let batch = ToAgent::Merge(Merge {
        batch: 7,
        region: RegionId(1),
        runs: vec![run(0, 4, 3), MergeRun { run: Run::new(PageNo(9), 1), target: Target::Zero }],
        calm: true,
    });
    assert_eq!(decode_to_agent(&encode(&batch)).unwrap(), batch);
}

#[test]
fn nonsense_is_refused() {
    assert!(matches!(decode_to_agent(&[]), Err(DecodeError::Malformed { len: 0 })));
    assert!(decode_to_agent(&[0xff; 64]).is_err());
    let mut trailing = encode(&ToAgent::Detach);
    trailing.push(0);
    assert!(decode_to_agent(&trailing).is_err(), "bytes behind a message");
    let empty = encode(&ToDaemon::RegionAdded { region: RegionId(1), start: 4096, len: 0 });
    let out_of_bounds = decode_to_daemon(&empty, VERSION).unwrap_err().to_string();
    assert_eq!(out_of_bounds, "a message breaks the protocol: a range is out of bounds");
}

#[test]
fn batches_are_ascending_disjoint_and_bounded() {
    assert!(decode_to_agent(&merge(vec![run(0, 4, 0), run(4, 1, 9)])).is_ok());
    assert!(decode_to_agent(&merge(vec![run(0, 4, 0), run(3, 1, 9)])).is_err(), "overlap");
    assert!(decode_to_agent(&merge(vec![run(0, 0, 0)])).is_err(), "empty run");
    assert!(decode_to_agent(&merge(vec![run(0, 2, SEGMENT_PAGES - 1)])).is_err(), "past the segment");
    assert!(decode_to_agent(&merge(vec![run(0, MAX_BATCH_PAGES + 1, 0)])).is_err(), "too many pages");
    assert!(decode_to_agent(&merge(vec![run(u32::MAX, 2, 0)])).is_err(), "page numbers wrap");
}

#[test]
fn digests_are_requested_in_ascending_runs_and_bounded() {
    let asked = |runs: &[(u32, u32)]| {
        let runs = runs.iter().map(|&(page, len)| Run::new(PageNo(page), len)).collect();
        decode_to_agent(&encode(&ToAgent::Digest(Digest { request: 1, region: RegionId(2), seed: 3, runs }))).is_ok()
    };
    assert!(asked(&[]) && asked(&[(0, 4), (4, 1), (u32::MAX - 1, 1)]) && asked(&[(0, MAX_DIGESTS)]));
    for bad in [&[(0, 0)][..], &[(0, 4), (3, 1)], &[(0, 1), (1, MAX_DIGESTS)], &[(u32::MAX, 2)]] {
        assert!(!asked(bad), "{bad:?}");
    }
    let told = |count| {
        let answer = Digests { request: u64::MAX, digests: vec![u64::MAX; count], cpu_ns: u64::MAX };
        encode(&ToDaemon::Digests(answer))
    };
    let most = told(MAX_DIGESTS as usize);
    assert!(most.len() <= MAX_MESSAGE && decode_to_daemon(&most, VERSION).is_ok());
    assert!(decode_to_daemon(&told(MAX_DIGESTS as usize + 1), VERSION).is_err());
}

#[test]
fn regions_are_page_aligned_and_in_the_address_space() {
    let added = |start, len| encode(&ToDaemon::RegionAdded { region: RegionId(1), start, len });
    assert!(decode_to_daemon(&added(4096, 8192), VERSION).is_ok());
    for (start, len) in [(1, 4096), (4096, 1), (4096, 0), (u64::MAX - 4095, 4096), (0, !4095)] {
        assert!(decode_to_daemon(&added(start, len), VERSION).is_err(), "{start} {len}");
    }
}
