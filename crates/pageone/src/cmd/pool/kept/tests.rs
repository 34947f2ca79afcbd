use std::path::PathBuf;

use checkpoint::Store;
use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    names: Names,
}

/// Stores pages; gives how many of them the pool did not have.
fn store(pool: &Pool, name: &str, fills: &[u64]) -> u64 {
    let store = Store::new(Catalog::open(pool).unwrap());
    let mut writer = store.begin(name).unwrap();
    writer.set_pages(fills.len());
    let page = |at: u64| fills[at as usize].to_le_bytes().repeat(BLOCK / 8);
    for at in 0..fills.len() as u64 {
        let hash = checkpoint::hash(&page(at), writer.seed());
        writer.put(&[at], &page(at), &[hash]).unwrap();
    }
    writer.put_off().iter().for_each(|off| writer.put_again(&[*off], &page(off.page)).unwrap());
    writer.commit("test".into(), vec![(0, (fills.len() * BLOCK) as u64)]).unwrap().new_pages
}

#[test]
fn who_waits_gets_the_pool_while_it_is_repacked() {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("pool");
    let pool = Pool::create(&path, "store").unwrap();
    for i in 1..6 {
        store(&pool, &format!("all-{i}"), &(1..20).map(|page| i * 100 + page).collect::<Vec<_>>());
        assert_eq!(store(&pool, &format!("few-{i}"), &[i * 100 + 3, i * 100 + 9]), 0);
        Catalog::open(&pool).unwrap().remove(&format!("all-{i}")).unwrap();
    }
    assert!(!pool.is_awaited());
    drop(pool);
    let (name, names) = (path.to_str().unwrap(), Line::parse_from(["test"]).names);
    let waits = Pool::await_turn(&path).unwrap();
    let quiet = Progress::new(output::Shown::Never);
    let (done, others) = std::thread::scope(|scope| {
        let repacking =
            scope.spawn(|| in_turns((&names, name), Repacking::new(None), &quiet, |_| Duration::ZERO).unwrap());
        let mut others = 0;
        while !repacking.is_finished() {
            if let Ok(pool) = names.open(name, Access::Exclusive) {
                let gone = Catalog::open(&pool).unwrap().usage().repack;
                others += usize::from((1..5 * 17).contains(&gone));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        (repacking.join().unwrap(), others)
    });
    drop(waits);
    assert_eq!((done.mblocks, done.moved, done.left), (5, 10, 0));
    assert!(others > 0, "nobody had it half-way");
    let pool = Pool::open(&path, mpool::OpenOptions::default()).unwrap();
    assert!(!pool.is_awaited() && Catalog::open(&pool).unwrap().check(Wrong::Report).unwrap().is_empty());
}
