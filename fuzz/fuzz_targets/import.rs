//! An archive of anybody is received, and stored if its sum is right. Nothing is left of one that
//! is refused.
//!
//! The first byte says how: the rest is the archive; or the parts of a whole one are changed, 8
//! bytes a hit, and it gets the right sum: the part (1), the way (1: cut there; longer in its
//! header; another kind; two bytes changed), an offset (4), a value (2).

#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use checkpoint::{Catalog, Store};
use mpool::{BLOCK, Pool};
use output::{Progress, Shown};
use snapshot::archive::{Place, receive};
use tar::{EntryType, Header};

type Part = (String, Vec<u8>);

const ABOUT: &str = r#"{"format":1,"name":"snap","created":1,"source":"q 1","regions":[[0,65536]],"description":{"program":"/q","directory":"/","words":["-m","1"],"facts":{"qemu":"7","machine":"pc","cpu":"c","features":[],"cpus":1,"ram":65536,"devices":[]},"disks":[{"word":"/d","image":"/x","raw":false}]},"images":[2],"allocated":1}"#;

fn directory() -> &'static tempfile::TempDir {
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        Pool::create(&directory.path().join("pool"), "fuzzed").expect("a pool");
        directory
    })
}

/// The parts of a whole archive, but for the sum.
fn parts() -> &'static [Part] {
    static PARTS: OnceLock<Vec<Part>> = OnceLock::new();
    PARTS.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory");
        let (base, over) = (directory.path().join("base"), directory.path().join("over"));
        snapshot::qcow2::create(&base, 1 << 20, None, 0o600).expect("an image");
        snapshot::qcow2::create_over(&over, &base, false).expect("an image");
        let read = |path: &Path| std::fs::read(path).expect("an image");
        let pages = [1_u64, 4].iter().flat_map(|page| page.to_le_bytes()).collect();
        [
            ("snapshot.json", ABOUT.into()),
            ("devices", b"devices".to_vec()),
            ("pages", pages),
            ("ram", vec![7; 2 * BLOCK]),
            ("disk-0-0", read(&over)),
            ("disk-0-1", read(&base)),
        ]
        .map(|(name, bytes)| (name.into(), bytes))
        .to_vec()
    })
}

fn entry(name: &str, kind: u8, len: u64, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_path(name).expect("a short name");
    header.set_entry_type(EntryType::new(kind));
    header.set_size(len);
    header.set_cksum();
    let mut bytes = [&header.as_bytes()[..], content].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn archive(input: &[u8]) -> Vec<u8> {
    let mut all: Vec<(Part, u8, u64)> = parts().iter().map(|part| (part.clone(), b'0', 0)).collect();
    for hit in input.chunks_exact(8).take(16) {
        let count = all.len();
        let ((_, bytes), kind, more) = &mut all[usize::from(hit[0]) % count];
        let at = u32::from_le_bytes([hit[2], hit[3], hit[4], hit[5]]);
        match hit[1] % 4 {
            0 => bytes.truncate(at as usize % bytes.len().max(1)),
            1 => *more = u64::from(at) << (hit[6] % 33),
            2 => *kind = hit[6],
            _ => {
                let at = at as usize % bytes.len().max(1);
                bytes.iter_mut().skip(at).zip(&hit[6..8]).for_each(|(to, byte)| *to = *byte);
            }
        }
    }
    let sum = xxhash_rust::xxh3::xxh3_128(&all.iter().flat_map(|((_, bytes), ..)| bytes.clone()).collect::<Vec<_>>());
    all.push((("xxh3".into(), format!("{sum:032x}").into_bytes()), b'0', 0));
    all.iter().flat_map(|((name, bytes), kind, more)| entry(name, *kind, bytes.len() as u64 + more, bytes)).collect()
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let bytes = if how % 4 == 0 { input.to_vec() } else { archive(input) };
    let directory = directory().path();
    let (pool, disks) = (directory.join("pool"), directory.join("disks"));
    let place = Place { pool: &pool, disks: Some(&disks), name: None, is_taken: &|_| false };
    if let Ok(received) = receive(&bytes[..], &place) {
        let opened = Pool::open(&pool, mpool::OpenOptions::default()).expect("a pool");
        let store = Store::new(Catalog::open(&opened).expect("its list"));
        if let Ok(about) = received.store((&store, None), &Progress::new(Shown::Never), || {}) {
            let mut catalog = store.into_catalog();
            let checkpoint = catalog.find(&about.name).expect("it was stored").clone();
            assert!(catalog.image(&checkpoint).is_ok());
            assert!(snapshot::record::Record::decode(&catalog.beside_checkpoint(&checkpoint).expect("read").expect("there")).is_ok());
            catalog.remove(&about.name).expect("removed");
            std::fs::remove_dir_all(&disks).or_else(|_| std::fs::metadata(&disks).map_or(Ok(()), |_| Err(()))).expect("removed");
        }
    }
    let left = std::fs::read_dir(directory).expect("a directory").count();
    assert!(left == 1, "what is refused leaves nothing");
});
