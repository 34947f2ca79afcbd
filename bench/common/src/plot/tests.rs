use super::*;

#[test]
fn steps_are_round() {
    for (least, step) in [(0.7, 1.0), (1.2, 2.0), (3.0, 5.0), (6.0, 10.0), (1700.0, 2000.0), (0.012, 0.02)] {
        assert!((round_step(least) / step - 1.0).abs() < 1e-9, "{least}: {}", round_step(least));
    }
}

#[test]
fn points_stand_where_their_values_are() {
    let out = svg("A & B", "s", "pages", &[("ours", vec![(0.0, 0.0), (10.0, 100.0), (f64::NAN, 1.0), (5.0, 50.0)])]);
    assert!(out.contains("A &amp; B") && out.contains(">ours<"));
    // From the lower left corner to the upper right one, then a break, then the middle.
    assert!(out.contains("M80.0 365.0L670.0 40.0M375.0 202.5"), "{out}");
    assert!(out.contains(">100</text>") && out.contains(">10</text>"));
}

#[test]
fn no_points_make_no_trouble() {
    let out = svg("empty", "x", "y", &[("nothing", Vec::new()), ("zeros", vec![(0.0, 0.0)])]);
    assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
}
