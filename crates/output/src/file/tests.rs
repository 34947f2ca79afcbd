use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};

use super::*;

fn names(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_file_has_its_name_and_mode_when_it_is_whole_and_nothing_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    for existing in [Existing::Kept, Existing::Replaced] {
        let out = OutputFile::create(&path, existing).unwrap();
        out.file().write_all(b"half").unwrap();
        drop(out);
        assert!(!path.exists());
    }
    write(&path, Existing::Kept, b"whole").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"whole");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn a_regular_file_stays_without_force_and_is_replaced_with_it_and_no_other_file_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    std::fs::write(&path, "old").unwrap();
    std::fs::write(dir.path().join("out.part"), "mine").unwrap();
    let error = write(&path, Existing::Kept, b"new").unwrap_err();
    assert!(matches!(error, FileError::Exists(_)) && error.to_string().contains("--force"), "{error}");
    assert!(matches!(begin(&path, Existing::Kept).unwrap_err(), FileError::Exists(_)));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    write(&path, Existing::Replaced, b"new").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
    begin(&path, Existing::Replaced).unwrap().write_all(b"newer").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"newer");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read(dir.path().join("out.part")).unwrap(), b"mine");
    assert_eq!(names(dir.path()), ["out", "out.part"]);
    // One that came meanwhile stays, too.
    let late = OutputFile::create(&dir.path().join("late"), Existing::Kept).unwrap();
    std::fs::write(dir.path().join("late"), "other").unwrap();
    assert!(matches!(late.keep().unwrap_err(), FileError::Exists(_)));
    assert_eq!(std::fs::read(dir.path().join("late")).unwrap(), b"other");
}

#[test]
fn without_nameless_files_a_random_name_is_used_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    let begin = |existing| {
        let own = Temporary::named(directory::open(dir.path()).unwrap());
        let file = create_at(&own.directory, &own.name).unwrap();
        OutputFile { file, path: path.clone(), existing, way: Way::Temporary(own.guarded().unwrap()) }
    };
    let first = begin(Existing::Kept);
    assert!(names(dir.path())[0].starts_with(".pageone-"));
    drop(first);
    assert!(names(dir.path()).is_empty());
    begin(Existing::Kept).keep().unwrap();
    assert!(matches!(begin(Existing::Kept).keep().unwrap_err(), FileError::Exists(_)));
    begin(Existing::Replaced).keep().unwrap();
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn a_signal_removes_the_random_name() {
    const AT: &str = "PAGEONE_TEST_OUTPUT";
    if let Some(dir) = std::env::var_os(AT) {
        let own = Temporary::named(directory::open(Path::new(&dir)).unwrap());
        create_at(&own.directory, &own.name).unwrap();
        let _own = own.guarded().unwrap();
        std::fs::write(Path::new(&dir).join("guarded"), "").unwrap();
        loop {
            std::thread::park();
        }
    }
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let dir = tempfile::tempdir().unwrap();
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "file::tests::a_signal_removes_the_random_name"]).env(AT, dir.path());
        let mut again = again.spawn().unwrap();
        while !dir.path().join("guarded").exists() {
            assert!(again.try_wait().unwrap().is_none());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(names(dir.path()).len(), 2);
        rustix::process::kill_process(rustix::process::Pid::from_child(&again), signal).unwrap();
        let ended = again.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(signal.as_raw()));
        assert_eq!(names(dir.path()), ["guarded"]);
    }
}

#[test]
fn a_pipe_and_a_device_are_written_into_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let reader = {
        let pipe = pipe.clone();
        std::thread::spawn(move || {
            let mut text = String::new();
            File::open(pipe).unwrap().read_to_string(&mut text).unwrap();
            text
        })
    };
    write(&pipe, Existing::Replaced, b"through").unwrap();
    assert_eq!(reader.join().unwrap(), "through");
    assert!(std::fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    assert!(create_new(&pipe).is_err(), "it is no new file");
    write(Path::new("/dev/null"), Existing::Replaced, b"gone").unwrap();
    assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    assert!(matches!(write(Path::new("/dev/full"), Existing::Kept, b"x").unwrap_err(), FileError::Io { .. }));
}

#[test]
fn links_and_directories_are_neither_followed_nor_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("file"), "kept").unwrap();
    symlink(at("file"), at("link")).unwrap();
    symlink(at("nothing"), at("dangling")).unwrap();
    symlink("/dev/null", at("device")).unwrap();
    std::fs::create_dir(at("below")).unwrap();
    symlink(at("below"), at("way")).unwrap();
    for name in ["link", "dangling", "below"] {
        for existing in [Existing::Kept, Existing::Replaced] {
            let error = write(&at(name), existing, b"new").unwrap_err();
            assert!(matches!(error, FileError::Other { .. }), "{name}: {error}");
            assert!(begin(&at(name), existing).is_err(), "{name}");
        }
    }
    assert_eq!(std::fs::read(at("file")).unwrap(), b"kept");
    assert!(!at("nothing").exists());
    write(&at("device"), Existing::Kept, b"gone").unwrap();
    write(&at("way/../way/out"), Existing::Kept, b"new").unwrap();
    assert_eq!(std::fs::read(at("below/out")).unwrap(), b"new");
    if rustix::process::geteuid().is_root() {
        for name in ["way", "device"] {
            std::os::unix::fs::lchown(at(name), Some(65534), Some(65534)).unwrap();
        }
        let error = write(&at("way/other"), Existing::Kept, b"new").unwrap_err();
        assert!(
            matches!(&error, FileError::Io { source, .. } if source.to_string().contains("another user")),
            "{error}"
        );
        assert!(matches!(write(&at("device"), Existing::Kept, b"x").unwrap_err(), FileError::Other { .. }));
    }
    assert!(write(Path::new("/"), Existing::Kept, b"").is_err() && write(Path::new(""), Existing::Kept, b"").is_err());
}
