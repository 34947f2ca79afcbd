use super::*;

#[test]
fn time_in_line_is_left_out() {
    let mut line = Line::new();
    if line.schedstat.is_none() {
        return eprintln!("SKIPPED: no schedstat");
    }
    // This thread and another that does nothing but run, which inherits this one's CPU: one of
    // them stands in line.
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let stop = AtomicBool::new(false);
    let mut left_out = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let end = Instant::now() + Duration::from_secs(10);
        // Each access takes a millisecond of the clock, in which the other may have the CPU.
        while left_out < 100_000 && Instant::now() < end {
            let (begin, mut times) = (Instant::now(), both().unwrap());
            line.time(&mut times, || while begin.elapsed() < Duration::from_millis(1) {});
            left_out = times[0].max() - times[1].max();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(left_out >= 100_000, "{left_out} ns");
}

#[test]
fn accesses_are_timed_and_change_nothing() {
    let mut memory = vec![7u64; 4096];
    let stores = memory.iter_mut().map(|word| (std::ptr::from_mut(word) as usize, 7)).collect();
    let loads = memory.iter().map(|word| std::ptr::from_ref(word) as usize).collect();
    // SAFETY: `memory` outlives the thread, and is not touched meanwhile.
    let probe = unsafe { Probe::start(Target { loads, stores }) }.unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let [loads, stores] = probe.end().unwrap();
    assert!(loads.count > 0 && stores.count > 0 && loads.p9999 <= loads.max);
    assert!(stores.unqueued_p9999 <= stores.unqueued_max && stores.unqueued_max <= stores.max);
    assert!(memory.iter().all(|&word| word == 7));
    let line = format!("{} {}", loads.say(), stores.say());
    assert_eq!(Timing::hear(&line).unwrap(), [loads, stores]);
    assert!(Timing::hear("ok").is_err());
}
