//! The header of an image that somebody else made: it is read, put over another one, and has one
//! put over it.
//!
//! The first byte says how: the rest is the image; or a whole one is changed, 6 bytes a hit: an
//! offset (2), a value (4).

#![no_main]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use snapshot::qcow2;

fn directory() -> &'static tempfile::TempDir {
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIRECTORY.get_or_init(|| tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory"))
}

fn whole() -> &'static [u8] {
    static WHOLE: OnceLock<Vec<u8>> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let path = directory().path().join("whole");
        qcow2::create(&path, 1 << 20, Some((Path::new("below"), false)), 0o600).expect("an image");
        std::fs::read(path).expect("an image")
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let mut bytes = whole().to_vec();
    match how % 4 {
        0 => bytes = [b"QFI\xfb", input].concat(),
        _ => input.chunks_exact(6).for_each(|hit| {
            let at = usize::from(u16::from_le_bytes([hit[0], hit[1]])) % if how % 4 == 1 { 200 } else { bytes.len() };
            bytes[at..at + 4].copy_from_slice(&hit[2..]);
        }),
    }
    let (image, over) = (directory().path().join("image"), directory().path().join("over"));
    File::create(&image).and_then(|mut file| file.write_all(&bytes)).expect("written");
    let _ = qcow2::disk_size(&image);
    let file = File::options().read(true).write(true).open(&image).expect("open");
    if qcow2::ensure_whole(&file).is_ok() {
        assert!(qcow2::create_over(&over, &image, false).is_ok(), "an image can be put over a whole one");
        let below = qcow2::backing(&over).expect("one of our own").expect("it has one");
        assert!(below.image == image && !below.raw);
        std::fs::remove_file(&over).expect("removed");
    }
    if let Ok(Some(before)) = qcow2::backing(&image)
        && qcow2::set_backing(&file, "other").is_ok()
    {
        let after = qcow2::backing(&image).expect("it could be read").expect("it has one");
        assert!(after.image.ends_with("other") && after.raw == before.raw, "only the name is another one");
    }
});
