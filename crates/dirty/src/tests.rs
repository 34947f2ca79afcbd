//! Tests of all sets: against a model, with threads, and in every interleaving.

#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod stress;
