//! What a catalogue refuses, and what it says of it.

use std::path::Path;
use std::sync::Arc;

use mpool::{Object, OpenOptions};

use super::*;
use crate::RestoreError;
use crate::catalog::pages::hashes;
use crate::chain;
use crate::test::Memory;

#[test]
fn names_that_are_taken_or_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1]);
    let all = Store::new(Catalog::open(&pool).unwrap());
    let refused = |name: &str| all.begin(name).map(drop).unwrap_err();
    let error = refused("one");
    assert!(matches!(error, BeginError::Exists(_)), "{error}");
    assert!(error.to_string().starts_with("there is a \"one\" in the pool already; give another"), "{error}");
    for name in ["", &"x".repeat(128), "two\nrows", "\u{1b}[31m", "nul\0"] {
        let error = refused(name);
        assert!(matches!(error, BeginError::Name), "{error}");
        assert_eq!(
            error.to_string(),
            "a name has 1 to 127 bytes, and no control characters; give such a name with --name, or leave \
             --name out"
        );
    }
    assert!(all.begin(&"x".repeat(127)).is_ok());
}

#[test]
fn a_pool_of_something_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str| Pool::create(&dir.path().join(name), "test").unwrap();
    let refused = |pool: &Pool| Catalog::open(pool).map(drop).unwrap_err();
    // Another program's records.
    let pool = make("records");
    pool.mdc_open(ROOT_MDC).unwrap().append(&[&[0xFF; 40]], true).unwrap();
    let error = refused(&pool);
    assert!(matches!(error, OpenError::Foreign), "{error}");
    assert!(error.to_string().ends_with("give them a pool of their own"), "{error}");
    // Another program's objects, and a later version's records.
    let pool = make("objects");
    pool.mblock_alloc(Allocation::default()).unwrap().commit().unwrap();
    let later = make("later");
    Catalog::open(&later).unwrap().append(&[Entry::Format(COMPRESSED + 1)]).unwrap();
    for pool in [pool, later] {
        let error = refused(&pool);
        assert!(matches!(error, OpenError::Format), "{error}");
        assert_eq!(
            error.to_string(),
            format!(
                "this pool is not one of checkpoints of format {FORMAT} or {COMPRESSED}; make one with \
                     `pageone pool create`, or use the version that stored into it"
            )
        );
    }
}

#[test]
fn a_list_that_the_medium_does_not_give_is_said() {
    let medium = Memory::default();
    let pool = Pool::create_on(Arc::new(medium.clone()), Path::new("/pool"), "test").unwrap();
    store(&pool, "one", &[1, 2]);
    // Opening the log reads it first; then each record is read.
    let error = (0..1000).find_map(|read| {
        medium.fail_reads_from(Some(read));
        let opened = Catalog::open(&pool).map(drop);
        medium.fail_reads_from(None);
        opened.err().filter(|error| matches!(error, OpenError::Read(_)))
    });
    let error = error.unwrap();
    assert_eq!(error.to_string(), "cannot read the pool's list of checkpoints");
    assert!(load(&pool, "one") == pages_of(&[1, 2]));
}

#[test]
fn a_damaged_list_is_said_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    store(&pool, "first", &[1, 2]);
    store(&pool, "second", &[2, 3]);
    drop(pool);
    for name in ["mdc-0000000000000001-0", "mdc-0000000000000001-0.copy"] {
        let mut bytes = std::fs::read(path.join(name)).unwrap();
        let at = bytes.windows(5).position(|word| word == b"first").unwrap();
        bytes[at] = b'F';
        std::fs::write(path.join(name), bytes).unwrap();
    }
    let pool = Pool::open(&path, OpenOptions::default()).unwrap();
    let mut catalog = Catalog::open(&pool).unwrap();
    let error = catalog.find("first").unwrap_err();
    assert!(matches!(error, FindError::MissingFromDamaged { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("nothing in the pool is called \"first\", and the list of checkpoints in pool test"),
        "{text}"
    );
    let error = catalog.remove("second").unwrap_err();
    assert!(matches!(error, RemoveError::Damaged(_)), "{error}");
    assert!(error.to_string().starts_with("the list of checkpoints in pool test is damaged ("), "{error}");
    assert!(error.to_string().contains("): `pageone pool check test` repairs what it can"), "{error}");
    assert!(matches!(Store::new(catalog).begin("third").map(drop), Err(BeginError::Damaged(_))));
    assert!(load(&pool, "second") == pages_of(&[2, 3]));
}

#[test]
fn pages_that_another_checkpoint_could_not_store_are_said() {
    let medium = Memory::default();
    let pool = Pool::create_on(Arc::new(medium.clone()), Path::new("/pool"), "test").unwrap();
    let all = Store::new(Catalog::open(&pool).unwrap());
    let begin = |name: &str| {
        let mut writer = all.begin(name).unwrap();
        writer.set_pages(1);
        put(&mut writer, 0, &page(1)).unwrap();
        writer
    };
    let commit = |writer: Writer<'_>| writer.commit("test".into(), vec![(0, BLOCK as u64)]);
    let (one, two) = (begin("one"), begin("two"));
    // The medium takes nothing while the first one is stored.
    medium.kill_before(0);
    let error = commit(one).unwrap_err();
    assert!(matches!(error, StoreError::Object(_)) && !error.is_of_others(), "{error}");
    medium.kill_before(u64::MAX);
    let error = commit(two).unwrap_err();
    assert!(matches!(error, StoreError::Lost) && error.is_of_others(), "{error}");
    assert!(error.to_string().ends_with("could not be stored: take the checkpoint again"), "{error}");
    assert_eq!(commit(begin("two")).unwrap().new_pages, 1);
}

#[test]
fn data_with_fewer_pages_than_a_map_names_are_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    store(&pool, "one", &[1, 2, 3]);
    let mut catalog = Catalog::open(&pool).unwrap();
    let data = *catalog.data.keys().next().unwrap();
    catalog.append(&[Entry::Data(vec![(data, 2)])]).unwrap();
    drop(catalog);
    let catalog = Catalog::open(&pool).unwrap();
    let error = catalog.image(catalog.find("one").unwrap()).map(drop).unwrap_err();
    let ReadError::Damaged { source, .. } = error else { panic!("{error}") };
    assert!(matches!(source, Flaw::NoPage { page: 2, mblock } if mblock == data), "{source}");
    assert_eq!(source.to_string(), format!("page 2 of data mblock {data:#x} is not there"));
    let flaw = hashes(&pool, data, list::Data::plain(2)).unwrap_err();
    assert!(matches!(flaw, PageFlaw::Length { pages: 2, .. }), "{flaw}");
    assert!(flaw.to_string().starts_with(&format!("data mblock {data:#x} has 12336 bytes, and 8224 for 2")), "{flaw}");
}

#[test]
fn an_index_of_another_length_is_said_and_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    for i in 0..6 {
        store(&pool, &format!("{i}"), &[2 * i + 1, 2 * i + 2]);
    }
    let mut catalog = Catalog::open(&pool).unwrap();
    let (mut runs, covered) = (catalog.runs.clone(), catalog.covered);
    runs[0].parts[0].entries += 1;
    let part = runs[0].parts[0].id;
    catalog.append(&[Entry::Index(runs, covered)]).unwrap();
    drop(catalog);
    let all = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = all.begin("again").unwrap();
    writer.set_pages(1);
    put(&mut writer, 0, &page(1)).unwrap();
    let warnings = writer.warnings();
    let [Warning::Index { why, .. }] = &warnings[..] else { panic!("no warning of the index") };
    assert!(why.starts_with(&format!("mblock {part:#x} of the index has ")), "{why}");
    writer.commit("test".into(), vec![(0, BLOCK as u64)]).unwrap();
    drop(all);
    assert!(load(&pool, "again") == pages_of(&[1]));
}

#[test]
fn what_is_kept_beside_a_checkpoint_is_whole_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let stored = store(&pool, "few", &[1]);
    let mut catalog = Catalog::open(&pool).unwrap();
    let mblocks: Vec<u64> = catalog.beside(&stored).collect();
    // The record says that there is a byte more.
    let more = postcard::from_bytes(&postcard::to_allocvec(&(mblocks, 3001_u64)).unwrap()).unwrap();
    catalog.append(&[Entry::Attached(stored.number, more)]).unwrap();
    drop(catalog);
    let catalog = Catalog::open(&pool).unwrap();
    let error = catalog.beside_checkpoint(catalog.find("few").unwrap()).unwrap_err();
    let ReadError::Damaged { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(source, Flaw::Beside { is: 3000, expected: 3001 }), "{source}");
    assert!(chain(&error).ends_with("what is kept beside it has 3000 bytes, and 3001 were stored"));
}

#[test]
fn a_checkpoint_whose_map_is_gone_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let stored = store(&pool, "one", &[1]);
    let file = std::fs::File::create(dir.path().join("file")).unwrap();
    let cannot = Catalog::open(&pool).unwrap().write_image(&stored, &std::fs::File::open("/dev/null").unwrap());
    assert!(matches!(cannot.unwrap_err(), RestoreError::Read(_) | RestoreError::Write(_)), "it is open for reading");
    pool.mblock_delete(&[stored.root]).unwrap();
    let error = Catalog::open(&pool).unwrap().write_image(&stored, &file).unwrap_err();
    assert!(chain(&error).contains(&Object::Mblock(stored.root).to_string()), "{}", chain(&error));
}
