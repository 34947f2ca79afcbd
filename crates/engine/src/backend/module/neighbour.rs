//! Clients of agents in a domain of the same name, as files see them: frames of the clients' store
//! are lent to files ([`crate::backend::lend`]).

use std::collections::{BTreeMap, HashMap};

use rustix::io::Errno;
use wire::PageNo;

use crate::core::content::index::ClientId;
use crate::world::shared::Shared;

/// What the other back end does about what files hold. Each call is about many pages.
pub(crate) trait Neighbour: Send + Sync {
    /// Contents with these digests are new in files.
    fn sighted(&self, shared: &Shared, digests: &[u64]);

    /// These contents, by their handles, have these frames, which were made of files' pages.
    fn framed(&self, frames: &[(u32, u64)]);

    /// Makes frames of pages that are no file's, and enters them. Each was sighted with the content
    /// behind its handle.
    ///
    /// # Errors
    /// The segment is gone, or the kernel has no memory.
    fn make_frames(
        &self,
        number: ClientId,
        pages: BTreeMap<PageNo, u32>,
        frames: &mut HashMap<u32, u64>,
    ) -> Result<(), Errno>;
}
