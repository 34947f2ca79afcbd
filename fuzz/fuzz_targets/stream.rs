//! QEMU's migration stream, as a QEMU that was taken over may send it: the RAM is taken out of it.
//!
//! The first byte says how: the rest is the stream, behind a header; or what the rest describes, 4
//! bytes a word of a whole one.

#![no_main]

const BLOCK: usize = 4096;
const RAM: u64 = 16 * BLOCK as u64;

fn name(name: &str) -> Vec<u8> {
    [&[name.len() as u8][..], name.as_bytes()].concat()
}

fn word(word: u64) -> Vec<u8> {
    word.to_be_bytes().to_vec()
}

/// A stream, in which `input` says which words there are.
fn stream(input: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    let mut is_first = true;
    for what in input.chunks_exact(4) {
        let [kind, low, high, fill] = [what[0], what[1], what[2], what[3]];
        let page = u64::from(u16::from_le_bytes([low, high % 2])) * BLOCK as u64;
        let flags = if is_first || kind & 0x40 != 0 { 0 } else { 0x20 };
        let block = if kind & 0x20 == 0 { "pc.ram" } else { "vga" };
        match kind % 8 {
            0 => all.extend([[1, 0, 0, 0, 2].to_vec(), name("ram"), vec![0, 0, 0, 0, 0, 0, 0, 4]].concat()),
            1 => {
                let sizes = [word((RAM + page) | 4), name("pc.ram"), word(RAM), word(0), name("vga"), word(page), word(9)];
                all.extend(sizes.concat());
            }
            2 => all.extend([word(0x10), vec![0x7e, 0, 0, 0, 2]].concat()),
            3 => all.extend([2 + fill % 2, 0, 0, 0, 2]),
            4 | 5 => {
                all.extend(word(page | flags | if kind % 8 == 4 { 8 } else { 2 }));
                if flags == 0 {
                    all.extend(name(block));
                }
                all.extend(if kind % 8 == 4 { vec![fill; BLOCK] } else { vec![fill] });
                is_first = false;
            }
            6 => all.extend([8, 0, 0, high % 2, low]),
            _ => all.push(fill),
        }
    }
    all
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let header = [b"QEVM\0\0\0\x03\x07\0\0\0\x02pc".as_slice()].concat();
    let start = stream(&[0, 0, 0, 0, 1, 2, 0, 0, 2, 0, 0, 0]);
    let bytes = match how % 4 {
        0 => input.to_vec(),
        1 => [header, input.to_vec()].concat(),
        2 => [header, stream(input)].concat(),
        _ => [header, start, stream(input)].concat(),
    };
    snapshot::fuzzing::split(&bytes, RAM);
});
