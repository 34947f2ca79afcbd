//! Tests of the whole tree. Those of one module stand beside it.

#[cfg(not(loom))]
mod crafted;
#[cfg(loom)]
pub(crate) mod loom;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod slots;
#[cfg(not(loom))]
mod stale;
#[cfg(not(loom))]
mod stress;

use crate::{Handle, KeySource};

/// Keys that never change: the handle is the index.
pub(crate) struct Table(pub(crate) Vec<Vec<u8>>);

impl KeySource for Table {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.0.get(handle.0 as usize).map(Vec::as_slice))
    }
}

/// A small generator of numbers (splitmix64), the same in every run.
#[cfg(not(loom))]
pub(crate) struct Random(pub(crate) u64);

#[cfg(not(loom))]
impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
