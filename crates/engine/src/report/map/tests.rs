use wire::ToDaemon;

use super::*;
use crate::client::scanning::tests::client;
use crate::core::content::frame::Frame;

#[test]
fn the_cells_of_any_memory_fit_and_hold_every_page_once() {
    for (pages, regions) in [(0, 0), (1, 1), (4096, 1), (1 << 32, 1), (1 << 34, 4000), (5000, 5000)] {
        let cell = u64::from(cell_pages(pages, regions));
        let most = pages.div_ceil(cell) as usize + regions.min(MOST_REGIONS);
        assert!(cell.is_power_of_two() && most <= MOST_CELLS, "{pages} pages in {regions} regions: {most} cells");
    }
}

#[test]
fn each_page_counts_in_the_cell_of_its_state() {
    let (client, _agent) = client();
    let pages = 3 * MOST_CELLS as u32;
    let added = |id, start, pages: u32| ToDaemon::RegionAdded {
        region: RegionId(id),
        start,
        len: u64::from(pages) * PAGE_SIZE as u64,
    };
    client.apply(added(1, 1 << 40, pages), &mut Vec::new()).unwrap();
    client.apply(added(2, 1 << 30, 3), &mut Vec::new()).unwrap();
    {
        let mut state = client.state();
        let region = state.regions.get_mut(&RegionId(1)).unwrap();
        let entries =
            [Entry::Merged(Frame(7)), Entry::Zero, Entry::Recycled, Entry::Unshared(3), Entry::Pending, Entry::Fresh];
        for (entry, page) in entries.into_iter().zip(0..) {
            region.set(PageNo(page), entry);
        }
        // Written, and hotter with each period.
        for _ in 0..4 {
            region.ages.found_written(Run::new(PageNo(pages - 2), 2));
            region.end_scan(crate::core::ledger::Cool::Copies);
        }
        region.ages.found_written(Run::new(PageNo(8), 1));
        region.end_scan(crate::core::ledger::Cool::Copies);
    }
    let map = map(&client);
    assert_eq!((map.cell_pages, map.regions.len(), map.regions_unlisted), (4, 2, 0));
    assert_eq!((map.regions[0].start, map.regions[0].pages), (1 << 30, 3));
    assert_eq!(map.regions[0].cells, [Cell { other: 3, ..Cell::default() }]);
    let cells = &map.regions[1].cells;
    assert_eq!(cells[0], Cell { merged: 1, zero: 1, recycled: 1, unshared: 1, ..Cell::default() });
    assert_eq!(cells[1], Cell { other: 4, ..Cell::default() }, "one is under way");
    assert_eq!(cells[2], Cell { volatile: 1, other: 3, ..Cell::default() });
    assert_eq!(cells.last(), Some(&Cell { volatile: 2, other: 2, ..Cell::default() }));
    let hottest = map.hottest[0];
    assert_eq!((hottest.start, hottest.pages), ((1 << 40) + u64::from(pages - 4) * PAGE_SIZE as u64, 4));
    assert!(hottest.writes > map.hottest[1].writes && map.hottest[1].writes == 1, "{:?}", map.hottest);
}
