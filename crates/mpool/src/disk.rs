//! What lies on the media, and how it is read and written: files, checked blocks, logs of records.

pub(crate) mod block;
pub(crate) mod buffer;
pub(crate) mod checksum;
pub(crate) mod file_system;
pub(crate) mod frame;
pub(crate) mod group;
pub(crate) mod key;
pub(crate) mod log;
pub(crate) mod medium;
pub(crate) mod pair;
pub(crate) mod record;
pub(crate) mod sealed;
pub(crate) mod space;
pub(crate) mod superblock;
pub(crate) mod uring;
pub(crate) mod xts;
