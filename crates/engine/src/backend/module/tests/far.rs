//! Files of any length, with pages far from each other: what they cost follows what is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kmem::pageonefs::{Ask, Bits, Entry as Pairing, File as Listed, Harvest};
use proptest::prelude::*;
use rustix::io::Errno;
use wire::{PageNo, Run};

use super::{World, scan};
use crate::backend::module::contents::Contents;
use crate::backend::module::file::{File, Mounted};
use crate::backend::module::kernel::Kernel;
use crate::core::content::index::ClientId;
use crate::core::content::seed::Seed;
use crate::core::ledger::PAGES;
use crate::sync::Mutex;

/// A kernel with one file, of pages that are there and of those that are dirty.
#[derive(Default)]
struct Far {
    /// Whether they are dirty.
    pages: Mutex<BTreeMap<u64, bool>>,
    calls: AtomicU64,
}

impl Far {
    fn write(&self, pages: impl IntoIterator<Item = u64>) {
        pages.into_iter().for_each(|page| _ = self.pages.lock().insert(page, true));
    }

    fn dirty(&self) -> Vec<u64> {
        self.pages.lock().iter().filter(|(_, dirty)| **dirty).map(|(&page, _)| page).collect()
    }
}

impl Kernel for Far {
    fn harvest(&self, _: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        self.calls.fetch_add(1, Relaxed);
        let mut pages = self.pages.lock();
        bits.fill(0);
        let end = start + bits.len() as u64 * 64;
        let mut dirty = 0;
        for (page, bit) in pages.range_mut(start..end).filter(|(_, dirty)| of == Bits::All || **dirty) {
            *bit = false;
            bits[((page - start) / 64) as usize] |= 1 << (page % 64);
            dirty += 1;
        }
        // As the kernel, which keeps bits for as long as the file is there.
        let next = pages.range(end..).next().map_or(u64::MAX, |(page, _)| (page / 64 * 64).max(end));
        Ok(Harvest { dirty, next })
    }

    fn digest(&self, _: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        out.fill(0);
        Ok(0)
    }

    fn merge(&self, _: u64, _: &mut [Pairing]) -> Result<u32, Errno> {
        Ok(0)
    }

    fn punch(&self, _: u64, _: &[Run], _: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        Ok(())
    }
}

/// What the kernel lists of a file of so many bytes, of which so many pages are there.
fn listed(size: u64, there: u64) -> Listed {
    let mut listed = super::listed(1, 0);
    (listed.size, listed.private_pages) = (size, there);
    listed
}

fn file(kernel: &Arc<Far>, size: u64, there: u64) -> File {
    File::new(&listed(size, there), ClientId(1), Arc::new(Contents::new(Seed::random())), kernel.clone(), Mounted)
}

fn known(file: &File) -> Vec<u32> {
    let mut pages = Vec::new();
    file.state().region.candidates(PageNo(0), usize::MAX, &mut pages);
    pages.into_iter().map(|page| page.0).collect()
}

fn is_scattered(file: &File) -> bool {
    file.state().unmanaged().is_some_and(|why| why.contains("scattered"))
}

const WINDOW: u64 = 1 << 15;

#[test]
fn the_length_of_a_file_costs_nothing() {
    for size in [((1u64 << 32) + 1) * 4096, 1 << 52, i64::MAX as u64, u64::MAX] {
        let kernel = Arc::new(Far::default());
        let file = file(&kernel, size, 0);
        for _ in 0..4 {
            assert_eq!(scan(&file), 0);
        }
        assert_eq!(kernel.calls.load(Relaxed), 4);
        assert!(file.state().region.bytes() < 1024);
        let far = [0, 1 << 31, (1 << 32) - WINDOW - 1, (1 << 32) - WINDOW, (1 << 32) - 1, 1 << 32, 1 << 40];
        kernel.write(far);
        (0..3).for_each(|_| _ = scan(&file));
        assert_eq!(known(&file), [0, 1 << 31, PAGES - 1], "of {size} bytes");
        assert_eq!(kernel.dirty(), far[3..], "what lies behind is left alone");
        assert!(file.state().region.bytes() < 64 << 10);
        let why = file.state().unmanaged().unwrap();
        assert!(why.starts_with("only its first 16 TiB"), "{why}");
    }
}

#[test]
fn pages_that_lie_scattered_are_looked_at_up_to_a_bound_and_the_rest_keeps_its_bits() {
    let kernel = Arc::new(Far::default());
    let all: Vec<u64> = (0..8192).map(|at| at << 19).collect();
    kernel.write(all.iter().copied());
    let file = file(&kernel, 1 << 44, 8192);
    for round in 1..4 {
        scan(&file);
        assert!(!is_scattered(&file));
        assert_eq!(kernel.calls.load(Relaxed), round * (16 + 8192 / 128));
    }
    assert_eq!(known(&file).len(), 80);
    assert_eq!(kernel.dirty(), all[80..]);
    assert!(file.state().region.bytes() < 2 << 20, "{}", file.state().region.bytes());
    scan(&file);
    assert!(is_scattered(&file));
    // More is there now: it is looked at, as by a new daemon.
    file.state().listed(&listed(1 << 44, 1 << 20));
    (0..3).for_each(|_| _ = scan(&file));
    assert_eq!((known(&file).len(), kernel.dirty().len()), (8192, 0));
    assert!(!is_scattered(&file));
    // And less: nothing is known of what lies behind.
    file.state().listed(&listed(1 << 44, 0));
    scan(&file);
    assert_eq!(known(&file).len(), 16);
}

#[test]
fn a_scan_ends_when_the_engine_does() {
    let kernel = Arc::new(Far::default());
    kernel.write((0..100).map(|at| at * WINDOW));
    let file = file(&kernel, 1 << 44, 1 << 20);
    let left = AtomicU64::new(5);
    let stopping = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err();
    assert_eq!(file.scan(stopping), Err(Errno::INTR));
    assert_eq!(kernel.calls.load(Relaxed), 5);
    (0..3).for_each(|_| _ = scan(&file));
    assert_eq!(known(&file).len(), 100, "bits that were taken are not lost");
}

#[test]
fn a_file_that_grows_and_shrinks_stays_what_it_is() {
    let world = World::new(&[(1..=300).collect(), (1..=300).collect()], 100);
    (0..4).for_each(|_| super::Rounds::round(&world));
    let before = world.frames_and_shared();
    assert_eq!(before, (300, 300));
    let file = world.files.values().next().unwrap();
    for pages in [1usize, 5000, 7, 1 << 30, 300] {
        let mut listed = super::listed(file.id, pages);
        listed.merged_pages = 300;
        file.state().listed(&listed);
        super::Rounds::round(&world);
        world.check();
    }
    assert_eq!(world.frames_and_shared(), before);
}

proptest! {
    #[test]
    fn a_ledger_holds_what_is_there_and_no_more(pages in prop::collection::btree_set(0u64..1 << 33, 0..200), there in 0u64..4096) {
        let kernel = Arc::new(Far::default());
        kernel.write(pages.iter().copied());
        let file = file(&kernel, u64::MAX, there);
        (0..3).for_each(|_| _ = scan(&file));
        let most = 16 + there / 128;
        let mut windows: Vec<u64> = pages.iter().map(|page| page / WINDOW).collect();
        windows.dedup();
        // The first window is looked at, whatever is there.
        let skip = usize::from(windows.first() != Some(&0));
        let end = windows.get(most as usize - skip).map_or(PAGES.into(), |window| window * WINDOW);
        let expected: Vec<u32> = pages.iter().filter(|page| **page < end.min(PAGES.into())).map(|&page| page as u32).collect();
        prop_assert_eq!(known(&file), expected);
        let counts = file.state().region.counts();
        prop_assert_eq!(counts, Default::default());
    }
}
