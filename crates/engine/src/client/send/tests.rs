use kmem::PAGE_SIZE;
use wire::{PageNo, Run, ToDaemon};

use super::*;
use crate::client::scanning::tests::client;
use crate::store::Cursor;

const ID: RegionId = RegionId(1);

#[test]
fn a_segment_that_an_agent_has_no_descriptor_for_is_not_offered_again() {
    let (client, agent) = client();
    let heard = || {
        let mut packet = vec![0; wire::MAX_MESSAGE];
        let next = |_| agent.recv(&mut packet, &mut Vec::new()).unwrap();
        std::iter::repeat(()).map_while(next).count()
    };
    let region = ToDaemon::RegionAdded { region: ID, start: 1 << 30, len: 12 * PAGE_SIZE as u64 };
    client.apply(region, &mut Vec::new()).unwrap();
    let frame = Cursor::new(&client.domain.store, None).put(&[7; PAGE_SIZE], 1).unwrap();
    let offer = |page| {
        assert!(client.domain.store.try_ref(frame));
        let runs = vec![PlannedRun { run: Run::one(PageNo(page)), target: Target::Frame(frame) }];
        assert!(client.send_batch(ID, runs).is_ok());
    };
    offer(1);
    assert_eq!(heard(), 2, "the segment and the batch");
    let segment = client.domain.store.segment(frame).unwrap().id;
    let users = client.domain.store.users(frame);
    for _ in 0..2 {
        client.apply(ToDaemon::SegmentLeftOut { segment, most: 3 }, &mut Vec::new()).unwrap();
    }
    (2..6).for_each(offer);
    assert_eq!((heard(), client.domain.store.users(frame)), (0, users), "nothing is sent, nothing is leaked");
    let why = client.state().flight.why_left_out().unwrap();
    assert!(why.contains("room for 3 segments of the store, and 1 more"), "{why}");
    client.state().flight.close(segment);
    offer(6);
    assert_eq!((heard(), client.state().flight.why_left_out()), (2, None), "there may be room again");
}
