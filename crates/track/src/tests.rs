use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use dirty::DirtyTree;
use kmem::pagemap::Pagemap;
use kmem::testing::{Memory, uffd};
use kmem::uffd::Features;

use super::*;

#[cfg(target_arch = "x86_64")] // The guest is x86 code.
mod kvm;

/// The most frames that one test marks.
const MOST: usize = 1 << 17;

fn drain(tree: &DirtyTree) -> BTreeSet<u64> {
    let (mut all, mut out) = (0..u64::MAX, vec![0; MOST + 64]);
    let n = tree.take_frames(&mut all, &mut out);
    assert!(all.is_empty());
    out[..n].iter().copied().collect()
}

#[test]
fn a_scan_feeds_the_tree() {
    let Some(uffd) = uffd(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED) else { return };
    let (one, other) = (Memory::new(16), Memory::new(200));
    let extents = [(&one, 1000), (&other, 5)].map(|(memory, first)| Extent { memory: memory.0, first }).to_vec();
    for memory in [&one, &other] {
        uffd.register_wp(memory.0).unwrap();
    }
    one.write(2, 1);
    let tree = DirtyTree::new(1016).unwrap();
    let mut source = PagemapSource::new(Pagemap::open_self().unwrap(), extents);
    assert_eq!(source.collect(&tree).unwrap(), 1, "what is populated counts as written at first");
    assert_eq!(drain(&tree), [1002].into());
    for round in 0..3 {
        one.write(2, round);
        one.write(15, round);
        (64..130).for_each(|page| other.write(page, round));
        assert_eq!(source.collect(&tree).unwrap(), 68);
        let expected = (69..135).chain([1002, 1015]).collect();
        assert_eq!(drain(&tree), expected);
        assert_eq!(source.collect(&tree).unwrap(), 0);
        assert!(tree.is_empty());
    }
}

#[test]
fn memory_that_is_not_registered_is_refused() {
    let memory = Memory::new(1);
    memory.write(0, 1);
    let extents = vec![Extent { memory: memory.0, first: 0 }];
    let mut source = PagemapSource::new(Pagemap::open_self().unwrap(), extents);
    let error = source.collect(&DirtyTree::new(1).unwrap()).unwrap_err();
    assert!(matches!(error, SourceError::Scan(_)) && error.to_string().contains("userfaultfd"), "{error}");
}

/// Writers run while pages are collected: each write is reported by a collection that ends after
/// it.
#[test]
fn a_synchronous_userfaultfd_loses_no_write() {
    const PAGES_EACH: usize = 64;
    let Some(_) = uffd(Features::WP) else { return };
    let (memory, other) = (Memory::new(3 * PAGES_EACH), Memory::new(8));
    let extents =
        vec![Extent { memory: memory.0, first: 100 }, Extent { memory: other.0, first: 100 + 3 * PAGES_EACH as u64 }];
    let source = UffdSource::new(extents).unwrap();
    let tree = DirtyTree::new(100 + 3 * PAGES_EACH as u64 + 8).unwrap();
    let (done, served) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut seen = vec![0; 3 * PAGES_EACH];
    let mut reports = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !served.load(Relaxed) {
                source.serve().unwrap();
                let mut wait = [rustix::event::PollFd::new(&source, rustix::event::PollFlags::IN)];
                let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                rustix::event::poll(&mut wait, Some(&timeout)).unwrap();
            }
        });
        let writers: Vec<_> = (0..3)
            .map(|number| {
                let memory = &memory;
                scope.spawn(move || {
                    for value in 1..=2000u64 {
                        memory.write(number * PAGES_EACH + (value * 7 % PAGES_EACH as u64) as usize, value);
                    }
                })
            })
            .collect();
        let mut collect = || {
            (&source).collect(&tree).unwrap();
            for frame in drain(&tree) {
                let page = (frame - 100) as usize;
                seen[page] = memory.read(page);
                reports += 1;
            }
        };
        while !writers.iter().all(|writer| writer.is_finished()) {
            collect();
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        collect();
        done.store(true, Relaxed);
        served.store(true, Relaxed);
    });
    let lost = (0..3 * PAGES_EACH).filter(|&page| seen[page] != memory.read(page)).count();
    assert_eq!(lost, 0, "pages whose last write was not reported");
    assert!(reports >= 3 * PAGES_EACH, "{reports} reports: every page was written");
}

#[test]
fn a_synchronous_userfaultfd_tells_pages_apart() {
    let Some(_) = uffd(Features::WP) else { return };
    let (one, other) = (Memory::new(4), Memory::new(4));
    one.write(0, 9);
    let extents = [(&one, 70), (&other, 74)].map(|(memory, first)| Extent { memory: memory.0, first }).to_vec();
    let source = UffdSource::new(extents).unwrap();
    let tree = DirtyTree::new(80).unwrap();
    for round in 0..3 {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                one.write(3, round);
                one.write(3, round + 1);
                other.write(0, round);
                other.write(2, round);
            });
            while !writer.is_finished() {
                source.serve().unwrap();
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        // 73 and 74 are neighbours among frames, and far apart in memory.
        assert_eq!((&source).collect(&tree).unwrap(), 3);
        assert_eq!(drain(&tree), [73, 74, 76].into());
        assert_eq!((&source).collect(&tree).unwrap(), 0);
    }
    assert_eq!(one.read(0), 9);
}
