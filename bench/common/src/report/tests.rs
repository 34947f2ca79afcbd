use super::*;

fn row(subject: &str, metric: &'static str, value: f64) -> Row {
    Row { bench: "idle", case: "2 MiB".into(), subject: subject.into(), threads: 2, metric, value, unit: "%" }
}

#[test]
fn a_json_line_has_the_published_keys() {
    let json = serde_json::to_string(&row("ksm", "cpu", 0.5)).unwrap();
    assert_eq!(
        json,
        r#"{"bench":"idle","case":"2 MiB","subject":"ksm","threads":2,"metric":"cpu","value":0.5,"unit":"%"}"#
    );
}

#[test]
fn the_table_sets_subjects_side_by_side() {
    let out = table(&[row("pageone", "cpu", 0.01234), row("pageone", "scans", 3.0), row("ksm", "cpu", 12.34)]);
    let words: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[2], ["pageone", "ksm"]);
    assert_eq!(words[3], ["cpu", "%", "0.0123", "12.3"]);
    assert_eq!(words[4], ["scans", "%", "3", "-"]);
}

#[test]
fn rounds_become_medians() {
    let rows = [1.0, 9.0, 2.0, 3.0].map(|value| row("ksm", "cpu", value));
    assert_eq!(medians(&rows), [row("ksm", "cpu", 2.5)]);
    let mut rows = [row("ksm", "cpu", 1.0), row("ksm", "cpu", 3.0), row("ksm", "cpu", 2.0)];
    rows[1].threads = 1;
    assert_eq!(medians(&rows).len(), 2);
    assert!(table(&rows).contains("ksm x1"));
}

#[test]
fn ratios_are_to_the_better_rival_in_the_case() {
    let mut rows = [("ksm", 10.0), ("ksm-smart-scan", 8.0), ("nothing", 1.0), ("pageone", 4.0), ("pageone", 2.0)]
        .map(|(subject, value)| row(subject, "cpu", value))
        .to_vec();
    rows[4].threads = 1;
    rows.push(Row { case: "another".into(), ..row("ksm", "cpu", 1.0) });
    let found: Vec<_> = ratios(&rows, &[("cpu", "r")]).iter().map(|row| (row.metric, row.threads, row.value)).collect();
    assert_eq!(found, [("r", 2, 0.5), ("r", 1, 0.25)]);
    assert!(ratios(&rows[2..5], &[("cpu", "r")]).is_empty());
}

#[test]
fn figures_are_short() {
    let cases = [(0.0, "0"), (1234.5, "1234"), (99.44, "99.4"), (1.234, "1.23"), (0.00056789, "0.000568")];
    cases.into_iter().for_each(|(value, text)| assert_eq!(short(value), text));
}
