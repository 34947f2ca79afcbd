//! QEMU's stream, read and cut.

use super::*;

const RAM_BYTES: u64 = 16 * BLOCK as u64;

/// Writes a stream as QEMU does.
#[derive(Default)]
struct Stream(Vec<u8>);

impl Stream {
    fn new() -> Self {
        let mut this = Self::default();
        this.raw(&MAGIC.to_be_bytes()).raw(&VERSION.to_be_bytes()).raw(&[CONFIGURATION, 0, 0, 0, 2]).raw(b"pc");
        this.raw(&[SUBSECTION]).name("configuration/capabilities").raw(&[0, 0, 0, 1, 0, 0, 0, 1]);
        this.name("x-ignore-shared");
        this
    }

    fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    fn name(&mut self, name: &str) -> &mut Self {
        self.raw(&[name.len() as u8]).raw(name.as_bytes())
    }

    fn word(&mut self, word: u64) -> &mut Self {
        self.raw(&word.to_be_bytes())
    }

    fn start(&mut self, ram: &str) -> &mut Self {
        self.raw(&[START, 0, 0, 0, 2]).name("ram").raw(&[0, 0, 0, 0, 0, 0, 0, 4]).word((RAM_BYTES + 8192) | SIZES);
        self.name(ram).word(RAM_BYTES).word(0).name("vga").word(8192).word(1 << 20).end()
    }

    fn section(&mut self, kind: u8) -> &mut Self {
        self.raw(&[kind, 0, 0, 0, 2])
    }

    fn page(&mut self, name: Option<&str>, page: u64, fill: u8) -> &mut Self {
        let flags = if name.is_none() { CONTINUE } else { 0 } | if fill == 0 { ZERO } else { PAGE };
        self.word((page * BLOCK as u64) | flags);
        if let Some(name) = name {
            self.name(name);
        }
        let bytes = [fill; BLOCK];
        self.raw(if fill == 0 { &bytes[..1] } else { &bytes })
    }

    fn end(&mut self) -> &mut Self {
        self.word(EOS).raw(&[FOOTER, 0, 0, 0, 2])
    }

    fn devices(&mut self) -> &mut Self {
        self.raw(&[4, 0, 0, 0, 3]).name("timer").raw(&[0; 8]).raw(b"state").raw(&[FOOTER, 0, 0, 0, 3, 0])
    }
}

type Found = Vec<(u64, Option<u8>)>;

fn pages_of(bytes: &[u8]) -> (Result<Vec<u8>, StreamError>, Found) {
    let mut found = Found::new();
    let pages = |page: u64, bytes: Option<&[u8; BLOCK]>| {
        found.push((page, bytes.map(|bytes| bytes[17])));
        true
    };
    (split(bytes, RAM_BYTES, pages), found)
}

#[test]
fn a_device_stream_has_a_bound_and_is_read_to_its_end_all_the_same() {
    let long = [7; 11];
    let read = |mut from: &[u8]| (devices(&mut from, 10).map_err(|error| error.to_string()), from.len());
    assert_eq!(read(&long[..10]), (Ok(vec![7; 10]), 0));
    let (refused, left) = read(&long);
    assert!(
        refused.unwrap_err().starts_with("QEMU's stream has more than 10 bytes beside the guest's RAM") && left == 0
    );
    assert!(rest(io::repeat(7), vec![7; 5], 10).is_err(), "no more than the bound is kept");
}

/// A guest with a page of its display, in several rounds.
fn whole() -> Vec<u8> {
    let mut stream = Stream::new();
    stream.start("pc.ram").section(PART).page(Some("pc.ram"), 0, 1).page(None, 1, 0).page(Some("vga"), 1, 9).end();
    stream.section(PART).page(Some("pc.ram"), 3, 3).end();
    stream.section(PART).page(None, 3, 4).page(None, 2, 7).end();
    stream.section(END).page(None, 2, 0).page(Some("vga"), 0, 0).end().devices();
    stream.0
}

#[test]
fn ram_is_taken_out_and_the_rest_is_a_stream_without_it() {
    let (rest, found) = pages_of(&whole());
    assert_eq!(found, [(0, Some(1)), (1, None), (3, Some(3)), (3, Some(4)), (2, Some(7)), (2, None)]);
    let mut expected = Stream::new();
    expected.start(RAM).section(PART).page(Some("vga"), 1, 9).end();
    expected.section(END).page(Some("vga"), 0, 0).end().devices();
    let rest = rest.unwrap();
    assert!(rest == expected.0);
    // Which has no RAM any more, and can be read again.
    let (again, found) = pages_of(&rest);
    assert!(found.is_empty() && again.unwrap() == rest);
}

#[test]
fn a_stream_that_is_cut_short_or_has_something_else_is_refused() {
    let bytes = whole();
    // The devices are not looked at, but for an end.
    let devices = bytes.len() - 32;
    for len in (0..devices).step_by(97) {
        let (rest, _) = pages_of(&bytes[..len]);
        assert!(rest.is_err(), "{len} of {}", bytes.len());
    }
    let refused = |stream: &Stream| pages_of(&stream.0).0.unwrap_err().to_string();
    let mut other = Stream::new();
    other.section(START).name("vfio").raw(&[0; 8]);
    assert!(refused(&other).contains("a state of vfio that is sent in parts, which this program"));
    let mut other = Stream::new();
    other.start("pc.ram").section(PART).word(0x40);
    assert!(refused(&other).contains("pages of the kind 0x40"));
    let mut other = Stream::new();
    other.start("0000:00:02.0/vga.vram");
    assert_eq!(
        refused(&other),
        "QEMU's stream does not have the guest's RAM in one piece; start the guest \
                                 by `pageone run --snapshots`, with its RAM described by -m alone"
    );
    let mut other = Stream::new();
    other.start("pc.ram").section(PART).page(Some("pc.ram"), 16, 1);
    assert_eq!(
        refused(&other),
        "QEMU's stream does not have the guest's RAM in one piece; start the guest \
                                 by `pageone run --snapshots`, with its RAM described by -m alone"
    );
    assert!(pages_of(b"QEVM\0\0\0\x02").0.unwrap_err().to_string().contains("another version"));
    let stopped = split(&bytes[..], RAM_BYTES, |_: u64, _: Option<&[u8; BLOCK]>| false);
    assert_eq!(stopped.unwrap_err().to_string(), "QEMU's stream ends too early");
}
