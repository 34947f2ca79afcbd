//! A scan of a client under way: which other work goes on beside it, and which waits.
//!
//! A scan is a system call that takes up to milliseconds. The client's lock is not held for that
//! time, so the thread that hears the agents never waits for a scan. Other scans, batches and
//! freezes do wait ([`Client::settled`]): the scan clears the kernel's notes of writes as it reads
//! them, and until the ledger has its findings only the scan knows of those writes.
//!
//! Pages that the agent reports discarded or recycled meanwhile are noted ([`State::overtake`]),
//! and the findings on them are dropped. The outcome is as if the findings had been applied at
//! once, and the messages after them.

use wire::{PageNo, RegionId, Run};

use super::{Client, State};
use crate::core::ledger::Emptied;
use crate::sync::MutexGuard;

/// The region that is being scanned, and its pages that the agent has reported on since.
#[derive(Default)]
pub(super) struct UnderScan {
    region: RegionId,
    overtaken: Emptied,
}

impl Client {
    /// The changing half, at a time when no scan is under way: waits for the end of one.
    pub(crate) fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        self.wait_for_scan(&mut state);
        state
    }

    /// Waits for the end of a scan that began while the state was unlocked.
    pub(crate) fn wait_for_scan(&self, state: &mut MutexGuard<'_, State>) {
        while state.schedule.scanning.is_some() {
            self.scan_ended.wait(state);
        }
    }

    /// Runs a scan, which may unlock the [settled](Client::settled) state.
    pub(crate) fn while_scanning<R>(
        &self,
        state: &mut MutexGuard<'_, State>,
        scan: impl FnOnce(&mut MutexGuard<'_, State>) -> R,
    ) -> R {
        debug_assert!(state.schedule.scanning.is_none(), "two scans at a time");
        state.schedule.scanning = Some(UnderScan::default());
        let result = scan(state);
        state.schedule.scanning = None;
        self.scan_ended.notify_all();
        result
    }
}

impl State {
    #[cfg(test)]
    pub(crate) fn is_scanned(&self) -> bool {
        self.schedule.scanning.is_some()
    }

    /// The scan under way comes to this region.
    pub(crate) fn begin_region(&mut self, region: RegionId) {
        self.schedule.scanning = Some(UnderScan { region, overtaken: Emptied::default() });
    }

    /// The agent reports that these pages hold nothing now. Findings of a scan under way are older.
    pub(crate) fn overtake(&mut self, region: RegionId, run: Run) {
        if let Some(scanning) = self.schedule.scanning.as_mut().filter(|scanning| scanning.region == region) {
            scanning.overtaken.add(run);
        }
    }

    /// The pages overtaken since the scan of the region began: ascending, disjoint.
    pub(crate) fn overtaken(&mut self) -> Vec<Run> {
        self.schedule.scanning.as_mut().map(|scanning| scanning.overtaken.take()).unwrap_or_default()
    }
}

/// Calls `each` with the parts of `run` in none of `holes`, which are ascending and disjoint.
pub(crate) fn without(run: Run, holes: &[Run], mut each: impl FnMut(Run)) {
    let mut from: PageNo = run.page;
    let first = holes.partition_point(|hole| hole.end() <= from);
    for hole in holes[first..].iter().take_while(|hole| hole.page < run.end()) {
        if hole.page > from {
            each(Run::between(from, hole.page));
        }
        from = from.max(hole.end());
    }
    if from < run.end() {
        each(Run::between(from, run.end()));
    }
}

#[cfg(test)]
pub(crate) mod tests {
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
}
