use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};

use rustix::process::Signal;

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
fn a_directory_that_was_made_is_gone_with_what_failed_and_is_its_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (above, inner) = (dir.path().join("above"), dir.path().join("above/inner"));
    let made = Directory::make(&inner).unwrap();
    assert_eq!(std::fs::metadata(&inner).unwrap().mode() & 0o777, 0o700);
    drop(made);
    assert!(!above.exists());
    std::fs::create_dir(&above).unwrap();
    drop(Directory::make(&above).unwrap());
    assert!(above.exists(), "it was there before");
    let made = Directory::make(&inner).unwrap();
    std::fs::write(inner.join("other"), "").unwrap();
    drop(made);
    assert!(inner.exists(), "somebody else uses it");
    std::fs::remove_dir_all(&inner).unwrap();
    Directory::make(&inner).unwrap().stay();
    assert!(inner.exists());
    assert!(Directory::make(Path::new("/proc/none/of/them")).is_err());
}

#[test]
fn without_nameless_files_a_random_name_is_used_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    let begin = |existing| {
        let (file, own) = named(dir.path());
        OutputFile { file, path: path.clone(), existing, way: Way::Temporary(own) }
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
fn without_second_names_the_random_one_is_renamed_over_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (file, own) = named(dir.path());
    file.sync_all().unwrap();
    own.rename(OsStr::new("out")).unwrap();
    assert_eq!(named(dir.path()).1.rename(OsStr::new("out")), Err(Errno::EXIST));
    assert_eq!(names(dir.path()), ["out"]);
}

/// A file as on a file system without nameless ones.
fn named(dir: &Path) -> (File, Temporary) {
    let own = Temporary::new(directory::open(dir).unwrap()).unwrap();
    (create_at(&own.directory, &own.name).unwrap(), own)
}

/// Runs the named test in a process of its own, sends it a signal when it is `ready`, and gives the
/// signal that ended it, and the names that are left.
fn signalled(test: &str, case: &str, signal: Signal) -> (Option<i32>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", &format!("file::tests::{test}")]).env(AT, dir.path()).env(CASE, case);
    let mut again = again.spawn().unwrap();
    while !dir.path().join("ready").exists() {
        assert!(again.try_wait().unwrap().is_none());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&again), signal).unwrap();
    let ended = again.wait().unwrap();
    (std::os::unix::process::ExitStatusExt::signal(&ended), names(dir.path()))
}

/// The directory of a process that [`signalled`] has started.
fn at() -> Option<OsString> {
    let dir = std::env::var_os(AT)?;
    // A shell starts what runs behind it with SIGINT ignored, which is left so.
    [libc::SIGINT, libc::SIGTERM].into_iter().for_each(|signal| temporary::set(signal, libc::SIG_DFL));
    Some(dir)
}

const AT: &str = "PAGEONE_TEST_OUTPUT";
const CASE: &str = "PAGEONE_TEST_OUTPUT_CASE";

#[test]
fn a_signal_removes_the_random_names_of_all_files() {
    if let Some(dir) = at() {
        // More than a thread for each could remove before the first ends the process.
        let _files: Vec<_> = (0..64).map(|_| named(Path::new(&dir))).collect();
        std::fs::write(Path::new(&dir).join("ready"), "").unwrap();
        loop {
            std::thread::park();
        }
    }
    for signal in [Signal::INT, Signal::TERM] {
        let left = signalled("a_signal_removes_the_random_names_of_all_files", "", signal);
        assert_eq!(left, (Some(signal.as_raw()), vec!["ready".to_owned()]));
    }
}

#[test]
fn signals_do_what_they_did_before_once_the_last_file_is_closed_and_where_the_program_handles_them() {
    const TEST: &str =
        "signals_do_what_they_did_before_once_the_last_file_is_closed_and_where_the_program_handles_them";
    if let Some(dir) = at() {
        let (dir, case) = (Path::new(&dir), std::env::var(CASE).unwrap());
        let caught = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let handle = || signal_hook::flag::register(libc::SIGINT, caught.clone()).unwrap();
        let first = named(dir);
        match case.as_str() {
            "closed" => drop((first, named(dir))),
            "again" => {
                drop(first);
                std::mem::forget(named(dir));
            }
            "handled" => {
                handle();
                drop(first);
                std::mem::forget(named(dir));
            }
            _ => {
                handle();
                std::mem::forget(first);
            }
        }
        std::fs::write(dir.join("ready"), "").unwrap();
        while !caught.load(std::sync::atomic::Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        return;
    }
    let ready = vec!["ready".to_owned()];
    assert_eq!(signalled(TEST, "closed", Signal::INT), (Some(libc::SIGINT), ready.clone()));
    assert_eq!(signalled(TEST, "again", Signal::INT), (Some(libc::SIGINT), ready));
    for case in ["handled", "open"] {
        let (ended, left) = signalled(TEST, case, Signal::INT);
        assert_eq!((ended, left.len()), (None, 2), "the program goes on, and keeps its file: {case}");
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
fn a_name_that_ends_as_a_directorys_makes_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["new/", "new//", "new/."] {
        let path = format!("{}/{name}", dir.path().display());
        assert!(OutputFile::create(Path::new(&path), Existing::Replaced).is_err(), "{name}");
    }
    assert!(names(dir.path()).is_empty());
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

/// Its owner would read what root writes.
#[test]
fn a_pipe_of_another_user_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    if std::os::unix::fs::chown(&path, Some(65_534), None).is_err() {
        return println!("SKIPPED: only root can give a file away");
    }
    let error = OutputFile::create(&path, Existing::Replaced).unwrap_err();
    assert!(error.to_string().contains("a pipe or device of another user"), "{error}");
}
