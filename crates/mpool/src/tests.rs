//! Tests of the whole library on the simulated storage and on real files.

mod basic;
mod crash;
mod decoders;
mod flips;
mod key_places;
mod leases;
mod maps;
mod model;
mod rebuild;
mod sealed;
mod sectors;
mod threads;
