//! For the fuzz targets: what is read of others and has no way in from outside.

use mpool::BLOCK;

/// Takes a guest's RAM out of a migration stream, and out of what that leaves.
pub fn split(bytes: &[u8], ram: u64) {
    let mut pages = 0;
    let count = |page: u64, _: Option<&[u8; BLOCK]>| {
        assert!(page < ram.div_ceil(BLOCK as u64), "a page that the guest has not");
        pages += 1;
        true
    };
    if let Ok(rest) = crate::stream::split(bytes, ram, count) {
        assert!(rest.len() <= bytes.len() * 2, "what is kept is what was sent");
        let none = |_: u64, _: Option<&[u8; BLOCK]>| panic!("RAM is still there");
        assert!(crate::stream::split(&rest[..], ram, none).is_ok_and(|again| again == rest));
    }
}
