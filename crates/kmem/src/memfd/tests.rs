#![allow(unsafe_code)] // Tests of mappings.

use std::sync::atomic::Ordering;

use super::*;
use crate::testing::{Memory, OPEN, refusing};
use crate::{PAGE_SIZE, Range, mm, procfs, raw};

#[test]
fn nobody_else_can_change_a_store() {
    let (fd, store) = create_sealed("kmem-test", 4 * PAGE_SIZE).unwrap();
    store.write_page(1, &[7; PAGE_SIZE]);
    require_seals(&fd).unwrap();
    assert!(seals(&fd).unwrap().contains(STORE_SEALS));

    let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let again = std::fs::File::options().read(true).write(true).open(again).unwrap();
    for fd in [fd.as_fd(), again.as_fd()] {
        assert_eq!(rustix::io::pwrite(fd, &[1], 0), Err(Errno::PERM), "write");
        assert_eq!(rustix::fs::ftruncate(fd, 0), Err(Errno::PERM), "shrink");
        assert_eq!(rustix::fs::ftruncate(fd, 8 * PAGE_SIZE as u64), Err(Errno::PERM), "grow");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(fd, punch, 0, 4096), Err(Errno::PERM), "punch");
        assert!(allocate(fd, 4 * PAGE_SIZE as u64, 1).is_err(), "grow by allocating");
        let error = map_shared(fd, PAGE_SIZE).unwrap_err();
        assert_eq!(error, MemfdError::Map { len: PAGE_SIZE, errno: Errno::PERM });
        assert_eq!(rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE), Err(Errno::PERM), "seal");
        // A map for reading cannot be made writable afterwards either.
        let reader = map_readonly(fd, 4 * PAGE_SIZE).unwrap();
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the test's own map, without references.
        let error = unsafe { raw::mprotect(reader.range().start, reader.range().len, writable) };
        assert_eq!(error, Err(Errno::ACCESS));
        assert_eq!(reader.load_u64(PAGE_SIZE), u64::from_ne_bytes([7; 8]));
    }
    // Not even the owner can give single pages back.
    // SAFETY: the store's own memory, without references.
    let punched = unsafe { mm::advise(store.range(), libc::MADV_REMOVE) };
    assert_eq!(punched, Err(Errno::PERM));
    store.write_page(1, &[8; PAGE_SIZE]);
    let mut page = [0; PAGE_SIZE];
    store.read_page(1, &mut page);
    assert_eq!(page, [8; PAGE_SIZE]);
}

/// Runs a check in a thread without capabilities, and as another user.
fn as_others(check: impl Fn() + Sync) {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_gid, set_thread_res_uid};
    if !rustix::process::geteuid().is_root() {
        return check();
    }
    for other in [0, 4321] {
        std::thread::scope(|scope| {
            let run = || {
                if other > 0 {
                    set_thread_res_gid(Gid::from_raw(other), Gid::from_raw(other), Gid::from_raw(other)).unwrap();
                    set_thread_res_uid(Uid::from_raw(other), Uid::from_raw(other), Uid::from_raw(other)).unwrap();
                }
                let mut sets = capabilities(None).unwrap();
                (sets.effective, sets.permitted) = (CapabilitySet::empty(), CapabilitySet::empty());
                set_capabilities(None, sets).unwrap();
                check();
            };
            scope.spawn(run).join().unwrap();
        });
    }
}

/// Everything that a process with a descriptor of a store could try.
fn try_to_write(reader: BorrowedFd<'_>) {
    let again = |flags: OFlags| {
        let path = format!("/proc/thread-self/fd/{}", reader.as_raw_fd());
        rustix::fs::open(path, flags, Mode::empty())
    };
    assert!(rustix::fs::fchmod(reader, Mode::from_raw_mode(0o666)).is_err(), "chmod");
    assert!(rustix::fs::fchown(reader, Some(Uid::from_raw(0)), None).is_err(), "chown");
    for flags in [OFlags::RDWR, OFlags::WRONLY, OFlags::RDWR | OFlags::TRUNC] {
        assert!(again(flags).is_err(), "reopened with {flags:?}");
    }
    let fallocate = |flags| rustix::fs::fallocate(reader, flags, 0, 4096);
    assert!(rustix::io::pwrite(reader, &[1], 0).is_err(), "write");
    assert!(rustix::fs::ftruncate(reader, 0).is_err(), "shrink");
    assert!(fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE).is_err(), "punch");
    assert!(fallocate(FallocateFlags::ZERO_RANGE).is_err(), "zero");
    assert!(rustix::fs::fcntl_add_seals(reader, SealFlags::WRITE).is_err(), "seal");
    assert!(map_shared(reader, PAGE_SIZE).is_err(), "map");
    let map = map_readonly(reader, PAGE_SIZE).unwrap();
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the test's own map, without references.
    unsafe {
        assert!(raw::mprotect(map.range().start, map.range().len, writable).is_err(), "mprotect");
        assert!(mm::advise(map.range(), libc::MADV_REMOVE).is_err(), "MADV_REMOVE");
    }
    let own = std::fs::File::options().write(true).open("/proc/thread-self/mem");
    let forced = own.and_then(|file| std::os::unix::fs::FileExt::write_at(&file, &[1], map.range().start as u64));
    assert!(forced.is_err(), "/proc/self/mem");
}

#[test]
fn others_only_read_a_store_whose_memory_can_be_given_back() {
    let store = create_store("kmem-test", 2 * HUGE_PAGE_SIZE).unwrap();
    require_seals(&store.reader).unwrap();
    require_kept(&store.reader).unwrap();
    store.map.write_page(0, &[7; PAGE_SIZE]);
    store.map.write_page(HUGE_PAGE_SIZE / PAGE_SIZE, &[8; PAGE_SIZE]);
    if !store.can_punch {
        assert_eq!(seals(&store.reader).unwrap() & STORE_SEALS, STORE_SEALS);
        return eprintln!("SKIPPED: that memory is given back: this user has no CAP_CHOWN");
    }
    assert!(require_seals(&store.writer).is_err(), "a descriptor for writing is not handed out");
    as_others(|| try_to_write(store.reader.as_fd()));
    let mut page = [0; PAGE_SIZE];
    read_page(&store.reader, 0, &mut page).unwrap();
    assert_eq!(page, [7; PAGE_SIZE]);
    store.punch(0, HUGE_PAGE_SIZE as u64).unwrap();
    assert_eq!(resident_bytes(&store.reader).unwrap(), PAGE_SIZE as u64);
    read_page(&store.reader, HUGE_PAGE_SIZE / PAGE_SIZE, &mut page).unwrap();
    assert_eq!(page, [8; PAGE_SIZE]);
    assert!(read_page(&store.reader, 2 * HUGE_PAGE_SIZE / PAGE_SIZE, &mut page).is_err(), "behind the end");
    allocate(&store.writer, 0, 2 * PAGE_SIZE as u64).unwrap();
    store.punch_unused(1).unwrap();
    assert_eq!(resident_bytes(&store.reader).unwrap(), 2 * PAGE_SIZE as u64);
}

#[test]
#[should_panic(expected = "cut a huge page")]
fn a_huge_page_is_never_punched_in_part() {
    let _ = create_store("kmem-test", HUGE_PAGE_SIZE).unwrap().punch(0, PAGE_SIZE as u64);
}

#[test]
fn a_store_of_another_owner_is_not_taken_for_ours() {
    let fd = create("kmem-test").unwrap();
    rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, FIXED_SEALS).unwrap();
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let reader = rustix::fs::open(path, OFlags::RDONLY, Mode::empty()).unwrap();
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(0o400)).unwrap();
    assert!(require_seals(&reader).is_err(), "its mode lets somebody open it");
    rustix::fs::fchmod(&fd, Mode::empty()).unwrap();
    require_seals(&reader).unwrap();
    assert!(require_kept(&reader).is_err(), "its owner may change the mode");
}

#[test]
fn failed_memory_is_an_error_and_no_signal() {
    let (fd, store) = create_sealed("kmem-test", 2 * PAGE_SIZE).unwrap();
    store.write_page(0, &[3; PAGE_SIZE]);
    // SAFETY: the advice takes the page from the test's own map, to which no reference exists; an
    // access through the map would raise SIGBUS.
    let poisoned = unsafe { mm::advise(Range::new(store.range().start, PAGE_SIZE), libc::MADV_HWPOISON) };
    if let Err(e) = poisoned {
        return eprintln!("SKIPPED: no memory can be made to fail here: {e}");
    }
    let mut page = [0; PAGE_SIZE];
    let error = read_page(&fd, 0, &mut page).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    read_page(&fd, 1, &mut page).unwrap();
}

#[test]
fn private_mappings_share_and_copy() {
    let (fd, store) = create_sealed("kmem-test", 2 * PAGE_SIZE).unwrap();
    store.write_page(1, &[5; PAGE_SIZE]);
    let memory = Memory::new(2);
    // SAFETY: the test's own memory, without references.
    unsafe { mm::map_fixed_private(fd.as_fd(), memory.pages(0, 1), PAGE_SIZE as u64) }.unwrap();
    assert_eq!(memory.read(0), u64::from_ne_bytes([5; 8]));
    store.write_page(1, &[6; PAGE_SIZE]);
    assert_eq!(memory.read(0), u64::from_ne_bytes([6; 8]), "the same frame");
    memory.write(0, 1);
    store.write_page(1, &[9; PAGE_SIZE]);
    assert_eq!(memory.read(0), 1, "a copy of its own");
    assert_eq!(store.load_u64(PAGE_SIZE), u64::from_ne_bytes([9; 8]), "which the store knows nothing of");
}

#[test]
fn a_store_from_somebody_else_is_checked() {
    let fd = create("kmem-test").unwrap();
    let has = seals(&fd).unwrap();
    assert_eq!(require_seals(&fd), Err(MemfdError::MissingSeals { missing: STORE_SEALS }));
    rustix::fs::fcntl_add_seals(&fd, STORE_SEALS - SealFlags::FUTURE_WRITE).unwrap();
    let error = require_seals(&fd).unwrap_err();
    assert_eq!(error, MemfdError::MissingSeals { missing: SealFlags::FUTURE_WRITE });
    assert!(error.to_string().contains("FUTURE_WRITE"));
    assert!(!has.intersects(STORE_SEALS));
    // An ordinary file has no seals, but a file on tmpfs says that it cannot be sealed any more.
    assert!(require_seals(tempfile::tempfile().unwrap()).is_err());
    assert!(matches!(require_seals(std::io::stdin()), Err(MemfdError::NotAMemfd(_) | MemfdError::MissingSeals { .. })));
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(require_seals(pipe), Err(MemfdError::NotAMemfd(Errno::INVAL)));
}

#[test]
fn what_is_written_once_can_be_changed_by_nobody() {
    let write = |fd: &OwnedFd| rustix::io::pwrite(fd, &[7; PAGE_SIZE], 2 * PAGE_SIZE as u64).map(drop);
    let fill = |fd: &OwnedFd| write(fd).map_err(MemfdError::Seal);
    let fd = create_written("kmem-test", 4 * PAGE_SIZE, fill).unwrap();
    require_written(&fd).unwrap();
    require_seals(&fd).unwrap();
    let again = std::fs::File::options().read(true).write(true).open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let again: OwnedFd = again.unwrap().into();
    assert_eq!(write(&again), Err(Errno::PERM));
    let fallocate = |flags| rustix::fs::fallocate(&again, flags, 0, 4096);
    assert_eq!(fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE), Err(Errno::PERM));
    assert!(map_shared(&again, PAGE_SIZE).is_err() && rustix::fs::ftruncate(&again, 0).is_err());
    assert_eq!(resident_bytes(&fd).unwrap(), PAGE_SIZE as u64);
    let failed = create_written("kmem-test", PAGE_SIZE, |_| Err(MemfdError::OtherPages)).unwrap_err();
    assert_eq!(failed, MemfdError::OtherPages);
    // One that its maker can write still.
    let (sealed, _map) = create_sealed("kmem-test", PAGE_SIZE).unwrap();
    assert_eq!(require_written(&sealed), Err(MemfdError::MissingSeals { missing: SealFlags::WRITE }));
    // Memory of a pool of huge pages, whose single pages cannot be mapped.
    let huge = rustix::fs::memfd_create("kmem-test", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB).unwrap();
    rustix::fs::fcntl_add_seals(&huge, WRITTEN_SEALS).unwrap();
    assert_eq!(require_written(&huge), Err(MemfdError::OtherPages));
}

#[test]
fn each_step_of_making_a_store_that_fails_is_named() {
    let name = "x".repeat(300);
    let error = create_store(&name, PAGE_SIZE).unwrap_err();
    assert!(error.to_string().starts_with("creating memfd"), "{error}");
    assert_eq!(error, MemfdError::Create { name, errno: Errno::INVAL });
    let len = usize::MAX - (PAGE_SIZE - 1);
    let error = create_sealed("kmem-test", len).unwrap_err();
    assert!(error.to_string().starts_with("resizing a memfd to"), "{error}");
    assert_eq!(error, MemfdError::Resize { len, errno: Errno::INVAL });
    // As before Linux 5.1.
    let add = Some(libc::F_ADD_SEALS as u32);
    let error = refusing(libc::SYS_fcntl, add, libc::EINVAL, || create_sealed("kmem-test", PAGE_SIZE).unwrap_err());
    assert!(error.to_string().starts_with("sealing a memfd"), "{error}");
    assert_eq!(error, MemfdError::Seal(Errno::INVAL));
    // As without /proc.
    let make = || create_store("kmem-test", PAGE_SIZE).unwrap_err();
    let error = refusing(OPEN, None, libc::ENOENT, make);
    assert!(error.to_string().ends_with("is /proc mounted?"), "{error}");
    assert_eq!(error, MemfdError::Reopen(Errno::NOENT));
}

#[test]
fn maps_tells_the_same_identity() {
    let (fd, store) = create_sealed("kmem-test-identity", PAGE_SIZE).unwrap();
    let (other, _map) = create_sealed("kmem-test-identity", PAGE_SIZE).unwrap();
    let id = identity(&fd).unwrap();
    assert_ne!(id, identity(&other).unwrap());
    let mut found = None;
    procfs::for_each_map(None, |line| {
        if line.range == store.range() {
            found = Some((FileId { dev: line.dev, ino: line.inode }, line.perms, line.path.clone()));
        }
    })
    .unwrap();
    let (told, perms, path) = found.unwrap();
    assert_eq!(told, id);
    assert!(perms.shared && perms.write && !perms.exec);
    assert_eq!(path, "/memfd:kmem-test-identity (deleted)");
}

#[test]
fn memory_is_taken_when_written_or_allocated() {
    let (fd, store) = create_sealed("kmem-test", 64 * PAGE_SIZE).unwrap();
    assert_eq!(resident_bytes(&fd).unwrap(), 0);
    allocate(&fd, 0, 8 * PAGE_SIZE as u64).unwrap();
    let allocated = resident_bytes(&fd).unwrap();
    assert!(allocated >= 8 * PAGE_SIZE as u64);
    store.write_page(63, &[1; PAGE_SIZE]);
    assert!(resident_bytes(&fd).unwrap() > allocated);
}

#[test]
fn atomics_reach_other_mappings() {
    let fd = create("kmem-test").unwrap();
    rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).unwrap();
    let (one, other) = (map_shared(&fd, PAGE_SIZE).unwrap(), map_readonly(&fd, PAGE_SIZE).unwrap());
    one.atomic_u64(4088).fetch_add(3, Ordering::Relaxed);
    assert_eq!(other.load_u64(4088), 3);
    assert_eq!((one.len(), one.range().pages()), (PAGE_SIZE, 1));
}

#[test]
fn a_dropped_map_is_gone() {
    let fd = create("kmem-test").unwrap();
    rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).unwrap();
    let id = identity(&fd).unwrap();
    let mapped = || {
        let mut count = 0;
        procfs::for_each_map(None, |line| count += usize::from(line.inode == id.ino && line.dev == id.dev)).unwrap();
        count
    };
    let map = map_shared(&fd, PAGE_SIZE).unwrap();
    assert_eq!(mapped(), 1);
    drop(map);
    assert_eq!(mapped(), 0);
}

fn small(writable: bool) -> SharedMap {
    let fd = create("kmem-test").unwrap();
    rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).unwrap();
    if writable { map_shared(&fd, PAGE_SIZE) } else { map_readonly(&fd, PAGE_SIZE) }.unwrap()
}

#[test]
#[should_panic(expected = "page 1 of 1")]
fn pages_outside_are_refused() {
    small(true).write_page(1, &[0; PAGE_SIZE]);
}

#[test]
#[should_panic(expected = "lies outside")]
fn words_outside_are_refused() {
    small(true).atomic_u64(4096);
}

#[test]
#[should_panic(expected = "multiple of 8")]
fn crooked_words_are_refused() {
    small(true).load_u64(4);
}

#[test]
#[should_panic(expected = "reading only")]
fn reading_maps_are_not_written() {
    small(false).write_page(0, &[0; PAGE_SIZE]);
}

#[test]
fn a_huge_page_keeps_what_was_there() {
    let (fd, map) = create_sealed("kmem-test", 2 * HUGE_PAGE_SIZE).unwrap();
    let at = HUGE_PAGE_SIZE / PAGE_SIZE + 3;
    map.write_page(at, &[7; PAGE_SIZE]);
    match map.make_huge(HUGE_PAGE_SIZE) {
        Err(e) => {
            eprintln!("SKIPPED: this machine gives no huge page: {e}");
            assert_eq!(resident_bytes(&fd).unwrap(), PAGE_SIZE as u64);
        }
        Ok(()) => assert_eq!(resident_bytes(&fd).unwrap(), HUGE_PAGE_SIZE as u64),
    }
    let mut page = [1; PAGE_SIZE];
    map.read_page(at, &mut page);
    assert_eq!(page, [7; PAGE_SIZE]);
    map.read_page(at + 1, &mut page);
    assert_eq!(page, [0; PAGE_SIZE]);
    assert!(map.range().start.is_multiple_of(HUGE_PAGE_SIZE));
}

#[test]
fn pages_without_memory_are_filled_at_one_stroke() {
    let filler = match filler() {
        Ok(filler) => filler,
        Err(e) => return eprintln!("SKIPPED: {e}"),
    };
    let (fd, map) = create_sealed("kmem-test", 16 * PAGE_SIZE).unwrap();
    let pages: Vec<[u8; PAGE_SIZE]> = (1..=4).map(|byte| [byte; PAGE_SIZE]).collect();
    assert_eq!(map.fill(&filler, 0, &pages), 0, "not registered");
    map.register(&filler, 0..8 * PAGE_SIZE).unwrap();
    map.register(&filler, 0..8 * PAGE_SIZE).unwrap();
    assert_eq!(map.fill(&filler, 1, &pages), 4);
    assert_eq!((map.fill(&filler, 1, &pages), map.fill(&filler, 0, &[])), (0, 0), "they have memory by now");
    map.write_page(7, &[9; PAGE_SIZE]);
    assert_eq!(map.fill(&filler, 5, &pages), 0, "beyond what is registered");
    assert_eq!(map.fill(&filler, 5, &pages[..3]), 2, "up to one that has");
    assert_eq!(resident_bytes(&fd).unwrap(), 7 * PAGE_SIZE as u64);
    for (index, byte) in [1, 2, 3, 4, 1, 2, 9, 0].into_iter().enumerate() {
        assert!(map.page_equals(index + 1, &[byte; PAGE_SIZE]), "page {}", index + 1);
    }
    let mut other = [2; PAGE_SIZE];
    other[PAGE_SIZE - 1] = 3;
    assert!(!map.page_equals(2, &other));
    // Registered memory can be written, and takes memory, as before.
    map.write_page(0, &[8; PAGE_SIZE]);
    map.write_page(2, &[8; PAGE_SIZE]);
    map.unregister(&filler, 0..8 * PAGE_SIZE);
    assert!(
        map.page_equals(0, &[8; PAGE_SIZE])
            && map.page_equals(2, &[8; PAGE_SIZE])
            && map.page_equals(3, &[3; PAGE_SIZE])
    );
}

#[test]
fn maps_of_all_lengths_hold_what_they_should() {
    let fd = create("kmem-test").unwrap();
    rustix::fs::ftruncate(&fd, 8 << 20).unwrap();
    for len in [1, PAGE_SIZE, HUGE_PAGE_SIZE - 1, HUGE_PAGE_SIZE, HUGE_PAGE_SIZE + 1, 3 * HUGE_PAGE_SIZE + PAGE_SIZE] {
        let map = map_shared(&fd, len).unwrap();
        let last = (len / PAGE_SIZE).saturating_sub(1);
        assert_eq!(map.len(), len);
        if len >= PAGE_SIZE {
            map.write_page(last, &[len as u8; PAGE_SIZE]);
            let mut page = [0; PAGE_SIZE];
            map.read_page(last, &mut page);
            assert_eq!(page, [len as u8; PAGE_SIZE]);
        }
    }
    assert!(map_shared(&fd, 0).is_err());
}

#[test]
fn a_file_keeps_the_node_that_its_memory_should_come_from() {
    let (fd, map) = create_sealed("kmem:node", PAGE_SIZE).unwrap();
    assert_eq!(map.preferred_node(), None);
    map.prefer_node(0).unwrap();
    let again = map_readonly(&fd, PAGE_SIZE).unwrap();
    drop(map);
    assert_eq!(again.preferred_node(), Some(0), "whoever maps it");
    assert!(again.prefer_node(1023).is_err() && again.prefer_node(1 << 20).is_err());
}
