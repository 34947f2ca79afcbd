#![allow(unsafe_code)] // Reads nodes.

#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod rules;
