use rustix::fs::FileType;

use super::*;

/// Whoever has the directory may put one in an image's place at any moment.
#[test]
fn a_fifo_in_an_images_place_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fifo) = (dir.path().join("image"), dir.path().join("fifo"));
    std::fs::write(&image, "image").unwrap();
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let refused = |done: io::Result<()>| assert!(done.unwrap_err().to_string().starts_with("it is a FIFO"));
    refused(copy(&fifo, &image));
    refused(copy(&image, &fifo));
    refused(sync(&fifo));
    assert!(sync(&fifo.join("below")).is_err());
    if let Err(error) = measure(&fifo) {
        assert!(error.to_string().starts_with("it is a FIFO") || error.raw_os_error().is_some(), "{error}");
    }
    sync(&image).unwrap();
}
