//! Batches of pages, and what a guest that QEMU sends is told.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::super::PIPE_BYTES;
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

/// QEMU, which sends it, would wait: the guard has the pipe, too.
#[test]
fn a_stream_that_is_not_understood_is_read_to_its_end() {
    let (out, mut into) = io::pipe().unwrap();
    let sent = std::thread::spawn(move || into.write_all(&vec![1; PIPE_BYTES]));
    let error = read(out, 1 << 20, &Flow::default(), channel().0).unwrap_err();
    assert!(matches!(error, SaveError::Split(StreamError::Unknown(_))), "{error}");
    sent.join().unwrap().unwrap();
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
        let (mut guest, mut task) = being_sent(qmp);
        all.lock().unwrap().clear();
        guest.drive((&mut task, &Guard::thread(), None), &Default::default()).unwrap_err();
        assert_eq!(all.lock().unwrap()[..expected.len()], *expected);
    }
}

fn being_sent(qmp: Monitor) -> (Guest, Task) {
    let socket: PathBuf = "/nonexistent/guest.qmp".into();
    let guest = Guest::ask(1, lock(), qmp, socket.clone(), Description::default()).unwrap();
    (guest, Task { socket, pid: 1, ran: true, bandwidth: 0, overlays: Vec::new(), downtime: None })
}

/// A pool that is full stores nothing more.
#[test]
fn what_nobody_stores_any_more_is_sent_no_longer() {
    let mut looks = 0;
    let looks = Mutex::new(move || {
        looks += 1;
        if looks == 1 || looks > 100 { json!({ "status": "none" }) } else { json!({ "status": "active" }) }
    });
    let qmp = fake::qemu(move |asked| match asked {
        "query-migrate" => looks.lock().unwrap()(),
        asked => answer(RUNS, asked),
    });
    let (mut guest, mut task) = being_sent(qmp);
    let error =
        guest.drive((&mut task, &Guard::thread(), None), &Flow { stands: true.into(), ..Flow::default() }).unwrap_err();
    assert!(matches!(error, SaveError::Split(StreamError::Read(_))), "{error}");
}

/// As after a moment in which the command was stopped.
#[test]
fn a_save_whose_guard_has_let_the_guest_go_on_says_so() {
    let guard = Guard::start(&["true".into()]).unwrap();
    let (mut guest, mut task) = being_sent(fake::qemu(|asked| answer(RUNS, asked)));
    // The guard ends.
    while guard.is_there().is_ok() {}
    let error = guest.drive((&mut task, &guard, None), &Flow::default()).unwrap_err();
    assert!(matches!(error, SaveError::Guard(guard::GuardError::LetGo)), "{error}");
}

#[test]
fn a_guest_that_another_client_stops_while_it_is_sent_does_not_go_on() {
    let all = Arc::new(Mutex::new(Vec::new()));
    let heard = all.clone();
    let qmp = fake::qemu(move |asked| {
        let mut heard = heard.lock().unwrap();
        heard.push(asked.to_owned());
        let was_told = |command: &str| heard.iter().any(|told| told == command);
        match asked {
            "query-kvm" => json!({ "enabled": true }),
            "query-migrate" if was_told("migrate-continue") => json!({ "status": "completed" }),
            "query-migrate" if was_told("migrate") => json!({ "status": "pre-switchover" }),
            asked => answer(RUNS, asked),
        }
    });
    let (mut guest, mut task) = being_sent(qmp);
    guest.drive((&mut task, &Guard::thread(), None), &Flow::default()).unwrap();
    assert!(!task.ran && !all.lock().unwrap().contains(&"cont".to_owned()));
}
