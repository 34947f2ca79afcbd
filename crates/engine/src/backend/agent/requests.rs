//! Merge requests: one client's pass makes them, and another client's pass serves them.
//!
//! When a pass makes a frame of content that another client's page was sighted with, that page
//! should use the frame too. Only a pass of that client may plan its pages, so it gets a request;
//! the frame counts the page as its user already. The requests of a pass are served in a pass of
//! their own, all together: many pages make fewer windows. A long run of requests is served at
//! once, so that the other agent need not wait until all is read here.

use std::collections::HashSet;
use std::sync::Arc;

use wire::{PageNo, RegionId};

use super::Stop;
use super::plan::{BATCH, Plan};
use crate::client::Client;
use crate::client::batch::Target;
use crate::client::requests::Request;
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, Sighting};
use crate::core::ledger::Entry;
use crate::store::domain::Domain;
use crate::world::queue::Pass;
use crate::world::shared::Shared;

/// The requests of a pass to other clients.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Clients to notify when the pass is over.
    pub(super) notify: HashSet<ClientId>,
    run: RequestRun,
}

/// Consecutive pages of one client that were requested one after the other.
#[derive(Default)]
struct RequestRun {
    client: ClientId,
    /// The page behind the last.
    next: (RegionId, PageNo),
    len: u32,
}

impl RequestRun {
    fn add(&mut self, there: Sighting) {
        if (self.client, self.next) != (there.client, (there.region, there.page)) {
            *self = Self { client: there.client, ..Self::default() };
        }
        self.next = (there.region, there.page + 1);
        self.len += 1;
    }
}

impl Outgoing {
    /// Asks the client of a sighting to use a frame, which counts the page as a user.
    pub(super) fn request(
        &mut self,
        shared: &Shared,
        domain: &Arc<Domain>,
        there: Sighting,
        handle: u32,
        frame: Frame,
    ) {
        if shared.request_merge(domain, there, handle, frame) {
            self.notify.insert(there.client);
            self.run.add(there);
        }
    }

    /// The content of a sighting was seen here too, in a huge page that is not split yet.
    pub(super) fn seen_elsewhere(&mut self, shared: &Shared, domain: &Arc<Domain>, there: Sighting, handle: u32) {
        if let Some(other) = shared.client(there.client).filter(|other| Arc::ptr_eq(&other.domain, domain)) {
            other.requests.add_seen_elsewhere(there, handle);
            self.notify.insert(there.client);
        }
    }

    /// Serves the requests of a client that `client`'s pass has made a long run of.
    pub(super) fn serve_long_run(&mut self, shared: &Shared, client: &Client) {
        if self.run.len < BATCH {
            return;
        }
        self.run.len = 0;
        let Some(other) = shared.client(self.run.client) else { return };
        if !Arc::ptr_eq(&other.domain, &client.domain) || !shared.queue.claim(&other) {
            return;
        }
        // Requests that cannot be served now wait, and the other client will be notified.
        let _ = serve(shared, &other);
        shared.queue.done(other);
    }
}

/// Plans and sends the pages that other passes made frames of, as long as the agent has room.
pub(super) fn serve(shared: &Shared, client: &Arc<Client>) -> Result<(), Stop> {
    if count_seen_elsewhere(client) {
        shared.queue.ask(client, Pass::GoOn);
    }
    let mut requests = client.requests.take();
    // Requests that were left the last time are sorted already, and this sort is fast on sorted
    // parts.
    requests.sort_by_key(|request| (request.region, request.page));
    let mut left = requests.as_slice();
    while let Some(id) = left.first().map(|request| request.region) {
        if client.is_full() {
            left.iter().for_each(|&request| {
                client.requests.add(request).unwrap_or_else(|back| client.domain.release(back.frame))
            });
            return Err(Stop::Full);
        }
        let count = left.partition_point(|request| request.region == id).min(BATCH as usize);
        let (now, later) = left.split_at(count);
        left = later;
        let (plan, given_up) = plan(client, id, now);
        if given_up {
            shared.queue.ask(client, Pass::GoOn);
        }
        plan.send(shared, client, id)
            .inspect_err(|_| left.iter().for_each(|request| client.domain.release(request.frame)))?;
    }
    Ok(())
}

/// Plans requests, ascending. Also returns whether a huge page is given up: new candidates.
fn plan(client: &Client, id: RegionId, requests: &[Request]) -> (Plan, bool) {
    let mut state = client.state();
    let mut plan = Plan { min_run: state.budget.min_run, ..Plan::default() };
    let mut given_up = false;
    for request in requests {
        let region = state.regions.get_mut(&id).filter(|r| r.entry(request.page) == Entry::Unshared(request.handle));
        match region {
            Some(region) if region.keeps_huge(request.page) => {
                region.set(request.page, Entry::Fresh);
                given_up |= region.can_merge(request.page);
                client.domain.release(request.frame);
            }
            Some(region) => {
                region.set(request.page, Entry::Fresh);
                region.ages.looked_at(request.page);
                plan.push(request.page, Target::Frame(request.frame));
            }
            // Written since, discarded, or sighted anew: the request has come too late.
            None => client.domain.release(request.frame),
        }
    }
    (plan, given_up)
}

/// Counts what was seen elsewhere among what huge pages here can merge. Whether one is given up.
fn count_seen_elsewhere(client: &Client) -> bool {
    let seen = client.requests.take_seen_elsewhere();
    if seen.is_empty() {
        return false;
    }
    let mut state = client.state();
    let mut given_up = false;
    for (Sighting { region, page, .. }, handle) in seen {
        if let Some(region) = state.regions.get_mut(&region)
            && region.entry(page) == Entry::Unshared(handle)
            && region.keeps_huge(page)
        {
            given_up |= region.can_merge(page);
        }
    }
    given_up
}
