//! A domain of clients and the contents of files with one name: what each sees of the other.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use wire::PageNo;

use super::loans::{Loans, Segment};
use crate::backend::module::contents::{Contents, Neighbour};
use crate::backend::module::settle::make_frames_of;
use crate::core::content::index::{ClientId, Place, Sighting};
use crate::core::ledger::Entry;
use crate::store::domain::{Domain, InFiles};
use crate::sync::RwLock;
use crate::world::shared::Shared;

/// Clients and files with one name.
pub(super) struct Bridge {
    pub(super) contents: Arc<Contents>,
    domain: Weak<Domain>,
    pub(super) loans: Arc<Loans>,
    /// The clients' segments, by their numbers.
    pub(super) segments: RwLock<BTreeMap<ClientId, Arc<Segment>>>,
}

impl Bridge {
    /// Both see each other from now on, until it is dropped.
    pub(super) fn new(contents: Arc<Contents>, domain: &Arc<Domain>) -> Arc<Self> {
        let (domain_of, loans) = (Arc::downgrade(domain), Arc::default());
        let bridge = Arc::new(Self { contents, domain: domain_of, loans, segments: RwLock::default() });
        let neighbour: Weak<Self> = Arc::downgrade(&bridge);
        bridge.contents.set_neighbour(neighbour.clone());
        domain.set_files(neighbour);
        bridge
    }

    pub(super) fn is_between(&self, contents: &Arc<Contents>, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.contents, contents) && std::ptr::eq(self.domain.as_ptr(), Arc::as_ptr(domain))
    }
}

impl Neighbour for Bridge {
    /// A page of a client that was sighted with one of these contents is looked up again. Then it
    /// becomes a frame, since files have its content ([`crate::backend::agent`]).
    fn sighted(&self, shared: &Shared, digests: &[u64]) {
        let Some(domain) = self.domain.upgrade().filter(|domain| domain.can_be_lent()) else { return };
        // The kernel's digests lack the lowest bit.
        for key in digests.iter().flat_map(|digest| [*digest, digest | 1]) {
            let Some(handle) = domain.index.handle_of(key) else { continue };
            let Some(Place::Sighted(there)) = domain.index.place(handle, key) else { continue };
            let Some(client) = shared.client(there.client).filter(|it| Arc::ptr_eq(&it.domain, &domain)) else {
                continue;
            };
            if let Some(region) = client.state().regions.get_mut(&there.region)
                && region.entry(there.page) == Entry::Unshared(handle)
            {
                region.ages.restart(there.page);
            }
        }
    }

    /// A slot.
    fn look_again(&self, there: Sighting) {
        if let Some(segment) = self.segments.read().get(&there.client) {
            segment.state().region.restart(there.page);
        }
    }

    fn framed(&self, frames: &[(u32, u64)]) {
        frames.iter().for_each(|&(handle, frame)| self.loans.has_frame(handle, frame));
    }

    /// Of slots.
    fn make_frames(
        &self,
        number: ClientId,
        pages: BTreeMap<PageNo, u32>,
        frames: &mut HashMap<u32, u64>,
    ) -> Result<(), Errno> {
        let segment = self.segments.read().get(&number).cloned();
        segment.map_or(Ok(()), |segment| make_frames_of(&segment, pages, frames).1)
    }
}

impl InFiles for Bridge {
    /// A store's slots are no pages of files.
    fn has(&self, digest: u64) -> bool {
        let index = &self.contents.index;
        let Some(handle) = index.handle_of(digest) else { return false };
        match index.place(handle, digest) {
            Some(Place::Sighted(there)) => !self.loans.is_slot(there),
            // A lent slot is a user itself.
            Some(Place::Below(_)) => self.contents.users_of(handle) > u32::from(self.loans.frame(handle).is_some()),
            Some(Place::Frame(_)) | None => false,
        }
    }
}
