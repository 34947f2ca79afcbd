//! What every bench needs: content and clients that hold it, clocks, guests, reports, plots.

pub(crate) mod content;
pub(crate) mod cpu;
pub(crate) mod guest;
pub(crate) mod hold;
pub(crate) mod host;
pub(crate) mod interrupt;
pub(crate) mod plot;
pub(crate) mod probe;
pub(crate) mod report;
pub(crate) mod rewrite;
