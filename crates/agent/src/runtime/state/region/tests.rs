use super::*;

fn region(pages: usize) -> Region {
    Region::new(RegionId(1), Range::new(0x10_0000, pages * PAGE_SIZE), Sticky::default()).unwrap()
}

fn run(start: u32, len: u32) -> Run {
    Run::new(PageNo(start), len)
}

#[test]
fn a_mapping_more_is_what_lies_beside_it() {
    let mut region = region(10);
    assert_eq!(region.new_maps(run(0, 10)), 0, "all of it");
    assert_eq!(region.new_maps(run(0, 1)), 1, "a remainder behind");
    assert_eq!(region.new_maps(run(4, 2)), 2, "a remainder on either side");
    region.mapped.set(run(4, 2));
    assert_eq!(region.new_maps(run(6, 1)), 1);
    assert_eq!(region.new_maps(run(6, 4)), 0, "all between two, and at the end");
    assert_eq!(region.new_maps(run(4, 1)), 2, "in a mapping: as if in its middle");
}

#[test]
fn a_region_is_cut_and_keeps_its_numbering() {
    let mut region = region(100);
    region.mapped.set(run(0, 100));
    region.drop_pages(run(10, 20));
    region.drop_pages(run(25, 10));
    region.drop_pages(run(90, 10));
    assert_eq!(region.managed(), [run(0, 10), run(35, 55)]);
    assert_eq!(region.holes().collect::<Vec<_>>(), [run(10, 25), run(90, 10)]);
    assert!(region.manages(run(35, 55)) && !region.manages(run(9, 2)) && !region.manages(run(5, 40)));
    assert!(!region.mapped.any(run(10, 25)) && region.mapped.any(run(9, 2)));
    assert_eq!(region.bytes(run(35, 1)), Range::new(0x10_0000 + 35 * PAGE_SIZE, PAGE_SIZE));
    let around = Range::new(0x10_0000 + 5 * PAGE_SIZE, 40 * PAGE_SIZE);
    assert_eq!(region.managed_in(around).collect::<Vec<_>>(), [run(5, 5), run(35, 10)]);
    assert_eq!(region.managed_in(Range::new(0, 0x10_0000)).count(), 0);
    region.drop_pages(run(0, 100));
    assert!(region.managed().is_empty());
    assert_eq!(region.holes().collect::<Vec<_>>(), [run(0, 100)]);
}
