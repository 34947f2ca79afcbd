use std::io::BufRead;
use std::time::Instant;

use mpool::{BLOCK, Pool};

use super::*;
use crate::catalog::{Catalog, Store, hash};

/// Restores to a file of this name.
fn restored(pool: &Path, name: &str, to: &Path) -> Result<Option<Vec<(u64, u64)>>, ServeError> {
    restore(pool, name, &File::create(to).unwrap())
}

fn store(catalog: Catalog, name: &str, byte: u8) -> Catalog {
    let store = Store::new(catalog);
    let mut writer = store.begin(name).unwrap();
    writer.set_pages(3);
    let page = [byte; BLOCK];
    writer.put(&[1], &page, &[hash(&page, writer.seed())]).unwrap();
    writer.commit("test".into(), vec![(1 << 20, 3 * BLOCK as u64)]).unwrap();
    store.into_catalog()
}

#[test]
fn committed_checkpoints_are_restored_while_the_next_one_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (path, to) = (dir.path().join("pool"), dir.path().join("to"));
    let pool = Pool::create(&path, "test").unwrap();
    assert!(restored(&path, "one", &to).unwrap().is_none(), "nobody serves");
    let catalog = store(Catalog::open(&pool).unwrap(), "one", 1);
    let readers = Readers::serve(&path, catalog.view()).unwrap();
    let all = Store::new(catalog);
    let mut writer = all.begin("two").unwrap();
    writer.set_pages(1);
    assert_eq!(restored(&path, "one", &to).unwrap(), Some(vec![(1 << 20, 3 * BLOCK as u64)]));
    let want = |byte: u8| [[0; BLOCK], [byte; BLOCK], [0; BLOCK]].concat();
    assert!(std::fs::read(&to).unwrap() == want(1));
    let names = |all: Option<Vec<Checkpoint>>| all.unwrap().iter().map(|c| c.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(list(&path).unwrap()), ["one"]);
    let other = dir.path().join("other");
    let error = restored(&path, "two", &other).unwrap_err().to_string();
    assert!(error.contains("nothing in the pool is called \"two\""), "{error}");
    assert_eq!(other.metadata().unwrap().len(), 0, "nothing is written");
    drop(writer);
    let catalog = store(all.into_catalog(), "two", 2);
    readers.publish(|| catalog.view());
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (path, to) = (&path, dir.path().join(format!("to-{i}")));
            scope.spawn(move || {
                restored(path, "two", &to).unwrap().unwrap();
                assert!(std::fs::read(&to).unwrap() == want(2));
            });
        }
    });
    // As a process has it that was forked and does not run its own program yet.
    let inherited = readers.listener.try_clone().unwrap();
    drop(readers);
    assert!(connect(&path).unwrap().is_none(), "nobody would answer");
    assert!(restored(&path, "one", &other).unwrap().is_none() && list(&path).unwrap().is_none(), "nobody serves");
    drop(inherited);
}

#[test]
fn a_program_that_ends_while_it_serves_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (path, to) = (dir.path().join("pool"), dir.path().join("to"));
    drop(Pool::create(&path, "test").unwrap());
    let listener = UnixListener::bind_addr(&address(&path).unwrap()).unwrap();
    let ends = std::thread::spawn(move || (0..2).for_each(|_| drop(listener.accept().unwrap())));
    for error in [restored(&path, "one", &to).unwrap_err(), list(&path).unwrap_err()] {
        assert!(matches!(error, ServeError::Broken), "{error}");
        assert!(error.to_string().ends_with("has ended meanwhile: try again"), "{error}");
    }
    ends.join().unwrap();
}

#[test]
fn a_request_that_is_none_is_refused_and_a_silent_client_does_not_hold_up_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    let readers = Readers::serve(&path, Catalog::open(&pool).unwrap().view()).unwrap();
    let mut stream = UnixStream::connect_addr(&address(&path).unwrap()).unwrap();
    stream.write_all(b"{\"Other\": 1}\n").unwrap();
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).unwrap();
    assert!(answer.contains("another version"), "{answer}");
    let silent = UnixStream::connect_addr(&address(&path).unwrap()).unwrap();
    let start = Instant::now();
    drop(readers);
    assert!(start.elapsed() < Duration::from_secs(60));
    drop(silent);
}

/// A program that answers each of these connections so.
fn says(path: &Path, answers: Vec<Vec<u8>>) -> JoinHandle<()> {
    let listener = UnixListener::bind_addr(&address(path).unwrap()).unwrap();
    std::thread::spawn(move || {
        for answer in answers {
            let mut stream = listener.accept().unwrap().0;
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let _ = stream.write_all(&answer);
            let _ = stream.read(&mut [0]);
        }
    })
}

#[test]
fn what_a_server_says_of_checkpoints_is_checked_and_its_silence_has_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let (path, to) = (dir.path().join("pool"), dir.path().join("to"));
    drop(Pool::create(&path, "test").unwrap());
    let good =
        r#"{"name":"N","created":1,"source":"s","regions":[[0,8192]],"new_pages":1,"map_pages":1,"root":1,"number":1}"#;
    let all = |from: &str, to: &str| format!("{{\"All\":[{}]}}\n", good.replace(from, to)).into_bytes();
    let memory = |regions: &str, runs: &[(u64, u64)]| {
        let mut said = format!("{{\"Memory\":{regions}}}\n").into_bytes();
        for (offset, len) in runs {
            said.extend([offset.to_le_bytes(), len.to_le_bytes()].concat());
            said.extend(vec![7; *len.min(&4096) as usize]);
        }
        [said, b"\"Done\"\n".to_vec()].concat()
    };
    let lists = [
        all("N", &"y".repeat(100_000)),
        all("N", "a\\nb"),
        all("\"new_pages\":1", "\"new_pages\":9223372036854775808"),
        all("\"map_pages\":1", "\"map_pages\":9223372036854775808"),
        all("[0,8192]", "[0,18446744073709551615],[0,18446744073709551615]"),
        b"[[[\n".to_vec(),
    ];
    let memories = [
        memory("[[0,18446744073709551615],[0,2]]", &[(0, 0)]),
        memory("[[0,8192]]", &[(4096, 8192), (0, 0)]),
        memory("[[0,8192]]", &[(u64::MAX, 4096), (0, 0)]),
        memory("[[0,8192]]", &[(4096, 4096), (0, 4096), (0, 0)]),
    ];
    let right = memory("[[0,8192]]", &[(4096, 4096), (0, 0)]);
    let failed = b"{\"Failed\":\"no\\nFORGED\\u001b[2J\"}\n".to_vec();
    let (wrong_lists, wrong_memories) = (lists.len(), memories.len());
    let answers = lists.into_iter().chain([all("N", "good")]).chain(memories).chain([right, failed, Vec::new()]);
    let server = says(&path, answers.collect());
    for _ in 0..wrong_lists {
        let error = list(&path).unwrap_err();
        assert!(matches!(error, ServeError::Unsound { .. }), "{error}");
    }
    assert_eq!(list(&path).unwrap().unwrap()[0].stored_bytes(), 2 * BLOCK as u64);
    for _ in 0..wrong_memories {
        let error = restored(&path, "N", &to).unwrap_err();
        assert!(matches!(error, ServeError::Unsound { .. }), "{error}");
    }
    assert_eq!(restored(&path, "N", &to).unwrap(), Some(vec![(0, 8192)]));
    assert!(std::fs::read(&to).unwrap() == [vec![0; 4096], vec![7; 4096]].concat());
    assert_eq!(list(&path).unwrap_err().to_string(), "noFORGED[2J");
    let error = list(&path).unwrap_err();
    assert!(matches!(error, ServeError::Silent { .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("process {} of user ", std::process::id())), "{error}");
    server.join().unwrap();
}

#[test]
fn a_program_of_neither_root_this_user_nor_the_owner_is_asked_nothing() {
    let own = rustix::process::geteuid();
    if !own.is_root() {
        return println!("SKIPPED: only root can become another user");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(Pool::create(&path, "test").unwrap());
    let address = address(&path).unwrap();
    let bind = move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        UnixListener::bind_addr(&address).unwrap()
    };
    let listener = std::thread::spawn(bind).join().unwrap();
    let error = list(&path).unwrap_err();
    assert!(matches!(error, ServeError::Foreign { uid: 65534, .. }), "{error}");
    let mut asked = Vec::new();
    listener.accept().unwrap().0.read_to_end(&mut asked).unwrap();
    assert!(asked.is_empty());
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    assert!(connect(&path).unwrap().is_some());
}
