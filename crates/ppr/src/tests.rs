//! Tests of both sides: against a model, hostile guests, with threads, and in every interleaving.

#[cfg(not(loom))]
mod hostile;
#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod stress;
