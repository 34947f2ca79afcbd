//! Notes that others write and remove meanwhile.

use super::*;

#[test]
fn a_note_that_its_guard_has_removed_meanwhile_says_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let this = std::process::id() as i32;
    let mark = Mark::make(dir.path(), [this; 2]).unwrap();
    mark.add(this, &Stopped::Signal).unwrap();
    let open = || File::options().read(true).write(true).open(&mark.path).unwrap();
    let (one, other) = (open(), open());
    rustix::fs::flock(&mark.file, FlockOperation::Unlock).unwrap();
    assert!(read(one, mark.path.clone(), &|_| {}).is_some());
    mark.remove();
    assert!(read(other, mark.path, &|_| {}).is_none());
}

#[test]
fn what_was_begun_with_a_guest_that_has_ended_is_ended_before_its_note_goes() {
    let dir = tempfile::tempdir().unwrap();
    let Mark { file, path } = Mark::make(dir.path(), [std::process::id() as i32; 2]).unwrap();
    let line = |task: &str| Line { pid: i32::MAX, started: 1, stopped: Stopped::Qmp(task.into()) };
    let lines = ["first", "last"].map(|task| serde_json::to_string(&line(task)).unwrap());
    std::fs::write(&path, lines.join("\n")).unwrap();
    drop(file);
    let ended = std::cell::RefCell::new(Vec::new());
    assert!(left(dir.path(), &|task| ended.borrow_mut().push((task.clone(), path.exists()))).is_empty());
    assert!(ended.into_inner() == [("last".into(), true)] && !path.exists());
}

#[test]
fn a_stopped_command_whose_guard_was_killed_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let start = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let (mut guard, mut command) = (start(), start());
    let [one, other] = [&guard, &command].map(|child| child.id() as i32);
    let state = |pid| Stat::of(Some(pid)).unwrap().state();
    let wait_for = |pid, states: &[char]| {
        let begin = std::time::Instant::now();
        while !state(pid).is_some_and(|state| states.contains(&state)) {
            assert!(begin.elapsed().as_secs() < 60, "{pid} is {:?}", state(pid));
            std::thread::yield_now();
        }
    };
    let stop = |pid| {
        PidFd::open(pid).unwrap().send_signal(libc::SIGSTOP).unwrap();
        wait_for(pid, &['T']);
    };
    let _locked = Mark::make(dir.path(), [one, other]).unwrap();
    stop(one);
    stop(other);
    // A guard that lives is continued, and does the rest.
    assert!(left(dir.path(), &|_| {}).is_empty());
    wait_for(one, &['S', 'R']);
    assert!(left(dir.path(), &|_| {}).is_empty());
    assert_eq!(state(other), Some('T'));
    guard.kill().unwrap();
    wait_for(one, &['Z']);
    assert!(left(dir.path(), &|_| {}).is_empty());
    wait_for(other, &['S', 'R']);
    command.kill().unwrap();
    guard.wait().unwrap();
    command.wait().unwrap();
}
