use super::*;

#[test]
fn what_was_found_is_answered_with_why_it_could_not_be_repaired() {
    let value = || json!({ "findings": ["one"] });
    assert_eq!(with_error(value(), &Ok(())), value());
    let failed = with_error(value(), &Err(anyhow::anyhow!("no room").context("cannot be written")));
    assert_eq!(failed, json!({ "findings": ["one"], "error": "cannot be written: no room" }));
}
