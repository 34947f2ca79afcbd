use super::*;

fn trace(rate: impl Fn(f64) -> f64) -> Trace {
    let mut cpu = 0.0;
    let looks = (0..=400).map(|n| {
        let at = f64::from(n) / 10.0;
        cpu += rate(at) / 10.0;
        Look { at, cpu, merged: n as u64, mergeable: 300 }
    });
    let ends = (1..=10).map(|n| f64::from(n) * 4.0).collect();
    Trace { looks: looks.collect(), ends, scans: Vec::new(), changes: vec![0.0, 20.0], governing: 0.5 }
}

#[test]
fn a_limit_is_exceeded_over_a_window_and_not_for_a_moment() {
    assert_eq!(trace(|_| 0.399).exceeded(0.4), 0.0);
    assert_eq!(trace(|at| if at < 3.0 { 1.0 } else { 0.1 }).exceeded(0.4), 0.0);
    // 0.2 until 20 s, 0.6 then: after five seconds of it half of the window is, on average,
    // over 0.4.
    let exceeded = trace(|at| if at < 20.0 { 0.2 } else { 0.6 }).exceeded(0.4);
    assert!((exceeded - 15.0).abs() < 0.5, "{exceeded}");
    assert!((trace(|_| 0.3).most() - 0.3).abs() < 0.01);
}

#[test]
fn scans_count_when_all_is_merged() {
    // 297 of 300 pages at 29.7 s: too late for three whole scans.
    let times = trace(|_| 0.0).steady_scans();
    assert_eq!(times.len(), 0);
    let mut early = trace(|_| 0.0);
    early.looks.iter_mut().for_each(|look| look.merged = 300);
    assert_eq!(early.steady_scans().len(), 2 + 2);
    assert!(early.steady_scans().iter().all(|time| (time - 4.0).abs() < 1e-9));
}

#[test]
fn recovery_counts_the_scans_that_are_off() {
    let mut trace = trace(|_| 0.0);
    assert_eq!(trace.scans_to_recover(1, 4.0), Some(0));
    // 20 to 26, to 31, then every 4 s.
    trace.ends = vec![16.0, 20.0, 26.0, 31.0, 35.0, 39.0];
    assert_eq!(trace.scans_to_recover(1, 4.0), None, "two in a row");
    trace.ends.push(43.0);
    assert_eq!(trace.scans_to_recover(1, 4.0), Some(2));
}

#[test]
fn sharing_counts_from_the_change() {
    // 297 of 300 pages at 29.7 s, in the second stretch.
    assert_eq!(trace(|_| 0.0).sharing_times()[0], None);
    assert!((trace(|_| 0.0).sharing_times()[1].unwrap() - 9.7).abs() < 0.11);
}
