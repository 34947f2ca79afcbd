//! Who is let in.

use super::*;

fn users(costs: &[(&str, u32)]) -> Users {
    let hashes = costs.iter().map(|&(user, cost)| (user.to_owned(), bcrypt::hash("secret", cost).unwrap()));
    Users::new(hashes.collect()).unwrap()
}

fn basic(text: &str) -> HeaderValue {
    HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(text))).unwrap()
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

#[test]
fn the_right_password_is_known_from_then_on_and_only_with_its_hash() {
    let checks = Checks::new().unwrap();
    let (old, new) = (users(&[("ann", 4)]), users(&[("ann", 5)]));
    run(async {
        for _ in 0..2 {
            assert_eq!(checks.verdict(&old, Some(&basic("ann:secret"))).await, Verdict::Right);
        }
        assert_eq!(checks.known.lock().len(), 1);
        // A check would wait for this for ever.
        let check = checks.check.clone().lock_owned().await;
        assert_eq!(checks.verdict(&old, Some(&basic("ann:secret"))).await, Verdict::Right);
        let places = checks.waiting.clone().acquire_many_owned(WAITING as u32).await.unwrap();
        assert_eq!(checks.verdict(&new, Some(&basic("ann:secret"))).await, Verdict::Busy, "its hash is another");
        drop((check, places));
        assert_eq!(checks.verdict(&new, Some(&basic("ann:secret"))).await, Verdict::Right);
        assert_eq!(checks.verdict(&Users::default(), Some(&basic("ann:secret"))).await, Verdict::Wrong, "taken out");
    });
}

#[test]
fn what_is_wrong_is_wrong_and_a_name_that_nobody_has_is_checked_too() {
    let checks = Checks::new().unwrap();
    let users = users(&[("ann", 4), ("bob", 6), ("cid", 5)]);
    assert_eq!(users.slowest, "bob");
    run(async {
        for (user, password) in [("ann", "Secret"), ("ann", ""), ("eve", "secret"), ("", "secret")] {
            *checks.check.lock().await = Duration::ZERO;
            let field = basic(&format!("{user}:{password}"));
            assert_eq!(checks.verdict(&users, Some(&field)).await, Verdict::Wrong, "{user}:{password}");
            assert!(*checks.check.lock().await > Duration::ZERO, "{user} was checked");
        }
        for field in ["Basic", "Basic %", "Bearer YW5uOnNlY3JldA==", "Basic YW5u"] {
            assert_eq!(checks.verdict(&users, Some(&HeaderValue::from_static(field))).await, Verdict::Wrong, "{field}");
        }
        assert_eq!(checks.verdict(&users, None).await, Verdict::Wrong);
    });
    assert!(checks.known.lock().is_empty());
}

#[test]
fn no_wrong_answer_comes_before_the_slowest_would() {
    let checks = Checks::new().unwrap();
    let users = users(&[("ann", 4)]);
    let slowest = Duration::from_millis(50);
    run(async {
        *checks.check.lock().await = slowest;
        let begin = Instant::now();
        assert_eq!(checks.verdict(&users, Some(&basic("ann:wrong"))).await, Verdict::Wrong);
        assert!(begin.elapsed() >= slowest * REST);
    });
}

#[test]
fn who_goes_away_before_the_end_of_a_check_makes_room_for_nobody() {
    let checks = Arc::new(Checks::new().unwrap());
    run(async {
        // A wrong answer takes four seconds.
        *checks.check.lock().await = LONGEST;
        let theirs = checks.clone();
        let task = tokio::spawn(async move { theirs.verdict(&users(&[("ann", 4)]), Some(&basic("ann:wrong"))).await });
        tokio::task::yield_now().await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        assert!(checks.check.try_lock().is_err(), "the thread goes on");
        assert_eq!(checks.waiting.available_permits(), WAITING - 1);
        drop(checks.check.lock().await);
        assert_eq!(checks.waiting.available_permits(), WAITING);
    });
}

#[test]
fn only_hashes_of_bcrypt_of_a_bounded_cost_are_taken() {
    let of = |hash: &str| Users::new([("ann".to_owned(), hash.to_owned())].into()).unwrap_err();
    assert!(of("secret").starts_with("ann has no hash of bcrypt: `htpasswd -nBC 10 ann`"));
    let costly = "$2y$15$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";
    assert!(of(costly).starts_with("ann has a hash of cost 15, and at most 14 is taken"));
    let perls = costly.replace("$15$", "$05$");
    let users = Users::new([("ann".to_owned(), perls)].into()).unwrap();
    let right = run(Checks::new().unwrap().verdict(&users, Some(&basic("ann:secret"))));
    assert_eq!(right, Verdict::Right, "a hash of crypt(3)");
}
