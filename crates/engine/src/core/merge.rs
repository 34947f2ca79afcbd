//! A merge pass, whichever back end carries it out: candidates in the order of their pages, chunk
//! by chunk, at the governor's pace.

pub(crate) mod lookup;
pub(crate) mod pass;
pub(crate) mod predict;
