use std::path::Path;

use anyhow::bail;

use super::*;
use crate::cmd::pool::Names;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    names: Names,
}

/// An empty pool, with the names that find it.
fn pool(dir: &Path) -> (Names, String) {
    let path = dir.join("pool");
    drop(Pool::create(&path, "store").unwrap());
    let Line { names } = clap::Parser::parse_from(["test"]);
    (names, path.to_str().unwrap().into())
}

#[test]
fn who_waits_and_does_not_take_the_pool_is_passed_over_by_one_that_stores() {
    let dir = tempfile::tempdir().unwrap();
    let (names, path) = pool(dir.path());
    let (turns, pool) = Turns::begin(names.find(&path).unwrap()).unwrap();
    let storing = Storing::new(turns, Quiet { quiet: true });
    assert!(!storing.wait(&pool));
    let waits = || Sign::Waits.give(Path::new(&path)).unwrap();
    let first = waits();
    assert!(storing.wait(&pool));
    drop(pool);
    let pool = storing.again().unwrap();
    assert!(!storing.wait(&pool), "it was offered");
    let second = waits();
    assert!(storing.wait(&pool), "another one waits");
    drop(pool);
    let pool = std::thread::scope(|scope| {
        let again = scope.spawn(|| storing.again().unwrap());
        drop((first, second));
        again.join().unwrap()
    });
    let _third = waits();
    assert!(storing.wait(&pool), "the others have had it");
}

#[test]
fn who_has_the_pool_when_one_comes_back_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let (names, path) = pool(dir.path());
    let (mut turns, pool) = Turns::begin(names.find(&path).unwrap()).unwrap();
    let (told, taken) = (Mutex::new(Vec::new()), Mutex::new(Some(pool)));
    let goes_on = || {
        if told.lock().len() == 1 {
            drop(taken.lock().take());
        }
        Ok(())
    };
    drop(turns.open_again(&|used| told.lock().push(used.to_owned()), &goes_on).unwrap());
    let told = told.into_inner();
    let who = format!("pool {path} is used by process {} (", std::process::id());
    assert!(told.len() == 1 && told[0].starts_with(&who), "{told:?}");
}

#[test]
fn who_comes_lets_those_go_first_that_come_back_for_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let (names, path) = pool(dir.path());
    let (mut turns, pool) = Turns::begin(names.find(&path).unwrap()).unwrap();
    let reader = || names.find(&path).unwrap();
    let yields = |access| {
        let opened = reader().open_behind(access, Comes::New, |_, _| bail!("it yields"));
        opened.is_err_and(|error| error.to_string() == "it yields")
    };
    let taken = Mutex::new(Some(pool));
    let goes_on = || {
        // The pool is free, and others come.
        if taken.lock().take().is_some() {
            assert!(yields(Access::Shared) && yields(Access::Exclusive));
        }
        Ok(())
    };
    drop(turns.open_again(&|_| (), &goes_on).unwrap());
    assert!(!yields(Access::Shared) && !yields(Access::Exclusive), "it is back");
    // One that is stopped, say, is not waited for.
    let _returns = Sign::Returns.give(Path::new(&path)).unwrap();
    assert!(yields(Access::Shared));
    drop(reader().open_behind(Access::Shared, Comes::Back, |_, _| bail!("it yields")).unwrap());
    drop(reader().open_soon(Access::Shared).unwrap());
}
