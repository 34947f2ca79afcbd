//! What may change between a scan's system call and the ledger.

use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

use wire::recycle::Recycled;
use wire::{PageNo, ToDaemon};

use super::*;
use crate::client::batch::{PlannedRun, Target};
use crate::client::scanning::tests::client;
use crate::core::ledger::Counts;

const ID: RegionId = RegionId(1);
const START: u64 = 1 << 30;

fn run(page: u32, len: u32) -> Run {
    Run::new(PageNo(page), len)
}

fn hear(client: &Client, message: ToDaemon) {
    client.apply(message, &mut Vec::new()).unwrap();
}

fn add_region(client: &Client, start: u64, pages: u64) {
    hear(client, ToDaemon::RegionAdded { region: ID, start, len: pages * PAGE_SIZE as u64 });
}

/// A scan that finds these pages written, while `meanwhile` happens.
fn scan(client: &Client, pages: Run, scan_for: ScanFor, meanwhile: impl FnOnce()) {
    let mut state = client.settled();
    client.while_scanning(&mut state, |state| {
        let region = &state.regions[&ID];
        let (start, end) = (region.address(pages.page), region.address(pages.end()));
        let runs = vec![PageRun { start, end, categories: Categories::PRESENT }];
        let written = Written { runs, ..Written::of(ID, region) };
        state.begin_region(ID);
        MutexGuard::unlocked(state, meanwhile);
        client.enter(state, &written, scan_for);
    });
}

fn candidates(client: &Client) -> Vec<PageNo> {
    let mut state = client.settled();
    let region = state.regions.get_mut(&ID).unwrap();
    (0..2).for_each(|_| region.end_scan(crate::core::ledger::Cool::Copies));
    let mut found = Vec::new();
    region.candidates(PageNo(0), usize::MAX, &mut found);
    found
}

#[test]
fn what_an_agent_reports_during_a_scan_counts_more_than_its_findings() {
    let (client, _agent) = client();
    add_region(&client, START, 12);
    scan(&client, run(6, 5), ScanFor::Period, || {});
    scan(&client, run(0, 10), ScanFor::Period, || {
        hear(&client, ToDaemon::Discarded { region: ID, run: run(2, 2) });
        hear(&client, ToDaemon::Recycled(Recycled { region: ID, runs: vec![run(6, 1), run(8, 3)] }));
        hear(&client, ToDaemon::RegionShrunk { region: ID, run: run(0, 1) });
    });
    assert_eq!(candidates(&client), [1, 4, 5, 7].map(PageNo));
    let state = client.settled();
    assert_eq!(state.regions[&ID].counts(), Counts { recycled: 4, ..Counts::default() });
}

#[test]
fn findings_after_a_report_count() {
    let (client, _agent) = client();
    add_region(&client, START, 12);
    scan(&client, run(0, 12), ScanFor::Period, || {});
    candidates(&client);
    hear(&client, ToDaemon::Recycled(Recycled { region: ID, runs: vec![run(0, 12)] }));
    scan(&client, run(3, 2), ScanFor::Period, || {});
    assert_eq!(candidates(&client), [3, 4].map(PageNo), "used again");
    assert_eq!(client.settled().regions[&ID].counts().recycled, 10);
}

#[test]
fn findings_on_a_region_that_is_gone_are_dropped() {
    let (client, _agent) = client();
    add_region(&client, START, 12);
    scan(&client, run(0, 10), ScanFor::Period, || {
        hear(&client, ToDaemon::RegionShrunk { region: ID, run: run(0, 12) })
    });
    assert!(client.settled().regions.is_empty());
    // A hostile agent may use the number again, for memory above or below.
    for start in [START << 1, START >> 1] {
        add_region(&client, START, 12);
        scan(&client, run(0, 10), ScanFor::Period, || {
            hear(&client, ToDaemon::RegionShrunk { region: ID, run: run(0, 12) });
            add_region(&client, start, 5);
        });
        assert!(client.settled().regions[&ID].first_scan, "its first scan is to come");
        assert_eq!(candidates(&client), []);
        hear(&client, ToDaemon::RegionShrunk { region: ID, run: run(0, 5) });
    }
}

#[test]
fn a_client_reaped_during_a_scan_has_nothing_to_enter() {
    let (client, _agent) = client();
    add_region(&client, START, 12);
    scan(&client, run(0, 10), ScanFor::Period, || _ = client.reap());
    assert!(client.settled().regions.is_empty());
}

#[test]
fn a_batch_waits_for_the_end_of_a_scan_and_leaves_out_what_it_found() {
    let (client, _agent) = client();
    add_region(&client, START, 12);
    let sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Not a scan that ages: those and batches are one worker's.
        scan(&client, run(3, 1), ScanFor::Watch, || {
            scope.spawn(|| {
                let planned = |page| PlannedRun { run: run(page, 1), target: Target::Zero };
                assert!(client.send_batch(ID, vec![planned(3), planned(5)]).is_ok());
                sent.store(true, SeqCst);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!sent.load(SeqCst), "the scan knows of writes that the ledger does not know of");
        });
    });
    let state = client.settled();
    assert_eq!((state.flight.outstanding, state.regions[&ID].counts().pending), (1, 1), "page 5 only");
}
