use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd;
use wire::SEGMENT_PAGES;

use super::free::HUGE;
use super::reserve::REFUSED;
use super::segment::{MOST_SEGMENTS, Memory};
use super::*;
use crate::core::content::frame::Frame;

fn store() -> Store {
    Store::new("test", false, Duration::from_secs(60), 1 << 20)
}

fn page(byte: u8) -> [u8; PAGE_SIZE] {
    [byte; PAGE_SIZE]
}

/// Frames in consecutive slots, each with one user; `bytes` of the first, and so on.
fn frames(store: &Store, bytes: std::ops::Range<u32>) -> Vec<Frame> {
    let mut cursor = Cursor::new(store, None);
    bytes.map(|byte| cursor.put(&page(byte as u8), 1).unwrap()).collect()
}

fn leave(store: &Store, frame: Frame) {
    assert!(store.unref(frame).is_some());
    store.quarantine(frame);
}

/// A time when every quarantine is over.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(61)
}

/// What a reference that outlives mappings and the file's own pages sees: a pipe that was given the
/// page of a frame, as `vmsplice` and `splice` do.
struct Reference(OwnedFd, #[expect(dead_code, reason = "a pipe without a writer is at its end")] OwnedFd);

impl Reference {
    fn to(store: &Store, frame: Frame) -> Self {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut offset = (frame.slot().index() * PAGE_SIZE) as u64;
        let segment = store.segment(frame).unwrap();
        let flags = rustix::pipe::SpliceFlags::empty();
        let spliced = rustix::pipe::splice(segment.fd(), Some(&mut offset), &writer, None, PAGE_SIZE, flags);
        assert_eq!(spliced, Ok(PAGE_SIZE));
        Self(reader, writer)
    }

    fn read(&self) -> [u8; PAGE_SIZE] {
        let mut bytes = page(0);
        assert_eq!(rustix::io::read(&self.0, &mut bytes), Ok(PAGE_SIZE));
        bytes
    }
}

#[test]
fn a_slot_that_was_a_frame_is_not_written_again_while_its_memory_is_the_same() {
    let store = store();
    let keeper = Cursor::new(&store, None).put(&page(0), 1).unwrap();
    let mut seen: HashMap<Frame, u8> = HashMap::new();
    // Frames come and go; the first of each piece stays, so that no piece is ever punched.
    let mut kept = HashSet::new();
    for round in 0..20u32 {
        let new = frames(&store, round * 200..(round + 1) * 200);
        for (i, &frame) in new.iter().enumerate() {
            assert!(seen.insert(frame, (round * 200 + i as u32) as u8).is_none(), "{frame:?} was a frame before");
            if !kept.insert(frame.0 / HUGE) {
                leave(&store, frame);
            }
        }
        store.tidy(later());
    }
    let mut bytes = page(0);
    for (frame, byte) in seen {
        assert!(store.read(frame, &mut bytes) && bytes == page(byte), "{frame:?} lost its bytes");
    }
    assert_eq!(store.users(keeper), 1);
}

#[test]
fn a_piece_is_given_back_when_all_of_it_is_dead_and_references_keep_their_bytes() {
    for huge in [false, true] {
        let store = store();
        if !huge {
            store.free.lock().no_huge_until = Some(Instant::now() + REFUSED);
        }
        // The segment stays for the sake of one frame, in a piece of its own.
        let all = frames(&store, 0..2 * HUGE);
        let (first, rest) = all.split_first().unwrap();
        let references: Vec<(u8, Reference)> =
            [HUGE, HUGE + 99].map(|i| (i as u8, Reference::to(&store, all[i as usize]))).into();
        let (last, dying) = rest.split_last().unwrap();
        dying.iter().for_each(|&frame| leave(&store, frame));
        let before = store.usage();
        assert!(store.tidy(Instant::now()).is_empty(), "the quarantine is not over");
        assert_eq!((store.usage().dead, store.usage().resident_bytes), (dying.len() as u64, before.resident_bytes));
        assert!(store.tidy(later()).is_empty(), "one frame is left in the first piece, and one in the last");
        leave(&store, *last);
        assert!(store.tidy(later()).is_empty());
        let after = store.usage();
        let can_punch = store.segment(*first).unwrap().can_punch();
        if !can_punch {
            return eprintln!("SKIPPED: this user cannot keep others from writing a store but by a seal");
        }
        let most = u64::from(HUGE) * PAGE_SIZE as u64;
        assert!(after.resident_bytes <= most, "{} bytes for one frame", after.resident_bytes);
        assert!(after.dead < u64::from(HUGE) && after.frames == 1, "{after:?}");
        // The slots are used again, with new memory.
        for frame in frames(&store, 0..u32::from(u16::MAX).min(SEGMENT_PAGES - 2 * HUGE)) {
            assert!(store.try_ref(frame));
        }
        for (byte, reference) in references {
            assert_eq!(reference.read(), page(byte), "huge pages: {huge}");
        }
        let mut bytes = page(1);
        assert!(store.read(*first, &mut bytes) && bytes == page(0));
    }
}

#[test]
fn a_pinned_frame_keeps_its_piece() {
    let store = store();
    let all = frames(&store, 0..2 * HUGE);
    let pinned = all[HUGE as usize / 2];
    store.pin(pinned);
    all.iter().for_each(|&frame| leave(&store, frame));
    // Another frame keeps the segment.
    let other = frames(&store, 7..8)[0];
    store.tidy(later());
    assert_eq!(store.usage().pinned, 1);
    let mut bytes = page(0);
    for &frame in all.iter().filter(|&&frame| Piece::of(frame) == Piece::of(pinned)) {
        let byte = all.iter().position(|&at| at == frame).unwrap() as u8;
        assert!(store.read(frame, &mut bytes) && bytes == page(byte), "{frame:?}");
    }
    assert_eq!(store.users(other), 1);
}

#[test]
fn a_sealed_store_gives_its_memory_back_by_segments() {
    let store = store();
    let first = std::thread::scope(|scope| {
        let make = || {
            // Of this thread only.
            let mut sets = rustix::thread::capabilities(None).unwrap();
            sets.effective.remove(rustix::thread::CapabilitySet::CHOWN);
            rustix::thread::set_capabilities(None, sets).unwrap();
            frames(&store, 0..3 * HUGE)
        };
        scope.spawn(make).join().unwrap()
    });
    assert!(!store.segment(first[0]).unwrap().can_punch());
    let before = store.usage().resident_bytes;
    first[1..].iter().for_each(|&frame| leave(&store, frame));
    assert!(store.tidy(later()).is_empty());
    assert_eq!((store.usage().resident_bytes, store.usage().dead), (before, u64::from(3 * HUGE) - 1));
    leave(&store, first[0]);
    assert_eq!(store.tidy(later()).len(), 1);
}

#[test]
fn pieces_that_were_begun_come_before_fresh_ones() {
    let store = store();
    let mut frames: Vec<Frame> = (0..200).map(|i| Cursor::new(&store, None).put(&page(i), 1).unwrap()).collect();
    // Each cursor takes memory for 128 slots or more. Without regard to that 200 of them would fill
    // the segment.
    let resident = |store: &Store| store.usage().resident_bytes / PAGE_SIZE as u64;
    assert!((200..=u64::from(HUGE)).contains(&resident(&store)), "{} pages", resident(&store));
    frames.sort_unstable();
    frames.dedup();
    assert_eq!(frames.len(), 200);
    // Not even when nobody remembers what was left over.
    store.free.lock().begun.clear();
    (0..100).for_each(|i| assert!(Cursor::new(&store, None).put(&page(i), 1).is_ok()));
    assert!(resident(&store) <= u64::from(HUGE), "{} pages", resident(&store));
}

#[test]
fn a_stretch_that_was_begun_is_filled_before_another_is() {
    let store = store();
    // Each worker's turn makes as many frames as there is something new; then it drops its cursor.
    for turn in 0..40u32 {
        let mut cursor = Cursor::new(&store, None);
        (0..100 + turn % 3).for_each(|i| assert!(cursor.put(&page(i as u8), 1).is_ok()));
    }
    let usage = store.usage();
    let idle = usage.resident_bytes / PAGE_SIZE as u64 - usage.frames;
    assert!(idle <= 2 * u64::from(HUGE), "{idle} pages of memory without a frame, of {}", usage.frames);
    // Two at a time do not get in each other's way.
    let (mut one, mut other) = (Cursor::new(&store, None), Cursor::new(&store, None));
    let mut frames: Vec<Frame> =
        (0..300).flat_map(|_| [one.put(&page(1), 1).unwrap(), other.put(&page(2), 1).unwrap()]).collect();
    frames.sort_unstable();
    frames.dedup();
    assert_eq!(frames.len(), 600);
}

#[test]
fn pieces_are_filled_whole_whether_there_are_huge_pages_or_not() {
    for refused in [false, true] {
        let store = store();
        let mut cursor = Cursor::new(&store, None);
        cursor.put(&page(0), 1).unwrap();
        // As if the kernel had none.
        let refuse = || store.free.lock().no_huge_until = refused.then(|| Instant::now() + REFUSED);
        refuse();
        let mut frames: Vec<u32> = Vec::new();
        for i in 0..4 * HUGE {
            refuse();
            frames.push(cursor.put(&page(i as u8), 1).unwrap().0);
        }
        let mut bytes = page(0);
        for (i, &frame) in frames.iter().enumerate() {
            assert!(store.read(Frame(frame), &mut bytes));
            assert_eq!(bytes, page(i as u8));
        }
        drop(cursor);
        let usage = store.usage();
        let idle = usage.resident_bytes / PAGE_SIZE as u64 - usage.frames;
        assert!(idle <= 2 * u64::from(HUGE), "{idle} pages of memory without a frame");
        // What no piece has any more is found all the same: the segment can be filled.
        let mut cursor = Cursor::new(&store, None);
        for _ in usage.frames as u32..SEGMENT_PAGES {
            frames.push(cursor.put(&page(1), 1).unwrap().0);
        }
        frames.sort_unstable();
        frames.dedup();
        assert_eq!(frames.len() as u32, SEGMENT_PAGES - 1, "a slot was used twice");
        assert!(frames.iter().filter(|&&frame| frame / SEGMENT_PAGES == 0).count() as u32 > SEGMENT_PAGES - 2 * HUGE);
    }
}

#[test]
fn what_was_expected_becomes_frames_only_when_it_is_asked_for() {
    let store = store();
    // As if the kernel had no huge pages.
    store.free.lock().no_huge_until = Some(Instant::now() + REFUSED);
    let mut cursor = Cursor::new(&store, None);
    // Where the first stretch begins is drawn at random; the one behind it begins a piece.
    let mut others = 0;
    cursor.need_slots().unwrap();
    while cursor.slots.len() < HUGE as usize {
        cursor.put(&page(0), 1).unwrap();
        others += 1;
        cursor.need_slots().unwrap();
    }
    let before = store.usage().resident_bytes;
    let more = |store: &Store| (store.usage().resident_bytes - before) / PAGE_SIZE as u64;
    let pages: Vec<[u8; PAGE_SIZE]> = (0..100).map(|i| page(i + 1)).collect();
    let keys: Vec<u64> = (0..100).collect();
    let part = |range: Range<usize>| (&pages[range.clone()], &keys[range]);
    let mut holds = Vec::new();
    let mut put =
        |cursor: &mut Cursor<'_>, i: usize| holds.push((cursor.put_as(&pages[i], Some(keys[i]), 1).unwrap(), i));
    cursor.expect([part(0..40), part(50..90)]).unwrap();
    let filled = store.filler.is_some();
    if !filled {
        eprintln!("SKIPPED: that slots are filled: this system has no userfaultfd for files");
    }
    assert_eq!(store.usage().frames, others);
    assert!(!filled || more(&store) == 80 && cursor.filled - cursor.slots.start == 80);
    // As expected; then with some that are not asked for, others that are, and one that is asked
    // for twice.
    (0..20).chain(30..40).chain([50, 50, 95]).chain(60..90).for_each(|i| put(&mut cursor, i));
    assert!(!filled || more(&store) == 80);
    // Nothing is filled while there are slots with memory, and nothing behind the end of the
    // stretch.
    cursor.expect([part(0..100)]).unwrap();
    assert!(!filled || more(&store) == 80);
    while cursor.slots.len() > 30 {
        put(&mut cursor, 7);
    }
    while cursor.slots.start < cursor.populated {
        put(&mut cursor, 8);
    }
    cursor.expect([part(0..100)]).unwrap();
    assert!(cursor.populated <= cursor.slots.end);
    (0..100).for_each(|i| put(&mut cursor, i));
    cursor.expect([part(50..100)]).unwrap();
    drop(cursor);
    // What was left filled is memory that the next cursor writes.
    let mut cursor = Cursor::new(&store, None);
    (0..100).for_each(|i| put(&mut cursor, i));
    for &(frame, i) in &holds {
        let mut bytes = page(0);
        assert!(store.read(frame, &mut bytes) && bytes == pages[i], "{frame:?} holds {} for {}", bytes[0], i + 1);
    }
    assert_eq!(store.usage().frames, others + holds.len() as u64);
}

#[test]
fn a_frame_that_is_left_once_too_often_is_never_used_again() {
    let store = store();
    let frame = Cursor::new(&store, None).put(&page(1), 1).unwrap();
    assert!(store.unref(frame).is_some() && store.unref(frame).is_none());
    store.quarantine(frame);
    assert!(!store.try_ref(frame) && store.users(frame) == 0);
    assert_eq!((store.usage().pinned, store.free.lock().quarantine.len()), (1, 0));
    // Not even if it should be taken for free.
    store.give_slots_back(frame.0..frame.0 + 1);
    let mut cursor = Cursor::new(&store, None);
    for _ in 0..SEGMENT_PAGES - 1 {
        assert_ne!(cursor.put(&page(2), 1).unwrap(), frame);
    }
}

#[test]
fn frames_of_one_cursor_are_consecutive_and_keep_their_bytes() {
    let store = store();
    let mut cursor = Cursor::new(&store, None);
    let frames: Vec<Frame> = (0..600u32).map(|i| cursor.put(&page(i as u8), 1).unwrap()).collect();
    let breaks = frames.windows(2).filter(|w| w[1].0 != w[0].0 + 1).count();
    assert!(
        breaks <= 2,
        "{breaks} breaks: only the end of a segment and where the first piece was begun may break a run"
    );
    let mut bytes = page(0);
    for (i, &frame) in frames.iter().enumerate() {
        assert!(store.read(frame, &mut bytes));
        assert_eq!(bytes, page(i as u8));
    }
}

#[test]
fn a_frame_without_users_cannot_be_taken_and_rests_before_its_memory_goes() {
    let store = store();
    let frame = Cursor::new(&store, None).put(&page(7), 1).unwrap();
    assert!(store.try_ref(frame));
    assert!(store.unref(frame).is_none(), "one user is left");
    assert!(store.unref(frame).is_some(), "the last one leaves");
    assert!(!store.try_ref(frame), "no way back");
    store.quarantine(frame);
    assert!(store.tidy(Instant::now()).is_empty(), "the segment waits for the quarantine");
    assert_eq!(*store.free.lock().count(None), u64::from(SEGMENT_PAGES) - 1);
    assert_eq!(store.tidy(Instant::now() + Duration::from_secs(61)).len(), 1, "then it goes");
    assert_eq!(store.usage().segments, 0);
}

#[test]
fn a_pinned_frame_goes_with_its_segment() {
    let store = store();
    let mut cursor = Cursor::new(&store, None);
    let (pinned, other) = (cursor.put(&page(1), 1).unwrap(), cursor.put(&page(2), 1).unwrap());
    drop(cursor);
    store.pin(pinned);
    assert!(store.unref(pinned).is_some());
    store.quarantine(pinned);
    store.tidy(Instant::now() + Duration::from_secs(61));
    assert!(!store.free.lock().is_free(pinned));
    assert!(store.unref(other).is_some());
    store.quarantine(other);
    assert_eq!(store.tidy(Instant::now() + Duration::from_secs(61)).len(), 1);
}

#[test]
fn a_segment_with_a_cursor_in_it_stays() {
    let store = store();
    let mut cursor = Cursor::new(&store, None);
    let frame = cursor.put(&page(1), 1).unwrap();
    store.unref(frame);
    store.quarantine(frame);
    assert!(store.tidy(Instant::now() + Duration::from_secs(61)).is_empty());
    drop(cursor);
    assert_eq!(store.tidy(Instant::now() + Duration::from_secs(61)).len(), 1);
}

#[test]
fn slots_that_were_not_used_come_back() {
    let store = store();
    let mut cursor = Cursor::new(&store, None);
    cursor.put(&page(1), 1).unwrap();
    drop(cursor);
    assert_eq!(*store.free.lock().count(None), u64::from(SEGMENT_PAGES) - 1);
}

/// Why a store that is to leave all memory alone does not grow.
fn without_memory() -> GrowError {
    let store = Store::new("test", false, Duration::ZERO, u64::MAX);
    Cursor::new(&store, None).put(&page(1), 1).unwrap_err()
}

#[test]
fn a_store_without_memory_says_so() {
    let is_limited = kmem::cgroup::memory_headroom().is_ok_and(|left| left.is_some());
    match without_memory() {
        GrowError::Cgroup { .. } => assert!(is_limited),
        GrowError::Host { .. } => assert!(!is_limited),
        why => panic!("{why}"),
    }
}

/// A memory cgroup with a limit, version 1 or 2.
struct Group(std::path::PathBuf);

impl Group {
    fn new() -> Option<Self> {
        for (root, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
            let path = std::path::Path::new(root).join(format!("pageone-store-{}", std::process::id()));
            if std::fs::create_dir(&path).is_ok() {
                let group = Self(path);
                if std::fs::write(group.0.join(limit), "1073741824").is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has ended may be in it for a moment.
        while std::fs::remove_dir(&self.0).is_err_and(|e| e.kind() == std::io::ErrorKind::ResourceBusy) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_store_whose_cgroup_leaves_too_little_names_it() {
    let Some(group) = Group::new() else {
        return println!("SKIPPED: no memory cgroup can be made here");
    };
    let tasks = group.0.join("cgroup.procs");
    crate::testing::alone_after(&format!("echo $$ > {}", tasks.display()), || {
        let why = without_memory();
        assert!(matches!(why, GrowError::Cgroup { left_mib: ..=1024, .. }), "{why}");
    });
}

#[test]
fn a_store_that_cannot_grow_says_why() {
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(store().adopt(7, pipe), Err(GrowError::Memfd(_))), "no memfd");

    // Its file takes no memory: the descriptor is not for writing.
    let store = store();
    let file = memfd::create_store("test", SEGMENT_PAGES as usize * PAGE_SIZE).unwrap();
    let file = memfd::StoreFile { writer: file.reader.try_clone().unwrap(), ..file };
    store.add(Segment::new(7, Memory::Own(file), None, None)).unwrap();
    let why = Cursor::new(&store, None).put(&page(1), 1).unwrap_err();
    assert!(matches!(why, GrowError::Allocate(_)), "{why}");

    let segment = store.segments.read()[0].clone();
    store.segments.write().resize(MOST_SEGMENTS, segment);
    let why = store.grow(None).unwrap_err();
    assert!(matches!(why, GrowError::Full(MOST_SEGMENTS)), "{why}");
}

#[test]
fn a_segment_of_an_earlier_daemon_is_read_and_never_written() {
    let (fd, map) = memfd::create_sealed("old", SEGMENT_PAGES as usize * PAGE_SIZE).unwrap();
    map.write_page(5, &page(9));
    let id = memfd::identity(fd.as_fd()).unwrap().ino;
    let store = store();
    let held = store.adopt(id, fd).unwrap();
    assert!(store.tidy(Instant::now()).is_empty(), "its users are being counted");
    let frame = Frame(store.hold(id).unwrap().0.0 + 5);
    assert!(store.adopt_ref(frame), "the first user");
    let mut bytes = page(0);
    assert!(store.read(frame, &mut bytes));
    assert_eq!(bytes, page(9));
    assert!(store.unref(frame).is_some());
    store.quarantine(frame);
    assert!(store.tidy(Instant::now()).is_empty(), "it is held still");
    drop(held);
    assert_eq!(store.tidy(Instant::now()), vec![id], "it goes without a quarantine: nothing is reused");
}

#[test]
fn each_node_has_segments_of_its_own() {
    let store = Store::new("test", true, Duration::ZERO, 1 << 20);
    // The machine need not have these nodes: a segment whose memory can't be bound is used all the
    // same.
    let nodes = [Some(0), Some(1), None];
    let segments = nodes.map(|node| {
        let frames: Vec<Frame> = (0..5).map(|i| Cursor::new(&store, node).put(&page(i), 1).unwrap()).collect();
        assert!(frames.iter().all(|&frame| store.node(frame) == node && frame.segment() == frames[0].segment()));
        assert_eq!(*store.free.lock().count(node), u64::from(SEGMENT_PAGES) - 5);
        for &frame in &frames {
            store.unref(frame).unwrap();
            store.quarantine(frame);
        }
        frames[0].segment()
    });
    assert!(segments[0] != segments[1] && segments[1] != segments[2] && segments[2] != segments[0]);
    assert_eq!(store.tidy(Instant::now()).len(), 3, "nobody uses them");
    assert!(nodes.iter().all(|&node| *store.free.lock().count(node) == 0));
    let frame = Cursor::new(&store, Some(1)).put(&page(9), 1).unwrap();
    assert_eq!((store.node(frame), store.segment_ids().len()), (Some(1), 1), "in the place of another node's segment");
}
