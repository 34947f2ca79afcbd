use super::*;

#[test]
fn busy_time_leaves_out_idling_and_waiting() {
    let ticks = parse_busy("cpu  10 20 30 999 999 1 2 7 5 5\ncpu0 1 1\n").unwrap().as_secs_f64();
    assert_eq!((ticks * rustix::param::clock_ticks_per_second() as f64).round(), 70.0);
    assert!(parse_busy("cpu  1 2 3\n").is_none());
    assert!(busy().unwrap() > Duration::ZERO);
    let others = Others::watch(vec![]).unwrap();
    assert!(own(&others.parts) < busy().unwrap());
    others.report().unwrap();
}

#[test]
fn memory_in_use_is_summed_up() {
    let text = "MemTotal: 100 kB\nMemFree: 50 kB\nAnonPages: 7 kB\nShmem: 1 kB\nSlab: 90 kB\nSUnreclaim: 2 kB\n\
                PageTables: 3 kB\nSecPageTables: 8 kB\nKernelStack: 4 kB\n";
    assert_eq!(sum(text), 17 << 10);
    assert!(used().unwrap() > 0);
}
