//! Guests that may make the same random numbers.

use super::*;

fn of(path: &std::path::Path) -> Twins {
    Twins(File::options().create(true).append(true).open(path).unwrap())
}

#[test]
fn guests_that_may_make_the_same_random_numbers_are_not_started_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let source = snapshot::record::Source::of(std::process::id()).unwrap();
    let of_this = Description { source: Some(source.clone()), ..Description::default() };
    let refused = |description: &Description, count| of(&file).refuse(description, count).map_err(|e| e.to_string());
    assert!(refused(&of_this, 2).unwrap_err().starts_with("these 2 guests could make the same random numbers"));
    assert!(refused(&of_this, 1).unwrap_err().contains("(process "), "the source runs");
    assert!(refused(&Description { reseeds: true, ..of_this.clone() }, 9).is_ok());
    let ended = snapshot::record::Source { started: 0, ..source };
    assert!(refused(&Description { source: Some(ended), ..of_this }, 1).is_ok());
    assert!(refused(&Description::default(), 1).is_ok());
}

#[test]
fn a_clone_that_lives_is_known_although_its_command_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let refused = || of(&file).refuse(&Description::default(), 1);
    let mut guest = {
        let _held = of(&file).hold().unwrap();
        std::process::Command::new("sleep").arg("1000").spawn().unwrap()
    };
    assert!(refused().unwrap_err().to_string().starts_with("this guest and another clone"));
    guest.kill().unwrap();
    guest.wait().unwrap();
    assert!(refused().is_ok());
}
