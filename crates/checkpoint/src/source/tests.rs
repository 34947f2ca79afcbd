//! Processes that cannot be read or stopped.

#![allow(unsafe_code)] // A process that waits for another one is made by clone(2).

use std::fs::read_to_string;

use kmem::testing::{Child, Memory, forking, pause_for_ever, refusing};
use kmem::uffd::{Features, Uffd};

use super::*;

/// Memory that is large enough for a process that is no client.
fn memory() -> Memory {
    Memory::new(2 * LEAST / PAGE_SIZE)
}

fn open(pid: i32, memory: &Memory) -> Result<Source, SourceError> {
    Source::open_within(pid, memory.0)
}

#[test]
fn what_the_kernel_refuses_is_said() {
    let _forking = forking();
    let memory = memory();
    memory.write(0, 1);
    let child = Child::idle();
    let pid = child.0;
    let error = open(i32::MAX, &memory).map(drop).unwrap_err();
    assert!(matches!(error, SourceError::NoProcess { .. }), "{error}");
    let opening = || open(pid, &memory).map(drop).unwrap_err();
    let error = refusing(libc::SYS_openat, None, libc::EACCES, opening);
    assert!(matches!(error, SourceError::Pagemap { .. }), "{error}");
    assert_eq!(error.to_string(), format!("cannot look at the memory of process {pid}"));
    let error = refusing(libc::SYS_flock, None, libc::ENOLCK, opening);
    assert!(matches!(error, SourceError::Lock(_)), "{error}");
    assert_eq!(error.to_string(), "cannot lock the page map");
    // As before Linux 6.7: PAGEMAP_SCAN is no ioctl there.
    let (source, all) = (open(pid, &memory).unwrap(), DirtyTree::new(memory.0.pages() as u64).unwrap());
    let scan = || source.populated(&HashSet::new(), &all).unwrap_err();
    let error = refusing(libc::SYS_ioctl, Some(0xC060_6610), libc::ENOTTY, scan);
    assert!(matches!(error, SourceError::Scan { .. }), "{error}");
    assert_eq!(error.to_string(), format!("cannot scan the page map of process {pid}"));
    source.populated(&HashSet::new(), &all).unwrap();
    assert_eq!(all.iter().collect::<Vec<_>>(), [0]);
}

#[test]
fn a_process_that_ends_is_said_whatever_is_asked_of_it() {
    let _forking = forking();
    let memory = memory();
    let child = Child::idle();
    let (pid, source) = (child.0, open(child.0, &memory).unwrap());
    source.process.send_signal(libc::SIGKILL).unwrap();
    while !source.process.has_exited() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // A zombie takes signals.
    let error = source.stop().map(drop).unwrap_err();
    assert!(matches!(error, SourceError::Ended(_)), "{error}");
    assert_eq!(error.to_string(), format!("process {pid} has ended"));
    drop(child);
    let error = source.stop().map(drop).unwrap_err();
    assert!(matches!(error, SourceError::Stop(_)), "{error}");
    assert_eq!(error.to_string(), "cannot stop the process");
    let error = source.files().map(drop).unwrap_err();
    assert!(matches!(error, SourceError::Mappings { .. }), "{error}");
    assert_eq!(error.to_string(), format!("cannot list the mappings of process {pid}"));
}

#[test]
fn memory_that_does_not_come_to_rest_is_not_waited_for() {
    let _forking = forking();
    let memory = memory();
    let child = Child::fork(|| {
        let (start, flags) = (memory.0.start, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // A hole that moves.
        for page in (0..memory.0.pages() / 4).cycle() {
            if memory.unmap(page).is_err() {
                return 1;
            }
            std::thread::sleep(Duration::from_micros(500));
            let place = std::ptr::with_exposed_provenance_mut(start + page * PAGE_SIZE);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a hole in this child's own memory, which nobody uses.
            unsafe { libc::mmap(place, PAGE_SIZE, protection, flags, -1, 0) };
        }
        0
    });
    let mut source = open(child.0, &memory).unwrap();
    // A child that gets no CPU for a while rests.
    let start = Instant::now();
    let error = loop {
        match source.find_at_rest(SCANS, Duration::from_millis(100)) {
            Ok(()) => assert!(start.elapsed() < Duration::from_secs(60), "it comes to rest"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SourceError::Restless(_)), "{error}");
    assert_eq!(error.to_string(), format!("the memory of process {} does not come to rest; try again", child.0));
}

extern "C" fn waited_for(_: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the call takes numbers: this process ends with the one that waits for it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    pause_for_ever()
}

/// As one whose disk does not answer: it waits in the kernel, where a signal does not stop it.
#[test]
fn a_process_that_waits_in_the_kernel_is_not_waited_for() {
    let _forking = forking();
    let (memory, stack) = (memory(), Memory::new(16));
    let top: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(stack.0.end());
    let child = Child::fork(|| {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the new process has a stack of its own, and this one waits for its end.
        unsafe { libc::clone(waited_for, top, flags, std::ptr::null_mut()) };
        0
    });
    let start = Instant::now();
    while !read_to_string(format!("/proc/{}/stat", child.0)).unwrap().contains(") D ") {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
    let source = open(child.0, &memory).unwrap();
    let error = source.stop_within(Duration::from_millis(50)).map(drop).unwrap_err();
    assert!(matches!(error, SourceError::StillRuns(_)), "{error}");
    assert_eq!(
        error.to_string(),
        format!(
            "process {} does not stop; one of its threads waits in the kernel \
                                           (state D), for a disk say: try again later",
            child.0
        )
    );
}

#[test]
fn a_page_that_has_failed_is_an_error_and_one_that_is_not_mapped_is_zeros() {
    let _forking = forking();
    let memory = memory();
    memory.write(0, 1);
    let page = memory.0.start + PAGE_SIZE;
    let uffd = match Uffd::new(Features::POISON) {
        Ok(uffd) => uffd,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    uffd.register_missing(memory.0).unwrap();
    // SAFETY: nobody reads the page.
    unsafe { uffd.poison(page).unwrap() };
    drop(uffd);
    let child = Child::idle();
    let source = open(child.0, &memory).unwrap();
    let mut out = [9; 3 * PAGE_SIZE];
    let error = source.read(&[0, 1, 2], &mut out).unwrap_err();
    assert!(matches!(error, SourceError::Unreadable { address, .. } if address == page), "{error}");
    assert!(error.to_string().contains("memory of the host has failed"), "{error}");
    source.read(&[0, 2], &mut out).unwrap();
    assert_eq!((out[..PAGE_SIZE].contains(&1), out[PAGE_SIZE]), (true, 0));
    // In a child that has less.
    //
    // SAFETY: the memory is the test's, and only its children read it from here on.
    unsafe { kmem::raw::munmap(page, PAGE_SIZE).unwrap() };
    let child = Child::idle();
    let source = Source { pid: child.0, ..source };
    let mut out = [9; 3 * PAGE_SIZE];
    source.read(&[0, 1, 2], &mut out).unwrap();
    assert_eq!(out[PAGE_SIZE..2 * PAGE_SIZE], [0; PAGE_SIZE]);
}
