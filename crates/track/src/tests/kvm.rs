//! A guest of its own on KVM, whose writes are known. Only built for x86-64: the guest is x86 code.

mod guest;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dirty::DirtyTree;

use self::guest::{FIRST, Guest, PAGES, SLOT, borrow, open, pattern};
use super::drain;
use crate::*;

const SLOTS: [Slot; 1] = [Slot { slot: SLOT, pages: PAGES, first: FIRST }];
const FRAMES: u32 = 100_000;
const PART: u32 = 25_000;

/// What the source reports for each part of the pattern, and how long collecting took.
fn run(
    guest: &mut Guest,
    source: &mut dyn Source,
    full: &mut dyn FnMut(&mut dyn Source, &DirtyTree),
) -> Vec<BTreeSet<u64>> {
    let tree = DirtyTree::new(FIRST + u64::from(PAGES)).unwrap();
    source.collect(&tree).unwrap();
    drain(&tree);
    let mut spent = Duration::ZERO;
    let parts = (0..FRAMES / PART).map(|part| {
        guest.write(part * PART, PART, || full(source, &tree));
        let start = Instant::now();
        source.collect(&tree).unwrap();
        spent += start.elapsed();
        drain(&tree)
    });
    let parts = parts.collect();
    println!("collecting took {} ns a page", spent.as_nanos() / u128::from(FRAMES));
    parts
}

/// The guest's own memory says what was written.
fn check_memory(guest: &Guest) {
    let written: BTreeSet<u64> = pattern(0, FRAMES).collect();
    assert_eq!(written.len(), FRAMES as usize);
    for page in 0..PAGES as usize {
        assert_eq!(guest.memory.read(page) != 0, written.contains(&(page as u64)), "page {page}");
    }
}

#[test]
fn log_and_ring_report_exactly_what_a_guest_wrote() {
    let Some(kvm) = open() else { return };
    for _ in 0..3 {
        let expected: Vec<BTreeSet<u64>> =
            (0..FRAMES / PART).map(|part| pattern(part * PART, PART).map(|page| FIRST + page).collect()).collect();
        let (mut guest, vm) = Guest::new(&kvm, |vm| vm.try_clone_to_owned().unwrap());
        #[allow(unsafe_code, reason = "the contract of the source")]
        // SAFETY: the guest's slot has `PAGES` pages all the time, as `SLOTS` says.
        let mut log = unsafe { KvmLogSource::new(vm, SLOTS.to_vec()) }.unwrap();
        let by_log = run(&mut guest, &mut log, &mut |_, _| panic!("a log is never full"));
        assert!(by_log == expected, "the log's report");
        check_memory(&guest);
        drop(guest);

        let (mut fulls, entries) = (0, 4096);
        let (mut guest, ring) =
            Guest::new(&kvm, |vm| KvmRingSource::new(vm.try_clone_to_owned().unwrap(), entries, SLOTS.to_vec()));
        let mut ring = match ring {
            Ok(ring) => ring,
            Err(SourceError::NoRings) => return println!("SKIPPED: {}", SourceError::NoRings),
            Err(e) => panic!("{e}"),
        };
        ring.add_vcpu(borrow(&guest.vcpu)).unwrap();
        let by_ring = run(&mut guest, &mut ring, &mut |source, tree| {
            fulls += 1;
            assert!(source.collect(tree).unwrap() > 0, "a full ring is not empty");
        });
        assert!(by_ring == expected, "the rings' report");
        assert!(fulls >= FRAMES / entries, "the ring was full {fulls} times");
        check_memory(&guest);
    }
}

#[test]
fn rings_that_are_missing_and_pages_that_nobody_knows_are_said() {
    let Some(kvm) = open() else { return };
    // Before Linux 5.11 KVM says of both kinds of rings that it has none (KVM_CHECK_EXTENSION).
    let vm = kvm.create_vm().unwrap();
    let own = borrow(&vm).try_clone_to_owned().unwrap();
    let make = || KvmRingSource::new(own, 4096, SLOTS.to_vec()).unwrap_err();
    let error = kmem::testing::refusing(libc::SYS_ioctl, Some(0xAE03), 0, make);
    assert!(matches!(error, SourceError::NoRings), "{error}");
    let (mut guest, ring) =
        Guest::new(&kvm, |vm| KvmRingSource::new(vm.try_clone_to_owned().unwrap(), 4096, Vec::new()));
    let mut ring = match ring {
        Ok(ring) => ring,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    ring.add_vcpu(borrow(&guest.vcpu)).unwrap();
    guest.write(0, 10, || panic!("ten pages do not fill a ring"));
    let error = ring.collect(&DirtyTree::new(FIRST + u64::from(PAGES)).unwrap()).unwrap_err();
    assert!(matches!(error, SourceError::UnknownPage { slot: SLOT, .. }), "{error}");
}
