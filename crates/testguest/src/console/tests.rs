use super::*;

fn pass(number: u64, checks: u64) -> Option<Line> {
    Some(Line::Round(Round { number, checks, failures: 0, first_failure: None }))
}

#[test]
fn a_pass_is_read_between_noise_on_either_side() {
    assert_eq!(parse("PAGEONE-ROUND 3 PASS checks=1234\r"), pass(3, 1234), "carriage return of the serial line");
    assert_eq!(parse("[    2.1] clocksource: PAGEONE-ROUND 0 PASS checks=7"), pass(0, 7));
}

#[test]
fn a_garbled_pass_is_no_pass() {
    for line in [
        "PAGEONE-ROUND 3 PASS",
        "PAGEONE-ROUND 3 PASS checks=",
        "PAGEONE-ROUND 3 PASS checks=12[  9.1] random: crng init done",
        "PAGEONE-ROUND 3 PASS checks=12 failures=1",
        "PAGEONE-ROUND three PASS checks=12",
        "PAGEONE-ROUND 3 PAS",
        "3 PASS checks=12",
        "",
    ] {
        assert_eq!(parse(line), None, "{line:?}");
    }
}

#[test]
fn a_corrupt_round_names_the_file() {
    assert_eq!(
        parse("PAGEONE-ROUND 9 CORRUPT checks=50 failures=2 file=03/usr/lib/a file"),
        Some(Line::Round(Round {
            number: 9,
            checks: 50,
            failures: 2,
            first_failure: Some("03/usr/lib/a file".into()),
        }))
    );
}

#[test]
fn a_garbled_corrupt_round_still_fails() {
    for line in [
        "PAGEONE-ROUND 9 CORRUPT",
        "PAGEONE-ROUND x CORRUPT checks=50 failures=0",
        "PAGEONE-ROUND 9 CORRUPT checks=5[  3.4] noise",
        "noise PAGEONE-ROUND 9 CORRUPT failures=x file=",
    ] {
        let Some(Line::Round(round)) = parse(line) else {
            panic!("{line:?} was not read as a round");
        };
        assert!(round.failures >= 1 && round.checks >= 1, "{line:?}");
    }
}

#[test]
fn boot_and_panic_are_seen() {
    assert_eq!(parse("PAGEONE-BOOTED files=12"), Some(Line::Booted));
    assert_eq!(parse("PAGEONE-RESTS"), Some(Line::Rests));
    assert_eq!(
        parse("[    1.0] Kernel panic - not syncing: Attempted to kill init!"),
        Some(Line::Panic("Kernel panic - not syncing: Attempted to kill init!".into()))
    );
}
