use std::path::Path;
use std::time::Duration;

use clap::Parser;
use mpool::{BLOCK, OpenOptions, Pool, Sign};
use output::{Progress, Shown};
use snapshot::record::{Description, Record};
use snapshot::rights;

use super::*;
use crate::cmd::pool::keepers;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: ImportArgs,
}

/// Pages of the guest: several batches.
const PAGES: u64 = 2048;

fn page(at: u64) -> Vec<u8> {
    (at + 1).to_le_bytes().repeat(BLOCK / 8)
}

/// Stores pages, and what a snapshot has beside them.
fn store(pool: &Pool, name: &str, pages: std::ops::Range<u64>, record: &Record) -> Store {
    let (store, count) = (Store::new(Catalog::open(pool).unwrap()), pages.end - pages.start);
    let mut writer = store.begin(name).unwrap();
    writer.set_pages(count as usize);
    for (number, at) in pages.enumerate() {
        let hash = checkpoint::hash(&page(at), writer.seed());
        writer.put(&[number as u64], &page(at), &[hash]).unwrap();
    }
    writer.keep_beside(record.encode());
    writer.commit("q 1".into(), vec![(0, count * BLOCK as u64)]).unwrap();
    store
}

/// The archive of a snapshot.
fn archive(directory: &Path, record: &Record) -> PathBuf {
    let pool = Pool::create(&directory.join("from"), "from").unwrap();
    let view = store(&pool, "one", 0..PAGES, record).view();
    let (image, regions) = (view.image(view.find("one").unwrap()).unwrap(), [(0, PAGES * BLOCK as u64)]);
    let account = &rights::Account::of(std::process::id()).unwrap();
    let what = Exported { name: "one", created: 1, source: "q 1", regions: &regions, record, image: &image, account };
    let path = directory.join("archive");
    archive::export(&what, File::create(&path).unwrap(), &Progress::new(Shown::Never)).unwrap();
    path
}

#[test]
fn others_have_the_pool_while_a_snapshot_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let description = Description { program: "/q".into(), words: vec!["-S".into()], ..Description::default() };
    let record = Record { description, stream: b"devices".to_vec() };
    let (file, path) = (archive(dir.path(), &record), dir.path().join("pool"));
    let pool = Pool::create(&path, "store").unwrap();
    // The archive has pages of it.
    drop(store(&pool, "early", PAGES - 300..PAGES + 300, &record));
    drop(pool);
    let line = Line::parse_from(["test", path.to_str().unwrap(), file.to_str().unwrap(), "--quiet"]);
    let removed = std::thread::scope(|scope| {
        let waits = Sign::Waits.give(&path).unwrap();
        let imports = scope.spawn(|| import(&line.args));
        let mut removed = false;
        let is_kept = || {
            std::fs::read_dir(&path).unwrap().flatten().any(|e| e.file_name().to_string_lossy().starts_with("lease-"))
        };
        while !removed && !imports.is_finished() {
            match is_kept().then(|| Pool::open(&path, OpenOptions::default())) {
                // It is between two turns.
                Some(Ok(pool)) if pool.is_kept() => {
                    let blocks = pool.mblocks().len();
                    Catalog::open(&pool).unwrap().remove("early").unwrap();
                    assert!(keepers(&pool).len() == 1 && pool.mblocks().len() == blocks);
                    removed = true;
                }
                _ => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        drop(waits);
        imports.join().unwrap().unwrap();
        removed
    });
    assert!(removed, "nobody had it meanwhile");
    let pool = Pool::open(&path, OpenOptions::default()).unwrap();
    let catalog = Catalog::open(&pool).unwrap();
    let names: Vec<&str> = catalog.checkpoints().iter().map(|c| &*c.name).collect();
    assert_eq!(names, ["one"]);
    let image = catalog.image(catalog.find("one").unwrap()).unwrap();
    let mut bytes = vec![0; BLOCK];
    for at in 0..PAGES {
        image.read(at, &mut bytes).unwrap();
        assert!(bytes == page(at), "{at}");
    }
    assert!(keepers(&pool).is_empty() && catalog.usage().repack == 300, "what nobody needs is swept");
}
