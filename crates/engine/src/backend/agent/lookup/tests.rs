//! Verdicts on pages of a chunk.

#![allow(unsafe_code)] // Maps a segment as an agent does.

use super::*;
use crate::client::scanning::tests::client;
use crate::store::domain::InFiles;
use crate::world::shared::tests::shared;

#[test]
fn pages_that_will_become_frames_come_in_pieces() {
    let pages: Vec<[u8; PAGE_SIZE]> = (0..7).map(|n| [n; PAGE_SIZE]).collect();
    let sighted = [true, false, false, true, true, false, true];
    let keys: Vec<u64> = (0..7).collect();
    let firsts = |at| {
        let piece = |(pages, keys): (&[[u8; PAGE_SIZE]], &[u64])| {
            assert!(pages.iter().map(|page| u64::from(page[0])).eq(keys.iter().copied()));
            (pages[0][0], pages.len())
        };
        pieces(&pages, &keys, &sighted, at).map(piece).collect::<Vec<_>>()
    };
    assert_eq!(firsts(2), [(2, 3), (6, 1)], "the page itself, whatever was known of it");
    assert_eq!(firsts(5), [(5, 2)]);
    assert_eq!(pieces(&[], &[], &[], 3).count(), 0, "nothing was read");
}

#[test]
fn what_needs_no_new_frame_is_merged_while_the_store_is_full() {
    let shared = shared();
    let (client, _agent) = client();
    let client = Arc::new(client);
    client.domain.store.set(std::time::Duration::ZERO, u64::MAX);
    let bytes = [[7; PAGE_SIZE], [7; PAGE_SIZE], [0; PAGE_SIZE], [7; PAGE_SIZE]];
    let mut keys = bytes.map(|bytes| client.domain.digest(&bytes));
    let pages = [3, 4, 5, 6].map(PageNo);
    let mut lookup = Lookup::new(&shared, &client);
    lookup.look_up(&mut Chunk::read(&pages, &mut keys, &bytes));
    use Verdict::{First, Merge, Nothing};
    let [(_, First(_)), (_, Nothing), (_, Merge(Target::Zero)), (_, Nothing)] = lookup.verdicts[..] else {
        panic!("other")
    };
    assert!(matches!(lookup.full, Some(GrowError::Host { .. } | GrowError::Cgroup { .. })));
}

/// Files that have a content with this digest.
struct Files(u64);

impl InFiles for Files {
    fn has(&self, digest: u64) -> bool {
        digest == self.0
    }
}

#[test]
fn a_page_whose_content_files_have_becomes_a_frame_at_once() {
    let shared = shared();
    let (client, _agent) = client();
    let client = Arc::new(client);
    let domain = &client.domain;
    let bytes = [[7; PAGE_SIZE], [8; PAGE_SIZE]];
    let digests = bytes.map(|bytes| domain.digest(&bytes));
    let pages = [PageNo(3), PageNo(4)];
    let mut lookup = Lookup::new(&shared, &client);
    let mut verdicts = |bytes: &[[u8; PAGE_SIZE]]| {
        let mut keys = bytes.iter().map(|bytes| domain.digest(bytes)).collect::<Vec<_>>();
        lookup.look_up(&mut Chunk::read(&pages[..bytes.len()], &mut keys, bytes));
        lookup.verdicts.iter().map(|&(_, verdict)| verdict).collect::<Vec<_>>()
    };
    assert!(matches!(verdicts(&[[9; PAGE_SIZE]])[..], [Verdict::First(_)]), "there are no files");
    let files = Arc::new(Files(kmem::pageonefs::digest_of(digests[1])));
    let weak: std::sync::Weak<Files> = Arc::downgrade(&files);
    domain.set_files(weak);
    let [Verdict::First(_), Verdict::Merge(Target::Frame(frame))] = verdicts(&bytes)[..] else { panic!("other") };
    assert_eq!((domain.store.users(frame), domain.index.len()), (1, 3));
    assert!(!domain.is_in_files(domain.digest(&bytes[1])), "the store turned out not to be lent");
    domain.store.grow_lendable(1);
    assert!(domain.is_in_files(domain.digest(&bytes[1])));
    domain.release(frame);
    assert_eq!((domain.store.users(frame), domain.index.len()), (0, 2), "it leaves as every frame does");
    drop(files);
    assert!(!domain.is_in_files(digests[1]));
}

#[test]
fn a_page_of_a_segment_that_nobody_took_back_becomes_a_frame_at_once() {
    let shared = shared();
    let (client, _agent) = client();
    let client = Arc::new(client);
    let fd = kmem::memfd::create_sealed("pageone:test", 4 * PAGE_SIZE).unwrap().0;
    let range = Range::new(kmem::mm::map_anonymous(4 * PAGE_SIZE).unwrap(), 4 * PAGE_SIZE);
    // SAFETY: only this test knows the memory, and nothing refers to it.
    unsafe { kmem::mm::map_fixed_private(std::os::fd::AsFd::as_fd(&fd), range, 0) }.unwrap();
    let id = RegionId(0);
    let region = crate::core::ledger::Region::new(range.start as u64, 4).unwrap();
    client.state().regions.insert(id, region);
    // One was written since, and the last is none of these.
    for page in 0..4 {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(range.start + page * PAGE_SIZE);
        // SAFETY: a page of the mapping above, to which nothing refers.
        unsafe { if page == 1 { at.write_volatile(1) } else { _ = at.read_volatile() } };
    }
    client.state().flight.earlier = Arc::new([(id, vec![Run::new(PageNo(0), 3)])].into());
    let bytes = [[5; PAGE_SIZE], [6; PAGE_SIZE], [7; PAGE_SIZE], [8; PAGE_SIZE]];
    let mut keys = bytes.map(|bytes| client.domain.digest(&bytes));
    let mut lookup = Lookup::new(&shared, &client);
    lookup.look_up(&mut Chunk::read(&[0, 1, 2, 3].map(PageNo), &mut keys, &bytes));
    use Verdict::{First, Merge};
    let [(_, Merge(_)), (_, First(_)), (_, Merge(_)), (_, First(_))] = lookup.verdicts[..] else {
        panic!("{:?}", lookup.verdicts)
    };
    // SAFETY: the memory is this test's alone, and nothing refers to it.
    unsafe { kmem::mm::unmap(range) }.unwrap();
}
