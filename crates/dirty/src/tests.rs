//! Tests.

#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod stress;
