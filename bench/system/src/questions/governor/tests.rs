use super::*;

#[test]
fn the_workload_is_the_published_one() {
    let options = Options { only: Vec::new(), workload: None, target: None, memory: None };
    for plan in [true, false].map(|quick| Plan::new(&options, quick, false)) {
        let counts: Vec<usize> = plan.load.iter().map(|&(_, count)| count).collect();
        assert_eq!(counts.first().map(|first| first * 5), Some(plan.peak()), "fivefold");
        assert_eq!((counts[plan.grown.0], counts[plan.grown.0 + 1]), (10, 5), "by half");
        assert_eq!(counts[plan.grown.1], plan.peak(), "and again");
        assert!(plan.load.windows(2).all(|two| two[0].0 < two[1].0) && plan.load.last().unwrap().0 < plan.end);
    }
    let plan = Plan::new(&options, false, false);
    let sleep = Duration::from_millis(20);
    assert_eq!(plan.static_pages(sleep, 0.0), 3277);
    // 327,680 pages at 2 µs leave 1.34 s to sleep in; at 5 µs nothing is left within the limit
    // of 60 %: 30 ms of work for 20 ms of sleep.
    assert_eq!((plan.static_pages(sleep, 2e-6), plan.static_pages(sleep, 5e-6)), (4874, 6000));
    // Every stay is long against a scan, and none much longer than another.
    let ends = [plan.load[5].0, plan.load[6].0, plan.end];
    let stays = [ends[0] - plan.load[4].0, ends[1] - ends[0], ends[2] - ends[1]];
    assert!(stays.iter().all(|stay| (16.0..=18.0).contains(&(stay / plan.target.as_secs_f64()))), "{stays:?}");
    let tripling = Plan::new(&options, false, true);
    assert_eq!(tripling.load[1].1, 3 * tripling.load[0].1);
}
