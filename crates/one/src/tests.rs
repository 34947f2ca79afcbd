//! ONE against a model, with many threads, and in every interleaving of two.

#[cfg(not(loom))]
mod cases;
#[cfg(not(loom))]
mod crafted;
#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;

/// Objects that begin with this have one digest in tests.
pub(crate) const COLLIDING: &[u8] = b"COLLIDE";

#[cfg(not(loom))]
use crate::{MemoryStore, ObjectId, ObjectStore, One};

#[cfg(not(loom))]
/// Objects shorter than, as long as and longer than a key; colliding ones; one that is another
/// one's key; the empty one.
fn objects(one: &One<MemoryStore>) -> Vec<Vec<u8>> {
    let long = |last: u8| [vec![1; sdtree::MAX_KEY_LEN], vec![last]].concat();
    let colliding = |last: u8| [COLLIDING, &long(last)].concat();
    let mut objects = vec![vec![], vec![0], vec![0, 0], vec![1; sdtree::MAX_KEY_LEN], vec![9; 3 * sdtree::MAX_KEY_LEN]];
    objects.extend([long(1), long(2), colliding(1), colliding(2), colliding(3)]);
    objects.push(one.digest(&long(1)).to_be_bytes().to_vec());
    objects
}

#[cfg(not(loom))]
fn bytes(one: &One<MemoryStore>, id: ObjectId) -> Option<Vec<u8>> {
    one.store().with_object(id, |object| object.map(<[u8]>::to_vec))
}
