use super::*;

fn value(rows: &[Row], metric: &str) -> f64 {
    rows.iter().find(|row| row.metric == metric).map(|row| row.value).unwrap()
}

#[test]
fn figures_follow_from_the_times() {
    let plan = Plan::new(false);
    assert_eq!(plan.all_pages() * PAGE_SIZE as u64, 8 << 30);
    assert_eq!(plan.window(), Duration::from_secs(60));
    let mut sheet = plan.sheet("pageone", 2);
    Merging { time: Duration::from_secs(4), cpu_ns: 6_000_000, pages: 3_000 }.note(&mut sheet);
    assert_eq!(value(&sheet.rows, "us_cpu_per_merged_page"), 2.0);
    // 30 ms in 60 s, three scans of everything.
    let pages_scanned = Some(3 * plan.all_pages());
    Idling { time: plan.window(), cpu_ns: 30_000_000, pages_scanned }.note(&plan, &mut sheet);
    assert_eq!(value(&sheet.rows, "cpu_percent_of_one"), 0.05);
    assert_eq!(value(&sheet.rows, "seconds_per_scan"), 20.0);
    assert_eq!(value(&sheet.rows, "us_per_scan"), 10_000.0);
    assert!((value(&sheet.rows, "scan_ns_per_page") - 4.768).abs() < 0.001);
}

#[test]
fn all_of_the_content_can_be_merged() {
    let plan = Plan::new(true);
    assert_eq!(plan.reach().unwrap().mergeable, plan.all_pages());
    for plan in [Plan::new(true), Plan::new(false)] {
        assert!(plan.goal() < plan.all_pages() && plan.goal() > plan.all_pages() * 99 / 100);
    }
}
