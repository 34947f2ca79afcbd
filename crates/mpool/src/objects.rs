//! What a pool holds: media classes, the metadata that say which objects there are, and the
//! objects.

pub(crate) mod class;
pub(crate) mod handle;
pub(crate) mod info;
pub(crate) mod inner;
pub(crate) mod log_files;
pub(crate) mod mblock;
pub(crate) mod mdc;
pub(crate) mod meta;
pub(crate) mod mlog;
