use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::CapabilitySet;

use super::*;
use crate::testing::{Child, Memory, become_nobody, forking, is_root, refusing, uffd};
use crate::{PAGE_SIZE, mm};

/// The next event, within two seconds.
fn next(uffd: &Uffd) -> Event {
    let wait = Timespec { tv_sec: 2, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(uffd, PollFlags::IN)], Some(&wait)).unwrap();
    assert_eq!(ready, 1, "no event came");
    uffd.read_event().unwrap().expect("poll said that there is an event")
}

#[test]
fn a_synchronous_window_holds_writers_and_lets_readers_go() {
    let Some(uffd) = uffd(Features::WP) else {
        return;
    };
    assert!(uffd.read_event().unwrap().is_none());
    let memory = Memory::new(4);
    for page in 0..4 {
        memory.write(page, 1);
    }
    uffd.register_wp(memory.0).unwrap();
    uffd.write_protect(memory.0, Protection::Set).unwrap();

    thread::scope(|scope| {
        let uffd = uffd; // Dropped when an assertion fails, so that no thread waits for ever.
        let (done, written) = mpsc::channel();
        let memory = &memory;
        scope.spawn(move || {
            memory.write(2, 2);
            done.send(2).unwrap();
            memory.write(3, 3);
            done.send(3).unwrap();
        });
        let held = |page| {
            let event = next(&uffd);
            let Event::Pagefault { address, write_protect: true } = event else { panic!("{event:?}") };
            assert_eq!(address, memory.pages(page, 1).start);
            let wait = Duration::from_millis(30);
            assert_eq!(written.recv_timeout(wait), Err(RecvTimeoutError::Timeout), "the writer went on");
            assert_eq!(memory.read(page), 1, "readers go on, and see the old value");
        };
        held(2);
        uffd.wake(memory.0).unwrap();
        held(2); // Still protected, so it waits again.
        uffd.write_protect(memory.pages(2, 1), Protection::Lift).unwrap();
        assert_eq!(written.recv_timeout(Duration::from_secs(60)), Ok(2));
        held(3);
        uffd.unregister(memory.0).unwrap();
        assert_eq!(written.recv_timeout(Duration::from_secs(60)), Ok(3));
    });
    assert_eq!([memory.read(1), memory.read(2), memory.read(3)], [1, 2, 3]);
}

#[test]
fn a_fork_hands_over_the_childs_userfaultfd() {
    let _forking = forking();
    let Some(uffd) = uffd(Features::WP | Features::EVENT_FORK) else {
        return;
    };
    let memory = Memory::new(2);
    memory.write(0, 1);
    uffd.register_wp(memory.0).unwrap();
    thread::scope(|scope| {
        let uffd = uffd; // Dropped when an assertion fails, so that no thread waits for ever.
        // The fork returns when its event has been read.
        let child = scope.spawn(Child::idle);
        let event = next(&uffd);
        let Event::Fork { child: fd } = event else { panic!("{event:?}") };
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let child = child.join().unwrap();
        let of_child = Uffd::from_fd(fd);
        of_child.write_protect(memory.0, Protection::Set).unwrap();
        of_child.unregister(memory.0).unwrap();
        assert_eq!(
            of_child.write_protect(memory.0, Protection::Set),
            Err(Errno::NOENT),
            "the child's was unregistered"
        );
        uffd.write_protect(memory.0, Protection::Set).unwrap();
        drop(child);
        assert_eq!(of_child.unregister(memory.0), Err(Errno::NOMEM), "the child's memory is gone");
    });
}

#[test]
fn changed_mappings_raise_events() {
    let events = Features::EVENT_REMAP | Features::EVENT_REMOVE | Features::EVENT_UNMAP;
    let Some(uffd) = uffd(Features::WP | events) else {
        return;
    };
    let memory = Memory::new(8);
    let elsewhere = Memory::new(2);
    for page in 0..8 {
        memory.write(page, 7);
    }
    uffd.register_wp(memory.0).unwrap();

    thread::scope(|scope| {
        let uffd = uffd; // Dropped when an assertion fails, so that no thread waits for ever.
        let (range, to) = (memory.pages(0, 2), elsewhere.0.start);
        // SAFETY: the test's own memory, without references.
        let call = scope.spawn(move || unsafe { mm::remap_fixed(range, to) });
        let event = next(&uffd);
        let Event::Remap { from, to: told, len } = event else { panic!("{event:?}") };
        assert_eq!((from, told, len), (range.start, to, range.len));
        let event = next(&uffd);
        assert!(matches!(event, Event::Unmap(told) if told == range), "the old place: {event:?}");
        call.join().unwrap().unwrap();
        assert_eq!(elsewhere.read(1), 7);

        let range = memory.pages(3, 1);
        // SAFETY: the test's own memory, without references.
        let call = scope.spawn(move || unsafe { mm::advise(range, libc::MADV_DONTNEED) });
        let event = next(&uffd);
        assert!(matches!(event, Event::Remove(told) if told == range), "{event:?}");
        call.join().unwrap().unwrap();
        assert_eq!(memory.read(3), 0);

        let range = memory.pages(4, 2);
        // SAFETY: the test's own memory, without references.
        let call = scope.spawn(move || unsafe { mm::unmap(range) });
        let event = next(&uffd);
        assert!(matches!(event, Event::Unmap(told) if told == range), "{event:?}");
        call.join().unwrap().unwrap();

        let range = memory.pages(7, 1);
        // SAFETY: the test's own memory, without references.
        let call = scope.spawn(move || unsafe { mm::map_fixed_anonymous(range) });
        let event = next(&uffd);
        assert!(matches!(event, Event::Unmap(told) if told == range), "mapped over: {event:?}");
        call.join().unwrap().unwrap();
        assert_eq!(memory.read(7), 0);

        // The rest is unregistered first, so that the end of the test raises no event that no
        // thread reads.
        uffd.unregister(elsewhere.0).unwrap();
        for (first, count) in [(2, 2), (6, 1)] {
            uffd.unregister(memory.pages(first, count)).unwrap();
        }
        assert!(uffd.read_event().unwrap().is_none());
    });
}

#[test]
fn a_range_belongs_to_one_userfaultfd() {
    let (Some(one), Some(other)) = (uffd(Features::WP), uffd(Features::WP)) else {
        return;
    };
    let memory = Memory::new(2);
    assert_eq!(one.write_protect(memory.0, Protection::Set), Err(Errno::NOENT), "not registered yet");
    one.register_wp(memory.0).unwrap();
    assert_eq!(other.register_wp(memory.0), Err(Errno::BUSY));
    one.unregister(memory.0).unwrap();
    other.register_wp(memory.0).unwrap();
    assert_eq!(one.register_wp(Range::new(memory.0.start + 1, PAGE_SIZE)), Err(Errno::INVAL));
}

#[test]
fn a_missing_feature_is_named() {
    let Some(_) = uffd(Features::empty()) else {
        return;
    };
    let future = Features::from_bits_retain(1 << 60);
    let error = Uffd::new(Features::WP | future).unwrap_err();
    assert_eq!(error, CreateError::MissingFeatures { missing: future });
    let error = CreateError::MissingFeatures { missing: Features::WP_ASYNC | Features::WP };
    assert!(error.to_string().contains("WP_ASYNC") && error.to_string().contains("Linux 6.7"), "{error}");
    assert_eq!(Features::WP_UNPOPULATED.since(), "Linux 6.4");
    assert_eq!(Features::EVENT_UNMAP.since(), "Linux 4.11");
    assert!(Uffd::supported_features().unwrap().contains(Features::WP | Features::EVENT_FORK));
}

#[test]
fn a_kernel_without_it_and_a_lack_of_descriptors_are_told_apart() {
    let create = |errno| refusing(libc::SYS_userfaultfd, None, errno, || Uffd::new(Features::WP).unwrap_err());
    let (missing, short) = (create(libc::ENOSYS), create(libc::EMFILE));
    assert_eq!((&missing, &short), (&CreateError::NotCompiledIn, &CreateError::Os(Errno::MFILE)));
    assert!(missing.to_string().contains("CONFIG_USERFAULTFD=y"), "{missing}");
    assert!(short.to_string().starts_with("userfaultfd: "), "{short}");
}

#[test]
fn missing_permission_is_told() {
    let _forking = forking();
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !is_root() || sysctl.trim() != "0" {
        println!("SKIPPED: needs root and vm.unprivileged_userfaultfd=0");
        return;
    }
    let nobody = Child::fork(|| {
        become_nobody();
        u8::from(matches!(Uffd::new(Features::WP), Err(CreateError::NoPermission(_))))
    });
    assert_eq!(nobody.code(), 1);

    if !std::path::Path::new("/dev/userfaultfd").exists() {
        println!("SKIPPED: the rest needs /dev/userfaultfd");
        return;
    }
    // Root without CAP_SYS_PTRACE may open the device, which gives everything but fork events.
    let incapable = Child::fork(|| {
        let Ok(mut sets) = rustix::thread::capabilities(None) else {
            return 10;
        };
        sets.effective.remove(CapabilitySet::SYS_PTRACE);
        if rustix::thread::set_capabilities(None, sets).is_err() {
            return 11;
        }
        // SAFETY: the call takes a number.
        if unsafe { syscall(libc::SYS_userfaultfd, [FLAGS as usize]) } != Err(Errno::PERM) {
            return 12;
        }
        let Ok(uffd) = Uffd::new(Features::WP) else {
            return 13;
        };
        let flags = (rustix::io::fcntl_getfd(&uffd), rustix::fs::fcntl_getfl(&uffd));
        if !matches!(flags, (Ok(fd), Ok(fl)) if !fd.is_empty() && fl.contains(OFlags::NONBLOCK)) {
            return 14;
        }
        match Uffd::new(Features::WP | Features::EVENT_FORK) {
            Err(CreateError::NoForkEvents) => 1,
            _ => 15,
        }
    });
    assert_eq!(incapable.code(), 1);
}

#[test]
fn pages_move_and_a_page_that_is_in_place_is_refused() {
    let Some(uffd) = uffd(Features::WP) else { return };
    if !Uffd::supported_features().unwrap().contains(Features::MOVE) {
        return println!("SKIPPED: no UFFDIO_MOVE");
    }
    drop(uffd);
    let uffd = Uffd::new(Features::WP | Features::MOVE).unwrap();
    let (from, to) = (Memory::new(4), Memory::new(4));
    uffd.register_missing_wp(to.0).unwrap();
    (0..3).for_each(|page| from.write(page, 7 + page as u64));
    // SAFETY: the test's own memory, without references.
    let moved = |first, count| unsafe { uffd.move_pages(from.pages(first, count), to.pages(first, 1).start) };
    assert_eq!(moved(0, 2), Ok(2 * PAGE_SIZE));
    assert_eq!([to.read(0), to.read(1), from.read(0)], [7, 8, 0]);
    from.write(1, 1);
    assert_eq!(moved(1, 1), Err(Errno::EXIST));
    assert_eq!((to.read(1), from.read(1)), (8, 1), "nothing was replaced");
    assert_eq!(moved(1, 3), Err(Errno::EXIST));
    assert_eq!(moved(2, 2), Ok(2 * PAGE_SIZE), "a hole is passed over");
    assert_eq!(to.read(2), 9);
}
