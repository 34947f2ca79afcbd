//! Images that are leased.

use std::fs::File;
use std::path::Path;

use mpool::OpenOptions;

use super::*;

#[test]
fn an_image_is_read_by_its_lease_when_its_checkpoint_is_removed() {
    read_by_lease(|path| Pool::create(path, "test").unwrap());
}

#[test]
fn an_image_in_an_encrypted_pool_is_read_by_its_lease() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&key, [9; 32]).unwrap();
    read_by_lease(|path| Pool::create_encrypted(path, "test", key.path()).unwrap());
}

fn read_by_lease(create: impl Fn(&Path) -> Pool) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let open = |access| Pool::open(&path, OpenOptions { access, ..OpenOptions::default() }).unwrap();
    let seeds: Vec<u64> = (0..2000).map(|n| if n % 700 < 3 { 0 } else { n * 7 % 900 }).collect();
    let pool = create(&path);
    store(&pool, "one", &seeds);
    drop(pool);
    let pool = open(Access::Shared);
    let catalog = Catalog::open(&pool).unwrap();
    let lease = catalog.image(catalog.find("one").unwrap()).unwrap().lease(&pool).unwrap();
    drop((catalog, pool));
    // Only zeros and what the lease keeps are left of it.
    let pool = open(Access::Exclusive);
    Catalog::open(&pool).unwrap().remove("one").unwrap();
    store(&pool, "two", &(10_000..12_000).collect::<Vec<_>>());
    drop(pool);
    let image = Image::of_lease(&lease).unwrap();
    let mut bytes = vec![0; seeds.len() * BLOCK];
    image.read(0, &mut bytes).unwrap();
    assert!(bytes == pages_of(&seeds).concat());
    assert_eq!(image.pages(), 2000);
    // Without it the space is free, and the reader is told.
    let reader = Image::of_lease(&lease).unwrap();
    drop(lease);
    let pool = open(Access::Exclusive);
    store(&pool, "three", &(20_000..24_000).collect::<Vec<_>>());
    let error = reader.read(0, &mut bytes).unwrap_err().to_string();
    assert!(error.contains("checkpoint one"), "{error}");
    drop(pool);
    let other: File = open(Access::Shared).lease(&[], b"other").unwrap().into();
    let Err(error) = Image::of_lease(&other) else { panic!("it is no image's") };
    assert!(matches!(error, LeaseError::Foreign), "{error}");
    assert_eq!(error.to_string(), "the lease is not about a checkpoint");
    assert!(matches!(Image::of_lease(&File::open("/dev/null").unwrap()), Err(LeaseError::Pool(_))));
}
