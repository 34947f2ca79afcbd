//! A domain: clients that may share memory with each other, their store and their index.
//!
//! *Replicas.* One content can fill much memory: freed memory that the kernel poisoned with one
//! byte, a frame buffer of one colour. One frame would be mapped over page after page, with a
//! mapping for each, since a mapping of several pages needs consecutive frames. Such a content gets
//! [`REPLICAS`] consecutive frames of the same bytes. A duplicate run then takes one mapping for
//! that many pages, for half a MiB once.

use std::collections::HashMap;
use std::sync::Weak;

use claims::Owner;

use crate::config::Config;
use crate::core::content::frame::{Frame, NO_HANDLE};
use crate::core::content::index::{Index, Place, Sighting};
use crate::core::content::seed::Seed;
use crate::store::moves::Compaction;
use crate::store::{Cursor, GrowError, Piece, Store};
use crate::sync::Mutex;
use crate::tenants::Tenant;

/// Frames of a content that fills duplicate runs: as many pages share a mapping.
const REPLICAS: u32 = 128;

/// Which domain a client belongs to. Clients of different uids never meet, unless the operator's
/// configuration says so, nor do those of different tenants.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DomainKey {
    /// The uid that it belongs to; `None`: the configuration lists who may join.
    pub(crate) uid: Option<u32>,
    /// The tenant that it belongs to, of those that the uid has.
    tenant: Option<Tenant>,
    /// The name that its clients ask for.
    name: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DomainError {
    #[error(
        "uid {uid} may not join domain {name:?}: the configuration's [domains.{name}] lists those that may; \
             add the uid there and reload the daemon, or leave --domain out"
    )]
    NotListed { uid: u32, name: String },
    #[error(
        "uid {user} has made {most} domains, and may not make more: let its clients share domains, end those of some, \
         or raise `user_domains` in the daemon's configuration"
    )]
    TooMany { user: Owner, most: usize },
}

impl DomainKey {
    /// The domain of a client of this uid and tenant that asks for `name`. `Err`: the configuration
    /// keeps it out.
    ///
    /// The name of a tenant's client makes a part of the tenant's domain: it never leads out of it.
    pub(crate) fn of(
        config: &Config,
        uid: u32,
        tenant: Option<Tenant>,
        name: Option<&str>,
    ) -> Result<Self, DomainError> {
        let name = name.filter(|name| !name.is_empty());
        let listed = name.filter(|_| tenant.is_none()).and_then(|name| Some((name, config.domains.get(name)?)));
        match listed {
            Some((name, domain)) if domain.uids.contains(&uid) => Ok(Self::named(None, name)),
            Some((name, _)) => Err(DomainError::NotListed { uid, name: name.into() }),
            None => {
                let name = name.map(|name| name.chars().take(64).collect());
                Ok(Self { uid: Some(uid), tenant, name })
            }
        }
    }

    pub(crate) fn named(uid: Option<u32>, name: &str) -> Self {
        Self { uid, tenant: None, name: Some(name.into()) }
    }

    #[cfg(test)]
    pub(crate) fn of_tenant(uid: u32, tenant: Tenant) -> Self {
        Self { uid: Some(uid), tenant: Some(tenant), name: None }
    }

    /// Whether a user can make any number of such domains: by subordinate uids, too.
    pub(crate) fn can_be_multiplied(&self) -> bool {
        let is_subordinate = |uid: u32| Owner::of(uid).number() != uid;
        self.name.is_some()
            || self.tenant.as_ref().is_some_and(Tenant::can_be_multiplied)
            || self.uid.is_some_and(is_subordinate)
    }

    /// Whose domains it is one of: of the user (`None`: several may join), within a tenant that
    /// only root can make.
    pub(crate) fn group(&self) -> (Option<Owner>, Option<&Tenant>) {
        (self.uid.map(Owner::of), self.tenant.as_ref().filter(|tenant| !tenant.can_be_multiplied()))
    }
}

/// The state file's text, a line for each segment: unique, and without a line's end.
impl std::fmt::Display for DomainKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(Tenant { source, value }) = &self.tenant {
            write!(f, "{source}:{}", Escaped(value))?;
        }
        match (&self.tenant, &self.name, self.uid) {
            (Some(_), Some(name), _) => write!(f, "/{}", Escaped(name))?,
            (None, Some(name), _) => write!(f, "{}", Escaped(name))?,
            (None, None, Some(uid)) => return write!(f, "uid-{uid}"),
            (_, None, _) => {}
        }
        self.uid.map_or(Ok(()), |uid| write!(f, "@{uid}"))
    }
}

/// A text in which what separates the parts of a key, and control characters, are written as `%XX`.
struct Escaped<'a>(&'a str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut buffer = [0; 4];
        self.0.chars().try_for_each(|c| match c {
            '%' | ':' | '/' | '@' | '\u{80}'..='\u{9f}' | '\0'..='\u{1f}' | '\u{7f}' => {
                c.encode_utf8(&mut buffer).bytes().try_for_each(|byte| write!(f, "%{byte:02X}"))
            }
            _ => write!(f, "{c}"),
        })
    }
}

/// What files of mounts with a domain's name hold.
pub(crate) trait InFiles: Send + Sync {
    /// Whether a page of theirs has the content with this digest ([`kmem::pageonefs::digest_of`]).
    fn has(&self, digest: u64) -> bool;
}

pub(crate) struct Domain {
    pub(crate) key: DomainKey,
    pub(crate) store: Store,
    pub(crate) index: Index,
    pub(crate) seed: Seed,
    pub(crate) zero_digest: u64,
    /// Evacuations of the store.
    pub(crate) compaction: Compaction,
    paused: Mutex<Option<String>>,
    /// What files of mounts with the domain's name hold.
    files: Mutex<Option<Weak<dyn InFiles>>>,
    /// By digest: equal consecutive frames, each with this table as one more user.
    replicas: Mutex<HashMap<u64, std::ops::Range<u32>>>,
}

impl Domain {
    pub(crate) fn new(key: DomainKey, config: &Config) -> Self {
        let name = key.to_string();
        let seed = Seed::of(&name);
        let by_node = !config.merge_across_nodes && kmem::numa::nodes() > 1;
        Self {
            store: Store::new(&name, by_node, config.quarantine(), config.reserve()),
            index: Index::new(),
            zero_digest: xxhash_rust::xxh3::xxh3_64_with_seed(&[0; kmem::PAGE_SIZE], seed.get()),
            seed,
            compaction: Compaction::default(),
            paused: Mutex::default(),
            files: Mutex::default(),
            replicas: Mutex::default(),
            key,
        }
    }

    pub(crate) fn set(&self, config: &Config) {
        self.store.set(config.quarantine(), config.reserve());
    }

    pub(crate) fn digest(&self, page: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(page, self.seed.get())
    }

    /// The key of a page in the index: its digest and, where nodes are kept apart and it is not
    /// zeros, its node. `None`: the node is not known, so there is no key.
    pub(crate) fn key_of(&self, digest: u64, node: Option<u32>) -> Option<u64> {
        match node {
            _ if digest == self.zero_digest || !self.store.by_node => Some(digest),
            Some(node) => Some(digest ^ (u64::from(node) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            None => None,
        }
    }

    /// Makes a frame stand for a sighted content. `false`: another came first, or it is forgotten.
    pub(crate) fn promote(&self, handle: u32, there: Sighting, frame: Frame) -> bool {
        self.store.set_handle(frame, handle);
        let done = self.index.promote(handle, there, frame);
        if !done {
            self.store.set_handle(frame, NO_HANDLE);
        }
        done
    }

    /// One user of a frame left.
    pub(crate) fn release(&self, frame: Frame) {
        if let Some(handle) = self.store.unref(frame) {
            if handle != NO_HANDLE {
                self.index.forget(handle, Place::Frame(frame));
            }
            self.store.quarantine(frame);
        }
    }

    /// A frame's memory has failed: nothing merges with it or touches it any more.
    pub(crate) fn give_up(&self, frame: Frame) {
        self.store.give_up(frame);
        let handle = self.store.take_handle(frame);
        if handle != NO_HANDLE {
            self.index.forget(handle, Place::Frame(frame));
        }
    }

    /// The next replica, for a page behind one that has the same content and uses `before`. The
    /// caller is counted as its user. `None`: there are too few; any frame of this content will do.
    pub(crate) fn next_replica(
        &self,
        digest: u64,
        before: Frame,
        bytes: &[u8; kmem::PAGE_SIZE],
        cursor: &mut Cursor<'_>,
    ) -> Result<Option<Frame>, GrowError> {
        let mut replicas = self.replicas.lock();
        let run = match replicas.get(&digest) {
            Some(run) => run.clone(),
            None => {
                let first = match cursor.put(bytes, 1) {
                    // One that is there does, too.
                    Err(GrowError::Payer(_)) => return Ok(None),
                    first => first?.0,
                };
                let mut run = first..first + 1;
                while run.end - run.start < REPLICAS {
                    match cursor.put(bytes, 1) {
                        Ok(frame) if frame.0 == run.end => run.end += 1,
                        Ok(frame) => {
                            // The reservation ended here: there are fewer replicas.
                            cursor.undo(frame, 1);
                            break;
                        }
                        Err(_) => break,
                    }
                }
                replicas.insert(digest, run.clone());
                run
            }
        };
        let next = before.0 + 1;
        let frame = Frame(if run.contains(&before.0) && run.contains(&next) { next } else { run.start });
        Ok(self.store.try_ref(frame).then_some(frame))
    }

    /// Releases replicas that no page maps any more.
    pub(super) fn tidy_replicas(&self) {
        self.replicas.lock().retain(|_, run| {
            let used = run.clone().any(|frame| self.store.users(Frame(frame)) > 1);
            if !used {
                run.clone().for_each(|frame| self.release(Frame(frame)));
            }
            used
        });
    }

    /// Replicas in this piece get no new users: their frames are evacuated as others are.
    pub(super) fn forget_replicas(&self, piece: Piece) {
        let mut forgotten = Vec::new();
        self.replicas.lock().retain(|_, run| {
            let stays = Piece::of(Frame(run.start)) != piece && Piece::of(Frame(run.end - 1)) != piece;
            if !stays {
                forgotten.push(run.clone());
            }
            stays
        });
        forgotten.into_iter().flatten().for_each(|frame| self.release(Frame(frame)));
    }

    /// Files of mounts with the domain's name hold these contents.
    pub(crate) fn set_files(&self, files: Weak<dyn InFiles>) {
        *self.files.lock() = Some(files);
    }

    /// Whether a page of a file has the content that a new page of a client has, and frames of the
    /// store are lent to files: then one that is made of the client's page will serve both.
    ///
    /// Nodes are told apart by the store alone. Where they are, the key is no digest.
    pub(crate) fn is_in_files(&self, key: u64) -> bool {
        let Some(files) = self.files.lock().as_ref().and_then(Weak::upgrade) else { return false };
        self.can_be_lent() && files.has(kmem::pageonefs::digest_of(key))
    }

    /// Whether frames that are made now can be lent to files.
    pub(crate) fn can_be_lent(&self) -> bool {
        // The first segment shows whether the store can lend.
        !self.store.by_node && (self.store.can_lend() || self.store.segment_ids().is_empty())
    }

    /// Notes why no frames can be made, or that they can again. Returns whether that changed.
    pub(crate) fn set_paused(&self, why: Option<String>) -> bool {
        let mut paused = self.paused.lock();
        let news = paused.is_some() != why.is_some();
        *paused = why;
        news
    }

    pub(crate) fn paused(&self) -> Option<String> {
        self.paused.lock().clone()
    }
}

#[cfg(test)]
mod tests;
