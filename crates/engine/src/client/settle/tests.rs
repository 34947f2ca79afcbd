use kmem::PAGE_SIZE;
use kmem::seqpacket::Conn;
use wire::{Run, RunOutcome, ToDaemon};

use super::*;
use crate::client::batch::PlannedRun;
use crate::client::scanning::tests::client;
use crate::store::Cursor;

const ID: RegionId = RegionId(1);
const PAGE: PageNo = PageNo(3);

/// A client of which a page maps a frame and is on its way to another of the same bytes.
fn moving() -> (Client, Conn, [Frame; 2]) {
    let (client, agent) = client();
    let region = ToDaemon::RegionAdded { region: ID, start: 1 << 30, len: 12 * PAGE_SIZE as u64 };
    client.apply(region, &mut Vec::new()).unwrap();
    let frames = [(); 2].map(|()| Cursor::new(&client.domain.store, None).put(&[7; PAGE_SIZE], 1).unwrap());
    client.state().regions.get_mut(&ID).unwrap().set(PAGE, Entry::Merged(frames[0]));
    let planned = PlannedRun { run: Run::one(PAGE), target: Target::Frame(frames[1]) };
    assert!(client.send_batch(ID, vec![planned]).is_ok());
    (client, agent, frames)
}

#[test]
fn a_page_on_its_way_uses_both_frames_until_its_agent_reports() {
    let discarded = ToDaemon::Discarded { region: ID, run: Run::new(PageNo(0), 12) };
    let report = |outcome| {
        let outcomes = vec![RunOutcome { run: Run::one(PAGE), outcome }];
        ToDaemon::Report(Report { batch: 1, last: true, outcomes, cpu_ns: 0, window_ns: 0, maps: 0 })
    };
    let cases = [
        (vec![], [1, 1], None),
        (vec![report(Outcome::Merged)], [0, 1], Some(1)),
        (vec![report(Outcome::Differs)], [1, 0], Some(0)),
        (vec![report(Outcome::Gone)], [1, 0], Some(0)),
        (vec![discarded.clone()], [0, 1], None),
        (vec![discarded.clone(), report(Outcome::Differs)], [0, 0], None),
        (vec![discarded.clone(), report(Outcome::Merged)], [0, 1], Some(1)),
        (vec![report(Outcome::Merged), discarded], [0, 0], None),
    ];
    for (messages, users, entry) in cases {
        let (client, _agent, frames) = moving();
        let what = format!("{messages:?}");
        for message in messages {
            client.apply(message, &mut Vec::new()).unwrap();
        }
        assert_eq!(frames.map(|frame| client.domain.store.users(frame)), users, "{what}");
        let now = client.state().regions[&ID].entry(PAGE);
        assert_eq!(
            entry.map(|at: usize| Entry::Merged(frames[at])),
            Some(now).filter(|now| matches!(now, Entry::Merged(_))),
            "{what}"
        );
        client.reap();
        assert_eq!(frames.map(|frame| client.domain.store.users(frame)), [0, 0], "{what}, then the client ends");
    }
}
