use super::*;

#[test]
fn growth_is_between_the_two_largest() {
    let mut figures = Figures::new(String::new());
    for (subject, value) in [("pageone 1", 7.0), ("pageone 10", 2.0), ("pageone 1000", 200.0), ("ksm 1000", 1.0)] {
        figures.add(subject, "cpu", value, "%");
    }
    figures.add("pageone 1000", "new", 1.0, "");
    figures.grow("pageone", &[1, 10, 1000]);
    let powers: Vec<_> = figures.rows.iter().filter(|row| row.subject == "power").collect();
    assert_eq!((powers.len(), powers[0].value), (1, 1.0));
}

#[test]
fn a_bound_is_told_once() {
    let mut figures = Figures::new(String::new());
    figures.bound("pageone 1", "s", 2.0, "s", Bound::Most(3.0));
    figures.bound("pageone 2", "s", 4.0, "s", Bound::Most(3.0));
    assert_eq!(figures.rows.iter().filter(|row| row.subject == "bound").count(), 1);
}

#[test]
fn locks_are_told_apart_and_threads_get_what_they_leave() {
    let log = "INFO lock crates/engine/src/store/frames.rs:12 10 1000 0 0\nnoise\n\
               INFO lock crates/engine/src/store/frames.rs:90 0 0 4 300000\n\
               INFO lock crates/engine/src/client/requests.rs:36 5 500 0 0\n";
    let found = locks::parse(log);
    assert_eq!(found["store/frames.rs"], locks::Lock { taken: 10.0, held_ns: 1000.0, read: 4.0, long_ns: 300_000.0 });
    assert!(locks::is_of_one_client("client/requests.rs") && !locks::is_of_one_client("store/frames.rs"));
    assert_eq!(locks::amdahl(0.0, 16.0), 16.0);
    assert_eq!(locks::amdahl(1.0, 16.0), 1.0);
    assert!((locks::amdahl(1.0 / 45.0, 16.0) - 12.0).abs() < 0.01);
}
