use super::*;

#[test]
fn one_user_cannot_take_the_connections_of_another() {
    let mut users = Users::new();
    let mut kept: Vec<_> = (0..CONNECTIONS).map_while(|_| users.admit(7)).collect();
    assert_eq!(kept.len(), CONNECTIONS as usize);
    assert!(users.admit(7).is_none(), "too many");
    assert!(users.admit(8).is_some() && users.admit(0).is_some(), "others have theirs");
    kept.pop();
    assert!(users.admit(7).is_some());
    drop(kept);
    users.admit(9);
    assert!(!users.users.contains_key(&Owner::of(7)), "who has no connection is forgotten");
}

#[test]
fn requests_of_a_user_leave_most_of_the_time_to_others() {
    let connection = Users::new().admit(7).unwrap();
    let begin = Instant::now();
    let answers = [(); 5].map(|()| {
        connection.in_turn(|| {
            let begin = Instant::now();
            std::thread::sleep(Duration::from_millis(4));
            begin.elapsed()
        })
    });
    // The last wait is still to come.
    let waits = answers[..4].iter().map(|answer| (*answer * SHARE).min(LONGEST)).sum::<Duration>();
    assert!(begin.elapsed() >= answers.iter().sum::<Duration>() + waits, "{answers:?} of {:?}", begin.elapsed());
}

#[test]
fn many_users_leave_root_its_connections() {
    let mut users = Users::new();
    let uids = 1..=2 * ALL_CONNECTIONS / CONNECTIONS;
    let all: Vec<_> = uids.flat_map(|uid| [uid; CONNECTIONS as usize]).filter_map(|uid| users.admit(uid)).collect();
    assert_eq!(all.len(), ALL_CONNECTIONS as usize);
    let of_root: Vec<_> = (0..TRUSTED_CONNECTIONS).map_while(|_| users.admit(0)).collect();
    assert_eq!(of_root.len(), TRUSTED_CONNECTIONS as usize);
    assert!(users.admit(1).is_none() && users.admit(0).is_none());
}
