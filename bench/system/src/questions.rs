//! What is asked of them: a bench each.

pub(crate) mod checkpoint;
pub(crate) mod estimate;
pub(crate) mod governor;
pub(crate) mod guests;
pub(crate) mod idle;
pub(crate) mod kvm;
pub(crate) mod merge;
pub(crate) mod module;
pub(crate) mod ppr;
pub(crate) mod scale;
pub(crate) mod scrape;
pub(crate) mod see;
pub(crate) mod steady;
