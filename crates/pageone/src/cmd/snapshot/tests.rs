//! Commands on pools of snapshots.

use checkpoint::Store;
use mpool::BLOCK;

use super::*;

/// Stores a page, and these bytes beside it.
fn put(store: &Store, name: &str, beside: Option<Vec<u8>>) {
    let mut writer = store.begin(name).unwrap();
    writer.set_pages(1);
    beside.into_iter().for_each(|bytes| writer.keep_beside(bytes));
    writer.commit("test".into(), vec![(0, BLOCK as u64)]).unwrap();
}

#[test]
fn a_checkpoint_is_no_snapshot_and_other_bytes_are_none_either() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    for (name, beside) in [("plain", None), ("other", Some(b"no record".to_vec()))] {
        put(&store, name, beside);
    }
    let catalog = store.into_catalog();
    let error = |name: &str| read(&catalog, catalog.find(name).unwrap()).err().unwrap().to_string();
    assert!(error("plain").starts_with("plain is a checkpoint, and no snapshot: it has no devices"));
    assert_eq!(error("other"), "cannot read snapshot other");
    let listed = all(&catalog);
    assert!(matches!(&listed[..], [(c, Err(_))] if c.name == "other"), "the list has it, and says why");
}

#[test]
fn a_list_of_snapshots_reads_no_device_stream() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let record = Record { description: Description::default(), stream: vec![7; 33 << 20] };
    put(&store, "long", Some(record.encode()));
    let catalog = store.into_catalog();
    // The one with the stream's end.
    let end = pool.mblocks().into_iter().find(|mblock| (1 << 20..2 << 20).contains(&mblock.len)).unwrap();
    pool.mblock_delete(&[end.id]).unwrap();
    assert!(matches!(&all(&catalog)[..], [(_, Ok((_, stream)))] if *stream == 33 << 20));
    assert!(read(&catalog, catalog.find("long").unwrap()).is_err());
}

#[derive(clap::Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

/// Runs `pageone snapshot` with this pool behind the subcommand.
fn snapshot(pool: &std::path::Path, words: &[&str]) -> Result<()> {
    let pool = pool.to_str().unwrap();
    let all = ["snapshot", words[0], pool].into_iter().chain(words[1..].iter().copied());
    super::run(&<Line as clap::Parser>::parse_from(all).command, None)
}

fn names(pool: &std::path::Path) -> Vec<String> {
    let catalog = Catalog::open(&Pool::open(pool, mpool::OpenOptions::default()).unwrap()).unwrap();
    catalog.checkpoints().iter().map(|c| c.name.clone()).collect()
}

/// Any tenant may call a guest as another's is called.
#[test]
fn prune_counts_the_guests_of_each_user_for_themselves() {
    use snapshot::record::{Description, Source};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let words = ["-name", "web"].map(String::from).to_vec();
    let source = Source::of(std::process::id()).unwrap();
    let whose = |uid, elsewhere, imported| {
        let source = Some(Source { uid, elsewhere, ..source.clone() });
        Description { words: words.clone(), source, imported, ..Description::default() }
    };
    let (own, imported) = (whose(7, false, false), whose(7, false, true));
    for (name, description) in [
        ("early", own.clone()),
        ("other", whose(8, false, false)),
        ("inside", whose(7, true, false)),
        ("first", imported.clone()),
        ("late", own),
        ("second", imported),
    ] {
        put(&store, name, Some(Record { description, stream: Vec::new() }.encode()));
    }
    drop((store, pool));
    snapshot(&path, &["prune", "--keep-last", "1"]).unwrap();
    assert_eq!(names(&path), ["other", "inside", "late", "second"]);
}

#[test]
fn one_damaged_snapshot_is_named_and_the_others_work() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let words = ["-name", "web"].map(String::from).to_vec();
    let description = Description { words, ..Description::default() };
    let good = Record { description, stream: Vec::new() }.encode();
    for (name, beside) in [("first", &good), ("bad", &b"damaged".to_vec()), ("second", &good), ("worse", &Vec::new())] {
        put(&store, name, Some(beside.clone()));
    }
    drop((store, pool));
    snapshot(&path, &["ls"]).unwrap();
    snapshot(&path, &["prune", "--keep-last", "1"]).unwrap();
    assert_eq!(names(&path), ["bad", "second", "worse"], "what is damaged stays");
    let error = snapshot(&path, &["export", "bad"]).unwrap_err().to_string();
    assert_eq!(error, "cannot read snapshot bad");
    snapshot(&path, &["rm", "bad"]).unwrap();
    assert_eq!(names(&path), ["second", "worse"]);
}

#[test]
fn a_name_that_cannot_be_is_wrong_usage() {
    let long = "x".repeat(128);
    for name in [&*long, "", "a\nb"] {
        for words in [["save", "--to", "store", "1"], ["import", "store", "file", "--quiet"]] {
            let words = ["snapshot"].into_iter().chain(words).chain(["--name", name]);
            let error = <Line as clap::Parser>::try_parse_from(words).err().unwrap();
            assert!(error.to_string().contains("a name has 1 to 127 bytes"), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
