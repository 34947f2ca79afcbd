//! The object-storage media pool: immutable objects on media classes.
//!
//! A [`Pool`] lives in one directory for each [`MediaClass`]. It holds
//!
//! - **mblocks**: immutable once committed: [`Pool::mblock_alloc`], [`MblockWriter`], [`Mblock`];
//! - **mlogs**: append-only: [`Mlog`];
//! - **MDCs**, metadata containers: pairs of logs that compact into themselves: [`Mdc`];
//! - and shows mblocks to programs as **mcache maps**: one mapping for any number of them,
//!   [`McacheMap`], whose pages a reaper evicts by temperature before the kernel must.
//!
//! # On the media
//!
//! In each class's directory: `superblock`; `data`, a sparse file of all mblocks of the class, each
//! with its checksums behind it; `mlog-ID` and `mdc-ID-{0,1}`. In the capacity class also `meta-0`
//! and `meta-1`: the MDC that lists the objects. Anything that it does not list does not exist. So:
//!
//! - **Commit** is: data synced, then a record appended to the metadata and synced. A crash leaves
//!   all of an mblock or nothing.
//! - **Free space** is all space without a listed object. It is not stored, so it cannot be lost.
//! - **A damaged metadata record** has a copy beside it. A torn tail is cut, damage is reported
//!   (module `frame`).
//! - **Data** are checked block by block when they are read: through [`Mblock::read`], into a map,
//!   and by [`Pool::check`].
//!
//! After a failed sync nothing more is written: the media's contents are unknown until the pool is
//! opened again.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! use mpool::{Allocation, Pool};
//! let pool = Pool::create(dir.path(), "example")?;
//! let mut writer = pool.mblock_alloc(Allocation::default())?;
//! writer.write(&[std::io::IoSlice::new(b"hello")])?;
//! let id = writer.commit()?;
//! let mut bytes = [0; 5];
//! pool.mblock(id)?.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok(())
//! # }
//! ```

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod disk;
mod error;
mod finding;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod key_place;
mod map;
mod media_class;
mod objects;
mod pool;
mod scratch;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use disk::buffer::AlignedBuf;
pub use disk::file_system::Disk;
pub use disk::medium::{Access, EachLease, Medium, MediumFile, Open, ReadPiece, Room, Storage};
pub use disk::superblock::FORMAT_VERSION;
pub use disk::uring::disable as disable_io_uring;
pub use error::{Damage, IoError, MapError, Object, ObjectError, PoolError};
pub use finding::Finding;
pub use key_place::KeyPlace;
pub use map::McacheMap;
pub use map::cache::Mcache;
pub use map::settings::{CacheMemory, CacheStats, LoadTimes, Settings};
pub use map::state::{Advice, Temperature};
pub use media_class::{MediaClass, UnknownClass};
pub use objects::class::ClassUsage;
pub use objects::info::MblockProps;
pub use objects::log_files::LogProps;
pub use objects::mblock::{Allocation, Fallback, Mblock, MblockWriter};
pub use objects::mdc::Mdc;
pub use objects::mlog::Mlog;
pub use pool::check::{Depth, Report};
pub use pool::registry::Registry;
pub use pool::{Kept, Leased, OpenOptions, Pool, PoolProps, Rebuild, Rebuilt, Sign, Usage};
pub use scratch::Scratch;

/// Bytes of a block: the unit of direct I/O, of checksums and of maps.
pub const BLOCK: usize = 4096;
const _: () = assert!(BLOCK == kmem::PAGE_SIZE);

/// The MDC that every pool has, for its user's own catalogue.
pub const ROOT_MDC: u64 = 1;
