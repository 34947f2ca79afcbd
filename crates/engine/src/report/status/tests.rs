use super::*;

#[test]
fn each_user_has_a_part_of_the_refused_that_are_told() {
    let rows = |uid, pids: std::ops::Range<i32>| {
        pids.map(|pid| RefusedStatus { uid, pid, ..RefusedStatus::default() }).collect::<Vec<_>>()
    };
    let few = [rows(8, 1..3), rows(7, 3..4)];
    assert_eq!(latest(few.clone().into_iter()), ([few[1].clone(), few[0].clone()].concat(), 0));
    let users = (1..=REFUSALS as u32).map(|uid| rows(uid, 0..2));
    let (told, left_out) = latest(users);
    assert!(told.len() == REFUSALS && told.iter().all(|row| row.pid == 1), "the last one of each");
    assert_eq!(left_out, REFUSALS as u64);
}
