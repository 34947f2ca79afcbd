//! Tests.

#[cfg(not(loom))]
mod alloc;
#[cfg(not(loom))]
mod hostile;
#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod stress;
