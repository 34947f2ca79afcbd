//! Batches of pages, and what a guest that QEMU sends is told.

use std::sync::{Arc, Mutex};

use super::super::tests::{RUNS, answer, lock};
use super::*;
use crate::fake;
use crate::record::Description;

fn collect(pages: &[(u64, u8)]) -> Vec<(u64, u8)> {
    let (flow, (to, from)) = (Flow::default(), channel());
    let (filled, bytes) = (DirtyTree::new(1 << 20).unwrap(), AlignedBuf::zeroed(BATCH * BLOCK));
    let mut batches = Batches { flow: &flow, to, filled, places: BTreeMap::new(), bytes };
    for &(page, fill) in pages {
        assert!(batches.add(page, (fill != 0).then_some(&[fill; BLOCK])));
    }
    assert!(batches.send());
    drop(batches);
    let each = |batch: Batch| {
        assert!(batch.pages.is_sorted() && batch.pages.len() <= BATCH);
        let fills: Vec<u8> = batch.bytes.chunks_exact(BLOCK).map(|bytes| bytes[9]).collect();
        batch.pages.into_iter().zip(fills).collect::<Vec<_>>()
    };
    from.iter().flat_map(each).collect()
}

#[test]
fn of_a_page_the_last_content_counts_and_zeros_only_where_something_was() {
    let found = collect(&[(7, 1), (3, 0), (2, 5), (7, 2), (2, 0)]);
    assert_eq!(found, [(2, 0), (7, 2)]);
    // Across batches too.
    let mut many: Vec<(u64, u8)> = (0..BATCH as u64).map(|page| (page, 1)).collect();
    many.extend([(0, 0), (1 << 19, 0), (1, 3)]);
    assert_eq!(collect(&many)[BATCH..], [(0, 0), (1, 3)]);
}

#[test]
fn a_guest_that_is_too_fast_is_told_what_would_do() {
    let error = too_fast(&json!({ "remaining": 409_600_000, "mbps": 819.2 }), 31);
    assert_eq!(
        error.to_string(),
        "the guest writes faster than QEMU can send it: 100000 pages are left after 31 rounds; use --max-pause 8000, or \
         stop it meanwhile"
    );
}

/// QEMU may miss what an emulated guest writes while it is sent.
#[test]
fn an_emulated_guest_stands_before_it_is_sent() {
    for (kvm, expected) in [(false, &["query-kvm", "stop", "migrate"][..]), (true, &["query-kvm", "migrate"])] {
        let all = Arc::new(Mutex::new(Vec::new()));
        let heard = all.clone();
        let qmp = fake::qemu(move |asked| {
            heard.lock().unwrap().push(asked.to_owned());
            match asked {
                "query-kvm" => json!({ "enabled": kvm }),
                "query-migrate" => json!({ "status": "failed" }),
                asked => answer(RUNS, asked),
            }
        });
        let mut guest = Guest::ask(1, lock(), qmp, "/nonexistent/guest.qmp".into(), Description::default()).unwrap();
        all.lock().unwrap().clear();
        let task = Task {
            socket: "/nonexistent/guest.qmp".into(),
            pid: 1,
            ran: true,
            bandwidth: 0,
            overlays: Vec::new(),
            downtime: None,
        };
        guest.drive((&task, &Guard::thread()), &Default::default()).unwrap_err();
        assert_eq!(all.lock().unwrap()[..expected.len()], *expected);
    }
}
