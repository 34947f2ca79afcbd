use super::*;

#[test]
fn the_process_that_has_a_pool_open_is_known() {
    let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:12 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 fe:00:123 0 EOF\n\
                 2: -> FLOCK  ADVISORY  WRITE 9 fe:00:12 0 EOF\n3: FLOCK  ADVISORY  READ 10 fe:00:12 0 EOF\n4: x";
    assert_eq!(listed(locks, rustix::fs::makedev(0xfe, 0), 12), [10]);
    assert!(listed(locks, rustix::fs::makedev(0xfe, 1), 12).is_empty());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "store").unwrap();
    let names = Names { pools: Some(dir.path().join("names")) };
    let said = names.open(path.to_str().unwrap(), Access::Shared).map(drop).unwrap_err();
    assert!(said.to_string().contains(&format!("is used by process {} (", std::process::id())), "{said}");
    drop(pool);
    assert!(names.open(path.to_str().unwrap(), Access::Shared).is_ok());
}

#[test]
fn a_pool_that_was_made_anew_is_not_taken_for_the_one_that_was_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(Pool::create(&path, "store").unwrap());
    let names = Names { pools: Some(dir.path().join("names")) };
    let mut found = names.find(path.to_str().unwrap()).unwrap();
    for access in [Access::Shared, Access::Exclusive] {
        drop(found.open_soon(access).unwrap());
    }
    Pool::destroy(&path).unwrap();
    drop(Pool::create(&path, "store").unwrap());
    let said = found.open_soon(Access::Exclusive).map(drop).unwrap_err().to_string();
    assert!(said.contains("is another pool now"), "{said}");
}
