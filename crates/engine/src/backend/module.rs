//! Files of `pageonefs`, the memory file system of `host/linux/pageonefs`: memory that is merged
//! below its mappings. The kernel does what an agent does; the daemon decides, with the ledger,
//! the index and the governor that it has for clients.
//!
//! ```text
//!   each merge period:  mounts ──▶ files ──▶ scan     harvest: which pages were written
//!                                             │
//!                                             ▼
//!                                 merge     candidates ──▶ digest ──▶ look up ──▶ merge
//!                                             ▲                                     │
//!                                             └───── different, or held just now ◀──┘
//! ```
//!
//! * A page that was clean for two merge periods is a candidate ([`crate::core::ledger`]). There
//!   are no cooldowns and no budget of mappings: the kernel sees who else holds a page.
//! * The first page with a content is *sighted*. The second becomes a frame, in the kernel, which
//!   copies it; then the first is merged with that ([`merge`]).
//! * Predicted pages are merged without being digested ([`crate::core::merge::predict`]): the
//!   kernel compares all pages in full.
//! * The kernel frees a frame when its last page leaves it. The index counts the pages of each
//!   content, and forgets it with the last ([`contents`]).
//! * What a guest marks as free is punched out of its file ([`recycle`]).
//! * Clients and files of one domain share one store ([`crate::backend::lend`]).
//! * A new daemon asks the kernel which pages are merged, and digests each frame once ([`adopt`]).
//!
//! Mounts with one `domain=` share frames and an index. A mount's root is opened for each call, so
//! that it can be unmounted at any time.

mod adopt;
pub(crate) mod contents;
pub(crate) mod file;
pub(crate) mod kernel;
pub(crate) mod look;
pub(crate) mod merge;
pub(crate) mod mounts;
mod numbers;
mod owner;
mod recycle;
pub(crate) mod round;
mod scan;
pub(crate) mod settle;
#[cfg(test)]
pub(crate) mod tests;
mod walk;

pub(crate) use self::file::File;
pub(crate) use self::mounts::{Files, no_agents};
pub(crate) use self::owner::Owner;

/// For whom the pacer counts this work: files belong to mounts, and mounts to root.
pub(crate) const USER: claims::Owner = claims::Owner::ROOT;
