use super::*;

#[test]
fn what_a_user_takes_is_bounded_and_given_back() {
    let user = Arc::new(User::new(Owner::of(7), 1000, 2));
    let pages = user.claim(Kind::Pages, 600).unwrap();
    let over = user.claim(Kind::Pages, 401).err().unwrap();
    assert!(over.to_string().contains("uid 7") && over.to_string().contains("user_memory"), "{over}");
    assert!(matches!(user.claim(Kind::Pages, u64::MAX), Err(OverBound::Pages { .. })), "sums do not overflow");
    let rest = user.claim(Kind::Pages, 400).unwrap();
    drop((pages, rest));
    assert_eq!(user.taken(Kind::Pages), 0);
    let clients: Vec<_> = (0..2).map(|_| user.claim(Kind::Clients, 1).unwrap()).collect();
    assert_eq!(user.claim(Kind::Clients, 1).err(), Some(OverBound::Clients { user: Owner::of(7), most: 2 }));
    drop(clients);
    for (kind, most, words) in [
        (Kind::Handshakes, HANDSHAKES_OF_USER, "512 connections of uid 7 wait to introduce themselves"),
        (Kind::Segments, SEGMENTS_OF_USER, "handshakes of uid 7 hold 4096 segments"),
    ] {
        let _all = user.claim(kind, most).unwrap();
        let over = user.claim(kind, 1).err().unwrap().to_string();
        assert!(over.starts_with(words), "{over}");
    }
}

#[test]
fn users_do_not_count_for_each_other() {
    let users = Users::new(&Config { user_clients: 1, ..Config::default() });
    let _first = users.user(1).claim(Kind::Clients, 1).unwrap();
    assert!(users.user(1).claim(Kind::Clients, 1).is_err());
    assert!(users.user(2).claim(Kind::Clients, 1).is_ok());
    users.set(&Config { user_clients: 2, ..Config::default() });
    assert!(users.user(1).claim(Kind::Clients, 1).is_ok(), "as many as may be now");
}

#[test]
fn scans_are_shared_by_user_and_then_by_client() {
    let users = Users::new(&Config { user_clients: 100, ..Config::default() });
    let one = users.user(1).claim(Kind::Clients, 1).unwrap();
    assert_eq!(users.share(&users.user(1)), 1);
    let _many: Vec<_> = (0..50).map(|_| users.user(2).claim(Kind::Clients, 1).unwrap()).collect();
    assert_eq!((users.share(&users.user(1)), users.share(&users.user(2))), (2, 100));
    drop(one);
    assert_eq!(users.share(&users.user(2)), 50);
}

#[test]
fn refused_clients_are_listed_once_and_the_log_is_bounded() {
    let user = User::new(Owner::of(7), 0, 0);
    let pid = std::process::id() as i32;
    (0..100).for_each(|_| user.refuse((7, pid), "a", "the reason"));
    let refused = user.refused();
    assert_eq!((refused.len(), refused[0].times, refused[0].reason.as_str()), (1, 100, "the reason"));
    (0..100).for_each(|n| user.refuse((7, pid), "a", &format!("reason {n}")));
    assert_eq!(user.refused().len(), REFUSALS_OF_USER);
    assert!(!user.may_log(), "{LINES_OF_USER} lines were written");
    user.refuse((7, i32::MAX), "gone", "its process has ended");
    assert!(user.refused().iter().all(|refused| refused.pid == pid));
    user.accepted(pid);
    assert!(user.refused().is_empty());
    // Its number is another process's now.
    user.refuse((7, pid), "a", "the reason");
    user.refused.lock()[0].started -= 1;
    assert!(user.refused().is_empty());
}

#[test]
fn lines_of_all_users_are_bounded_and_root_has_its_own() {
    let users = Users::new(&Config::default());
    let written = (10_000..10_000 + 2 * LINES).filter(|&uid| users.user(uid).may_log()).count();
    assert_eq!(written, LINES as usize);
    assert!(users.user(0).may_log() && users.user(rustix::process::geteuid().as_raw()).may_log());
}
