use super::*;

#[test]
fn pages_with_one_frame_are_shared() {
    let present = |frame: u64| 1 << 63 | frame;
    assert!(is_shared(present(5), present(5)) && !is_shared(present(5), present(6)));
    assert!(is_shared(present(5), 0) && is_shared(0, 0));
    // Soft-dirty and the like do not count.
    assert!(is_shared(present(5), present(5) | 1 << 55));
}

#[test]
fn every_share_has_duplicates_of_its_own() {
    let options = Options { engine: Vec::new(), share: None, rounds: 1 };
    for plan in [Plan::new(&options, true), Plan::new(&options, false)] {
        assert!(plan.shares.len() * DUPLICATES <= content::UNIQUE && content::UNIQUE < plan.pages);
        // KSM needs two scans, PageONE three periods.
        assert_eq!(plan.scan() * 2, Duration::from_secs_f64(plan.period * 3.0));
    }
    assert_eq!(Plan::new(&options, false).rewrites(1.0), 2621);
}
