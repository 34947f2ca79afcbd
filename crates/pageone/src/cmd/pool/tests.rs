use super::*;

#[test]
fn the_process_that_has_a_pool_open_is_known() {
    let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:12 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 fe:00:123 0 EOF\n\
                 2: -> FLOCK  ADVISORY  WRITE 9 fe:00:12 0 EOF\n3: FLOCK  ADVISORY  READ 10 fe:00:12 0 EOF\n4: x";
    assert_eq!(holder(locks, rustix::fs::makedev(0xfe, 0), 12), Some(10));
    assert_eq!(holder(locks, rustix::fs::makedev(0xfe, 1), 12), None);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "store").unwrap();
    let names = Names { pools: Some(dir.path().join("names")) };
    let said = names.open(path.to_str().unwrap(), Access::Shared).map(drop).unwrap_err();
    assert!(is_busy(&said), "{said}");
    assert!(said.to_string().contains(&format!("is used by process {} (", std::process::id())), "{said}");
    drop(pool);
    assert!(names.open(path.to_str().unwrap(), Access::Shared).is_ok());
}
