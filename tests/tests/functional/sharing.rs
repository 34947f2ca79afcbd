//! Where memory went, and who shares with whom.

use std::os::unix::fs::PermissionsExt;

use control::client::{self, Error};
use e2e::user::as_user;
use e2e::{Client, Daemon};

const PAGES: u64 = 2048;
/// A user without clients.
const NOBODY: u32 = 65534;

fn holding(daemon: &Daemon, words: &[&str]) -> Client {
    let mut client = daemon.scenario(words);
    client.expect("ready");
    client
}

#[test]
fn memory_is_told_by_state_and_sharing_by_pair_and_content() {
    let daemon = Daemon::start();
    let pages = PAGES.to_string();
    // Two share with each other, one within itself; a fifth of the first two's pages is their own.
    let alike =
        [holding(&daemon, &["hold", &pages, "2", "3", "5"]), holding(&daemon, &["hold", &pages, "2", "3", "5"])];
    let other = holding(&daemon, &["hold", &pages, "2", "9"]);
    let zeros = holding(&daemon, &["zeros", &pages]);
    let shared = PAGES - PAGES / 5;
    alike.iter().for_each(|client| daemon.wait_merged(client.pid(), shared));
    daemon.wait_merged(other.pid(), PAGES);
    let place = [daemon.dir.path().to_path_buf()];
    e2e::eventually("zero pages are given back", std::time::Duration::from_secs(20), || {
        (daemon.client(zeros.pid())?["pages_zero"] == PAGES).then_some(())
    });

    e2e::eventually("what is its own is known", std::time::Duration::from_secs(60), || {
        (daemon.client(alike[0].pid())?["pages_unshared"] == PAGES - shared).then_some(())
    });
    let map = client::map(&place, alike[0].pid()).unwrap();
    let sum = |of: fn(&control::Cell) -> u32| map.regions.iter().flat_map(|r| &r.cells).map(of).sum::<u32>() as u64;
    assert_eq!((map.pid, map.cell_pages), (alike[0].pid(), 1));
    let known = daemon.client(alike[0].pid()).unwrap();
    assert_eq!(sum(|cell| cell.merged), shared, "{map:?}");
    assert_eq!(sum(|cell| cell.unshared), known["pages_unshared"].as_u64().unwrap());
    assert_eq!(map.regions.iter().map(|region| u64::from(region.pages)).sum::<u64>(), PAGES);
    assert!(map.regions.iter().all(|region| region.cells.len() == region.pages as usize));
    let all_zero = client::map(&place, zeros.pid()).unwrap();
    assert_eq!(all_zero.regions[0].cells.iter().map(|cell| u64::from(cell.zero)).sum::<u64>(), PAGES);

    let matrix = client::sharing(&place).unwrap();
    assert_eq!((matrix.domains.len(), matrix.domains[0].sampled, matrix.domains[0].clients_unlisted), (1, 1, 0));
    let domain = &matrix.domains[0];
    let at = |pid: i32| domain.clients.iter().position(|client| client.pid == pid).unwrap();
    let pair = |a: i32, b: i32| {
        let (a, b) = (at(a).min(at(b)), at(a).max(at(b)));
        domain.pairs.iter().find(|pair| (pair.a, pair.b) == (a, b)).map_or(0, |pair| pair.pages)
    };
    let frames = pair(alike[0].pid(), alike[1].pid());
    let contents = PAGES / 2;
    assert!((contents * 9 / 10..=contents).contains(&frames), "{frames} of {contents} contents: {domain:?}");
    assert_eq!((pair(alike[0].pid(), other.pid()), pair(other.pid(), zeros.pid())), (0, 0));
    let alone = &domain.clients[at(other.pid())];
    assert_eq!((alone.alone, alone.frames), (contents, contents));
    assert_eq!((domain.contents[0].pages, domain.contents[0].hint.as_str()), (PAGES, "zeros"));
    let next = &domain.contents[1];
    assert!(next.pages >= 3 && next.frames >= 1 && next.example.is_some(), "{next:?}");

    // Another user is told nothing of these.
    std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (theirs, refused) =
        as_user(NOBODY, || (client::sharing(&place).unwrap(), client::map(&place, alike[0].pid()).unwrap_err()));
    assert!(theirs.domains.is_empty(), "{theirs:?}");
    assert!(matches!(refused, Error::NoClient(_)), "{refused}");
    drop((alike, other, zeros));
}
