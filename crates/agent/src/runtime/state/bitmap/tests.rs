use super::*;

#[test]
fn bitmap_agrees_with_a_vector() {
    let bits = 1000u32;
    let run = |start, len| Run::new(PageNo(start), len);
    let mut bitmap = Bitmap::new(bits).unwrap();
    let mut model = vec![false; bits as usize];
    let mut seed = 12345u64;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as u32 % below
    };
    for _ in 0..3000 {
        let start = random(bits);
        let pages = run(start, random(bits - start) + 1);
        let pages = if random(3) == 0 { pages } else { run(start, pages.len.min(7)) };
        let value = random(2) == 0;
        if value {
            bitmap.set(pages)
        } else {
            bitmap.clear(pages)
        }
        model[pages.page.index()..pages.end().index()].fill(value);
        let start = random(bits);
        let within = run(start, random(bits - start) + 1);
        let slice = &model[within.page.index()..within.end().index()];
        for value in [true, false] {
            let mut expected: Vec<Run> = Vec::new();
            for (page, _) in (0..).map(|at| within.page + at).zip(slice).filter(|(_, bit)| **bit == value) {
                match expected.last_mut() {
                    Some(last) if last.end() == page => last.len += 1,
                    _ => expected.push(Run::one(page)),
                }
            }
            let found: Vec<Run> = if value { bitmap.runs(within).collect() } else { bitmap.gaps(within).collect() };
            assert_eq!(found, expected);
        }
    }
}
