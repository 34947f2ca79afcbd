//! What the benches of the system need: contents, clients that hold them, probes, clocks.

pub(crate) mod content;
pub(crate) mod cpu;
pub(crate) mod hold;
pub(crate) mod host;
pub(crate) mod probe;
pub(crate) mod rewrite;
