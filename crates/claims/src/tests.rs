use super::*;

#[test]
fn only_a_regular_file_is_opened_and_nothing_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let (fifo, link) = (directory.path().join("fifo"), directory.path().join("link"));
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (path, kind) in [(&*fifo, "a FIFO"), (directory.path(), "a directory"), (Path::new("/dev/null"), "a char")] {
        let error = open(path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("it is {kind}")) && error.contains("put one in its place"), "{error}");
    }
    std::os::unix::fs::symlink(directory.path().join("file"), &link).unwrap();
    assert!(open(&link).is_err_and(|e| io::Error::from(e).kind() == io::ErrorKind::NotFound));
    std::fs::write(directory.path().join("file"), "text").unwrap();
    assert_eq!(text(&link, 4).unwrap(), "text");
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CREATE;
    assert!(matches!(open_at(CWD, &link, flags, Mode::RUSR), Err(ClaimError::Kind("a symbolic link"))));
    let made = open_at(CWD, &directory.path().join("new"), flags, Mode::RUSR).unwrap();
    assert!(!fcntl_getfl(&made).unwrap().contains(OFlags::NONBLOCK), "it is an ordinary file from here on");
}

#[test]
fn a_file_is_read_up_to_its_bound_and_text_is_text() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"abc\xff").unwrap();
    assert_eq!(read(file.path(), 4).unwrap(), b"abc\xff");
    let error = read(file.path(), 3).unwrap_err().to_string();
    assert_eq!(error, "it has 4 bytes, and at most 3 are read; name the right one, or restore it");
    assert!(matches!(text(file.path(), 9), Err(ClaimError::Text)));
    // One without an end.
    assert!(matches!(up_to(io::repeat(0), 1 << 20), Err(ClaimError::Long { .. })));
    let mut endless = io::BufReader::new(io::repeat(0));
    assert!(matches!(line(&mut endless, 1 << 20), Err(ClaimError::Long { .. })));
    let mut lines = &b"one\ntwo"[..];
    assert_eq!([4, 3, 9].map(|most| line(&mut lines, most).unwrap()), [&b"one\n"[..], b"two", b""]);
}

#[test]
fn announced_bytes_are_bounded_and_must_come() {
    assert_eq!(exactly(&b"abcd"[..], 3, 9).unwrap(), b"abc");
    assert!(matches!(exactly(&b"abcd"[..], 10, 9), Err(ClaimError::Long { claimed: 10, most: 9 })));
    // Memory for these does not exist; only what comes is taken.
    let error = exactly(&b"abcd"[..], 1 << 60, u64::MAX).unwrap_err();
    assert!(matches!(error, ClaimError::Short { is: 4, .. }), "{error}");
    assert!(error.to_string().ends_with("copy it again from its source"), "{error}");
}

#[test]
fn what_comes_byte_by_byte_is_not_waited_for_for_ever() {
    const LONG: Duration = Duration::from_secs(120);
    let (stream, mut other) = UnixStream::pair().unwrap();
    let begin = Instant::now();
    let mut timed = Timed::new(&stream, Duration::from_millis(200));
    let trickle = std::thread::spawn(move || {
        while other.write_all(b" ").is_ok() && begin.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let mut bytes = Vec::new();
    assert!(timed.read_to_end(&mut bytes).is_err() && !bytes.is_empty());
    assert!(begin.elapsed() < LONG / 2);
    drop(stream);
    trickle.join().unwrap();
}

#[test]
fn memory_that_the_host_does_not_have_is_not_asked_for() {
    assert_eq!(zeroed::<u64>(5).unwrap(), [0; 5]);
    for count in [1 << 50, u64::MAX] {
        let error = zeroed::<u64>(count).unwrap_err();
        assert!(matches!(error, ClaimError::Memory { .. }), "{error}");
        assert!(error.to_string().contains("use a larger host"), "{error}");
    }
    assert!(memory(SMALL).is_ok());
}
