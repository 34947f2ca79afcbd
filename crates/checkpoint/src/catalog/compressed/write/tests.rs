use super::*;
use crate::catalog::tests::Numbers;

/// A chunk of a few pages, made of runs, noise, and copies of what is there.
fn chunk(numbers: &mut Numbers) -> Vec<u8> {
    let len = (1 + numbers.below(CHUNK)) * BLOCK;
    let mut all = Vec::new();
    while all.len() < len {
        let most = [3, 20, 300, 9000][numbers.below(4)];
        let count = 1 + numbers.below(most);
        match numbers.below(4) {
            0 => all.extend(std::iter::repeat_n(numbers.below(256) as u8, count)),
            1 => all.extend((0..count).map(|_| numbers.below(256) as u8)),
            2 => all.extend((0..count).map(|_| b'a' + numbers.below(1 + count % 5) as u8)),
            _ if all.is_empty() => {}
            _ => {
                let from = numbers.below(all.len());
                (from..from + count).for_each(|at| all.push(all[at]));
            }
        }
    }
    all.truncate(len);
    all
}

#[test]
fn a_frame_decodes_to_its_pages_and_a_changed_one_to_nothing_else() {
    let (mut numbers, mut encoder, mut decoder) = (Numbers(1), Encoder::new(), decoder());
    let mut frames = 0;
    for number in 0..400 {
        let pages = chunk(&mut numbers);
        let Some(frame) = encoder.encode(&pages).map(<[u8]>::to_vec) else { continue };
        frames += 1;
        let mut into = vec![0; pages.len()];
        decode(&mut decoder, &frame, &mut into).unwrap();
        assert!(into == pages, "{number}");
        for _ in 0..20 {
            let mut wrong = frame.clone();
            match numbers.below(4) {
                0 => wrong.truncate(numbers.below(frame.len())),
                1 => wrong.extend_from_slice(&frame[..numbers.below(frame.len())]),
                _ => wrong[numbers.below(frame.len())] ^= 1 << numbers.below(8),
            }
            if decode(&mut decoder, &wrong, &mut into).is_some() {
                assert!(into == pages, "{number}");
            }
        }
        // Of more pages, and of fewer.
        assert!(decode(&mut decoder, &frame, &mut vec![0; pages.len() + BLOCK]).is_none());
        assert!(decode(&mut decoder, &frame, &mut vec![0; pages.len() - BLOCK]).is_none());
    }
    assert!(frames > 200, "{frames}");
}

#[test]
fn a_frame_that_is_not_of_its_pages_is_not_stored() {
    let mut encoder = Encoder::new();
    let pages = [vec![1; BLOCK], vec![2; BLOCK]].concat();
    encoder.encode(&pages).unwrap();
    assert!(encoder.is_of(&pages));
    let mut others = pages.clone();
    others[BLOCK] = 3;
    assert!(!encoder.is_of(&others) && !encoder.is_of(&pages[BLOCK..]) && encoder.is_of(&pages));
    encoder.frame[9] ^= 1;
    assert!(!encoder.is_of(&pages));
}

#[test]
fn other_programs_read_the_frames() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let pages = chunk(&mut Numbers(5));
    let mut encoder = Encoder::new();
    let frame = encoder.encode(&pages).unwrap();
    let zstd = Command::new("zstd").args(["-dcq"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut zstd) = zstd else {
        println!("SKIPPED: no program zstd");
        return;
    };
    zstd.stdin.take().unwrap().write_all(frame).unwrap();
    assert!(zstd.wait_with_output().unwrap().stdout == pages);
}
