use std::collections::HashSet;
use std::sync::Arc;

use kmem::pidfd::PidFd;
use kmem::procmem::AddressSpace;
use kmem::seqpacket::Conn;
use wire::HugePages;

use super::*;
use crate::client::Identity;
use crate::client::memory::tests::{control_page, memory_of};
use crate::config::Config;
use crate::core::content::index::ClientId;
use crate::core::ledger::written::HugePolicy;
use crate::store::domain::{Domain, DomainKey};
use crate::tenants::Verdict;
use crate::users::{Connection, User};

/// A client that is this process, and its agent's end of the connection.
pub(crate) fn client() -> (Client, Conn) {
    let pid = std::process::id() as i32;
    client_of(pid, PidFd::open(pid).unwrap())
}

/// The store of a client's domain has frames for each NUMA node.
pub(crate) fn keep_nodes_apart(client: &mut Client) {
    Arc::get_mut(&mut client.identity.domain).unwrap().store.by_node = true;
}

/// A client of this process's memory, with any number and any process to watch.
pub(crate) fn client_of(pid: i32, pidfd: PidFd) -> (Client, Conn) {
    let key = DomainKey::named(None, "test");
    let (conn, agent) = Conn::pair().unwrap();
    let user = Arc::new(User::new(claims::Owner::of(0), u64::MAX, 1));
    let identity = Identity {
        number: ClientId(1),
        pid,
        uid: 0,
        user: user.clone(),
        name: "test".into(),
        own: guests::Names::default(),
        version: wire::VERSION,
        domain: Arc::new(Domain::new(key, &Config::default())),
        verdict: Verdict::default(),
        conn: Connection::new(conn, user),
        pidfd,
        forks_before: 0,
        memory: memory_of(pid, AddressSpace::open(pid).unwrap(), control_page()),
        huge_pages: HugePolicy { pages: HugePages::Split, share: 0.0 },
        reclaim_period: 2.0,
    };
    (Client::new(identity, HashSet::new()), agent)
}

#[test]
fn pages_that_were_reported_on_are_cut_out_of_a_run() {
    let run = |page, len| Run::new(PageNo(page), len);
    let holes = [run(0, 3), run(10, 5), run(17, 1), run(30, 9)];
    let left = |of: Run| {
        let mut parts = Vec::new();
        without(of, &holes, |part| parts.push((part.page.0, part.len)));
        parts
    };
    assert_eq!(left(run(2, 30)), [(3, 7), (15, 2), (18, 12)]);
    assert_eq!(left(run(11, 3)), [], "all of it");
    assert_eq!(left(run(4, 5)), [(4, 5)], "between two");
    assert_eq!(left(run(38, 5)), [(39, 4)]);
    assert_eq!(left(run(50, 5)), [(50, 5)]);
}

#[test]
fn what_agents_report_is_noted_for_the_region_being_scanned_only() {
    let (client, _agent) = client();
    let run = |page, len| Run::new(PageNo(page), len);
    let mut state = client.settled();
    state.overtake(RegionId(1), run(0, 9));
    client.while_scanning(&mut state, |state| {
        state.begin_region(RegionId(1));
        [run(7, 2), run(3, 2), run(5, 2), run(20, 1), run(4, 1)]
            .into_iter()
            .for_each(|run| state.overtake(RegionId(1), run));
        state.overtake(RegionId(2), run(0, 9));
        assert_eq!(state.overtaken(), [run(3, 6), run(20, 1)]);
        state.overtake(RegionId(1), run(0, 9));
        state.begin_region(RegionId(2));
        assert_eq!(state.overtaken(), [], "a scan that begins later has newer findings");
    });
    drop(state);
    drop(client.settled());
}
