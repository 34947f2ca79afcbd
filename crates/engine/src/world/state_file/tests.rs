//! What the state file keeps, and what it is not.

use super::*;

#[test]
fn the_state_file_remembers_what_daemons_made() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = StateFile::load(directory.path()).unwrap();
    first.record(BTreeMap::from([(7, "a b".to_string())]), &[]);
    let mut second = StateFile::load(directory.path()).unwrap();
    assert!(second.knows(7, "a b"));
    assert!(!second.knows(7, "a"), "another domain");
    assert!(!second.knows(8, "a b"));
    second.record(BTreeMap::from([(9, "c".to_string())]), &[]);
    let mut third = StateFile::load(directory.path()).unwrap();
    assert!(third.knows(7, "a b") && third.knows(9, "c"));
    third.record(BTreeMap::from([(11, "d".to_string())]), &[]);
    third.record(BTreeMap::new(), &[7, 11]);
    let fourth = StateFile::load(directory.path()).unwrap();
    assert!(fourth.knows(7, "a b") && fourth.knows(9, "c"), "made by earlier daemons");
    assert!(!fourth.knows(11, "d"), "made and closed");
}

#[test]
fn a_damaged_state_file_loses_only_the_damaged_lines() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(STATE_FILE), b"7 a\nnonsense\n-1 b\n9 \xff\n8 c\n").unwrap();
    let state = StateFile::load(directory.path()).unwrap();
    assert!(state.knows(7, "a") && state.knows(8, "c"));
    assert_eq!(state.known.len(), 2);
}

#[test]
fn what_cannot_be_a_state_file_is_neither_waited_for_nor_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(STATE_FILE);
    let refused = || StateFile::load(directory.path()).map(drop).unwrap_err().to_string();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(refused().contains("it is a FIFO, and a regular file is needed; put one in its place"));
    std::fs::remove_file(&path).unwrap();
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(refused().contains("it has 16777217 bytes, and at most 16777216 are read"));
}
