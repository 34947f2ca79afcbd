//! Headers of images, also wrong ones.

use super::*;

#[test]
fn an_image_is_put_over_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (base, over) = (path("base"), path("over"));
    create(&base, 3 << 20, None, 0o640).unwrap();
    create_over(&over, &base, false).unwrap();
    assert_eq!(backing(&over).unwrap(), Some(Backing { image: base.clone(), raw: false }));
    assert_eq!(backing(&base).unwrap(), None);
    let file = File::options().read(true).write(true).open(&over).unwrap();
    set_backing(&file, "other").unwrap();
    assert_eq!(backing(&over).unwrap(), Some(Backing { image: path("other"), raw: false }));
    assert_eq!(disk_size(&over).unwrap(), 3 << 20);
    // An image may be imported more than once.
    set_backing(&file, "a third, longer").unwrap();
    set_backing(&file, "4th").unwrap();
    assert_eq!(backing(&over).unwrap(), Some(Backing { image: path("4th"), raw: false }));
    file.write_all_at(b"x", CLUSTER - 512).unwrap();
    assert!(set_backing(&file, "fifth").is_err(), "something else lies there");
    std::fs::write(path("raw"), b"raw").unwrap();
    assert!(backing(&path("raw")).is_err(), "no header is looked for in what is no image");
    create_over(&path("over-raw"), &path("raw"), true).unwrap();
    assert_eq!(backing(&path("over-raw")).unwrap(), Some(Backing { image: path("raw"), raw: true }));
    // Without the format, the first bytes of the file below would decide.
    let file = File::options().write(true).open(path("over-raw")).unwrap();
    file.write_all_at(&[0; 4], u64::from(HEADER)).unwrap();
    assert!(backing(&path("over-raw")).unwrap_err().to_string().contains("which format"));
}

#[test]
fn an_image_over_another_has_its_size_and_nothing_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (base, over) = (dir.path().join("base"), dir.path().join("over"));
    create(&base, 3 << 30, None, 0o640).unwrap();
    create_over(&over, &base, false).unwrap();
    assert_eq!(disk_size(&over).unwrap(), 3 << 30);
    assert_eq!(std::fs::metadata(&over).unwrap().mode() & 0o777, 0o640);
    let bytes = std::fs::read(&over).unwrap();
    let name = base.as_os_str().as_bytes();
    assert_eq!(&bytes[128..128 + name.len()], name);
    assert!(create_over(&over, &base, false).is_err());
    assert!(disk_size(Path::new("/proc/version")).is_err());
}

/// Each header is as long as its file: a guest can make thousands.
#[test]
fn a_chain_has_an_end_and_is_read_to_it_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let image = |number: usize| dir.path().join(format!("{number:03}"));
    let name = |number: usize| image(number).into_os_string().into_encoded_bytes();
    create(&image(0), 1 << 20, None, 0o600).unwrap();
    create_over(&image(1), &image(0), false).unwrap();
    let mut bytes = std::fs::read(image(1)).unwrap();
    let at = bytes.windows(name(0).len()).position(|part| part == name(0)).unwrap();
    for number in 2..=MAX_IMAGES + 1 {
        bytes[at..at + name(0).len()].copy_from_slice(&name(number - 1));
        std::fs::write(image(number), &bytes).unwrap();
    }
    let chain_of = |number| chain(Backing { image: image(number), raw: false });
    assert_eq!(chain_of(MAX_IMAGES).unwrap().len(), MAX_IMAGES + 1, "a clone's over the longest");
    let (last, error) = chain_of(MAX_IMAGES + 1).unwrap_err();
    assert_eq!((last, error.to_string()), (image(0), "more than 500 images lie above it".into()));
    // It lies below itself.
    let file = File::options().read(true).write(true).open(image(1)).unwrap();
    set_backing(&file, "002").unwrap();
    assert_eq!(chain_of(2).unwrap_err().0, image(2));
}

#[test]
fn of_an_image_the_first_cluster_is_read_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    create(&path, 1 << 20, None, 0o600).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    for bits in [9, 16, 21, 63, 64, 200, 255] {
        bytes[20..24].copy_from_slice(&u32::to_be_bytes(bits));
        let mut from = std::io::Cursor::new(&bytes).chain(std::io::repeat(1));
        assert_eq!(backing_of(&mut from).unwrap(), None);
        let read = from.get_ref().0.position();
        assert!(read <= 1_u64.checked_shl(bits).unwrap_or(0).clamp(HEADER.into(), LARGEST_CLUSTER), "{bits}: {read}");
    }
}
