use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::qcow2::{create, create_over};

/// A directory that only this account can change, with a pool's and a place for images.
struct Fixture {
    _dir: tempfile::TempDir,
    pool: PathBuf,
    images: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [pool, images] = ["pool", "images"].map(|name| dir.path().join(name));
        [&pool, &images].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        Self { _dir: dir, pool, images }
    }

    /// An image of a snapshot, over another one.
    fn stored(&self, name: &str, below: Option<&Path>) -> PathBuf {
        let image = self.images.join(name);
        match below {
            Some(below) => create_over(&image, below, false).unwrap(),
            None => create(&image, 1 << 20, None, 0o600).unwrap(),
        }
        std::fs::set_permissions(&image, PermissionsExt::from_mode(0o400)).unwrap();
        image
    }

    /// A snapshot with this image.
    fn snapshot(&self, image: &Path) -> Description {
        let word = self.images.join("disk.qcow2").display().to_string();
        let mut disk = Disk { word, image: image.into(), ..Disk::default() };
        disk.layers = disk.layers_by_headers().unwrap();
        Description { disks: vec![disk], ..Description::default() }
    }

    /// The images that are named, and who needs each.
    fn left(
        &self,
        removed: &[&Description],
        others: &[(&str, Option<&Description>)],
    ) -> Vec<(PathBuf, Option<String>)> {
        left(&self.pool, removed, others).into_iter().map(|left| (left.image, left.needed_by)).collect()
    }
}

#[test]
fn the_image_of_a_removed_snapshot_is_named_with_the_snapshot_that_needs_it() {
    let at = Fixture::new();
    let first = at.stored("disk.first.qcow2", None);
    // It names the one below in another way.
    let second = at.stored("disk.second.qcow2", Some(&at.images.join("../images/disk.first.qcow2")));
    let [one, two] = [&first, &second].map(|image| at.snapshot(image));
    let needed = |by: &str| vec![(first.clone(), Some(by.to_owned()))];
    assert_eq!(at.left(&[&one], &[("two", Some(&two))]), needed("two"));
    assert_eq!(at.left(&[&one], &[("bad", None)]), needed("bad"));
    let mut old = two.clone();
    old.disks[0].layers.clear();
    assert_eq!(at.left(&[&one], &[("old", Some(&old))]), needed("old"));
    // Nothing is said of those below it.
    assert_eq!(at.left(&[&two], &[]), [(second.clone(), None)]);
    // But if its guest was halted twice.
    let mut twice = two.clone();
    twice.disks[0].own = 2;
    let below = twice.disks[0].layers[1].image.clone();
    assert_eq!(at.left(&[&twice], &[]), [(second, None), (below, None)]);
    std::fs::remove_file(&first).unwrap();
    assert_eq!(at.left(&[&one], &[]), []);
}

#[test]
fn a_file_of_which_it_is_not_sure_that_a_snapshot_stored_it_is_not_named() {
    let at = Fixture::new();
    let image = at.stored("disk.first.qcow2", None);
    let one = at.snapshot(&image);
    assert_eq!(at.left(&[&one], &[]), [(image.clone(), None)]);
    let mut elsewhere = one.clone();
    elsewhere.source =
        Some(crate::record::Source { elsewhere: true, ..crate::record::Source::of(std::process::id()).unwrap() });
    let mut longer = one.clone();
    longer.disks[0].layers[0].len += 1;
    let odd = at.images.join("disk.\u{1b}.qcow2");
    std::fs::rename(at.stored("disk.x.qcow2", None), &odd).unwrap();
    for one in [elsewhere, longer, at.snapshot(&odd)] {
        assert_eq!(at.left(&[&one], &[]), []);
    }
    // It was written to since: somebody uses it for something else.
    std::fs::set_permissions(&image, PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(at.left(&[&one], &[]), []);
    std::fs::set_permissions(&image, PermissionsExt::from_mode(0o400)).unwrap();
    // Whoever can write the record could have any file named.
    std::fs::set_permissions(&at.pool, PermissionsExt::from_mode(0o777)).unwrap();
    assert_eq!(at.left(&[&one], &[]), []);
}
