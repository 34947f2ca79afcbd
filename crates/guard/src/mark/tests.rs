//! Notes that others write and remove meanwhile.

use super::*;

#[test]
fn a_note_that_its_guard_has_removed_meanwhile_says_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let this = std::process::id() as i32;
    let mark = Mark::make(dir.path(), this).unwrap();
    mark.add(this, &Stopped::Signal).unwrap();
    let open = || File::options().read(true).write(true).open(&mark.path).unwrap();
    let (one, other) = (open(), open());
    rustix::fs::flock(&mark.file, FlockOperation::Unlock).unwrap();
    assert!(read(one, mark.path.clone()).is_some());
    mark.remove();
    assert!(read(other, mark.path).is_none());
}
