//! What both back ends decide by: what is known of each page, of each content, of each guest's free
//! pages, and how a pass goes.

pub(crate) mod content;
pub(crate) mod ledger;
pub(crate) mod merge;
pub(crate) mod recycle;
