use super::*;

#[test]
fn entries_survive_their_word_and_are_counted() {
    let mut held = Entries::<Frame>::new(8).unwrap();
    let entries =
        [Entry::Unshared(LOW), Entry::Merged(Frame(LOW)), Entry::Zero, Entry::Pending, Entry::Fresh, Entry::Recycled];
    for (page, entry) in entries.into_iter().enumerate() {
        assert_eq!(held.set(PageNo(page as u32), entry), Entry::Fresh);
        assert_eq!(held.get(PageNo(page as u32)), entry);
    }
    assert_eq!(held.counts(), Counts { unshared: 1, merged: 1, zero: 1, pending: 1, recycled: 1 });
    assert_eq!(held.set(PageNo(1), Entry::Zero), Entry::Merged(Frame(LOW)));
    assert_eq!(held.counts(), Counts { unshared: 1, merged: 0, zero: 2, pending: 1, recycled: 1 });
    assert_eq!(held.set(PageNo(99), Entry::Zero), Entry::Fresh, "past the end: nothing");
    assert_eq!(held.get(PageNo(99)), Entry::Fresh);
}

#[test]
fn a_reservation_that_is_not_touched_costs_a_table_of_chunks_only() {
    let mut entries = Entries::<Frame>::new(u32::MAX).unwrap();
    let empty = entries.bytes();
    assert!(empty <= u32::MAX as usize / CHUNK * 8 + 8, "{empty} bytes");
    let all = Run::new(PageNo(0), u32::MAX);
    assert_eq!(entries.known(all).count(), 0);
    assert_eq!(entries.set(PageNo(u32::MAX - 1), Entry::Fresh), Entry::Fresh);
    assert_eq!(entries.bytes(), empty, "a fresh entry needs no chunk");
    entries.set(PageNo(1500), Entry::Zero);
    assert_eq!(entries.bytes(), empty + CHUNK * 4);
    assert_eq!(entries.known(all).map(|page| page.0).collect::<Vec<_>>(), (1024..2048).collect::<Vec<_>>());
    assert_eq!(entries.known(Run::new(PageNo(1400), 200)).count(), 200);
    let mut left = Vec::new();
    entries.recycle(Run::new(PageNo(1000), 600), |_| true, |page, entry| left.push((page, entry)));
    assert_eq!(left, [(PageNo(1500), Entry::Zero)]);
    assert_eq!(entries.counts().recycled, 600);
    assert_eq!((entries.get(PageNo(999)), entries.get(PageNo(1599))), (Entry::Fresh, Entry::Recycled));
}
