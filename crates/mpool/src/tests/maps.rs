//! mcache maps: a map always shows the written bytes, while pages come and go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::basic::write;
use super::model::content;
use crate::{Advice, BLOCK, MapError, Mcache, McacheMap, ObjectError, Pool, Settings, Temperature};

fn cache(settings: Settings) -> Option<Mcache> {
    match Mcache::new(settings) {
        Ok(cache) => Some(cache),
        Err(MapError::Userfaultfd(why)) => {
            println!("SKIPPED: {why}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The mappings in this range, as the kernel lists them.
fn mappings(range: std::ops::Range<usize>) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inside = |line: &&str| {
        let (start, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        let address = |hex| usize::from_str_radix(hex, 16).unwrap();
        address(start) < range.end && address(end) > range.start
    };
    maps.lines().filter(inside).map(str::to_owned).collect()
}

/// The two ways to map: for asking, and for touching.
type Map = fn(&Mcache, &Pool, &[u64], Temperature) -> Result<McacheMap, MapError>;
const WAYS: [Map; 2] = [Mcache::map, Mcache::map_touched];

#[test]
fn a_map_is_one_mapping_of_all_its_mblocks() {
    WAYS.into_iter().for_each(one_mapping);
}

fn one_mapping(map: Map) {
    let Some(cache) = cache(Settings::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    pool.add_class(crate::MediaClass::Staging, &dir.path().join("staging")).unwrap();
    let sizes = [1, 5000, 4096, 200_000, 12_288];
    let mut ids: Vec<u64> = sizes.iter().map(|&len| write(&pool, &content(len as u64, len))).collect();
    let staging = crate::Allocation { class: crate::MediaClass::Staging, ..Default::default() };
    let mut writer = pool.mblock_alloc(staging).unwrap();
    writer.write(&[std::io::IoSlice::new(&content(7, 7000))]).unwrap();
    ids.push(writer.commit().unwrap());

    let map = map(&cache, &pool, &ids, Temperature::Warm).unwrap();
    let start = map.mblock(0).as_ptr().addr();
    let range = start..start + map.virtual_bytes() as usize;
    let mapped = mappings(range.clone());
    assert_eq!((mapped.len(), map.len(), map.resident_bytes()), (1, 6, 0));
    let all = sizes.iter().map(|&len| (len as u64, len)).chain([(7, 7000)]);
    for (index, (seed, len)) in all.enumerate() {
        // Asked for, and just touched.
        let want = content(seed, len);
        if index % 2 == 0 {
            assert!(map.get(index, 0, len).unwrap() == want);
        }
        assert!(map.mblock(index) == want, "mblock {index}");
    }
    assert_eq!(map.resident_bytes(), map.virtual_bytes());
    let mut pages = Vec::new();
    map.get_pages(3, &[48, 0, 7], &mut pages).unwrap();
    assert_eq!(pages[0][..200_000 - 48 * BLOCK], content(200_000, 200_000)[48 * BLOCK..]);
    assert!(pages[0][200_000 - 48 * BLOCK..].iter().all(|&b| b == 0));
    assert_eq!(pages[2], &content(200_000, 200_000)[7 * BLOCK..8 * BLOCK]);

    map.purge();
    assert_eq!(map.resident_bytes(), 0);
    map.advise(3, 8192, 20_000, Advice::WillNeed).unwrap();
    assert_eq!(map.resident_bytes(), 5 * BLOCK as u64);
    map.advise(3, 8192, 4096, Advice::DontNeed).unwrap();
    assert_eq!(map.resident_bytes(), 4 * BLOCK as u64);
    map.get_pages(3, &[0, 9, 20, 21, 40], &mut pages).unwrap();
    assert_eq!(map.resident_bytes(), 9 * BLOCK as u64);
    assert!(map.mblock(3) == content(200_000, 200_000));

    assert!(matches!(map.get(9, 0, 1), Err(MapError::Outside { .. })));
    assert!(matches!(map.get(0, 0, 2), Err(MapError::Outside { .. })));
    assert!(matches!(map.get_pages(0, &[1], &mut pages), Err(MapError::Outside { .. })));
    assert!(matches!(pool.mblock_delete(&[ids[2]]), Err(ObjectError::Mapped { times: 1, .. })));
    assert!(matches!(cache.map(&pool, &[], Temperature::Hot), Err(MapError::Empty)));
    drop(map);
    assert_eq!(cache.stats().memory.resident, 0);
    // A fault thread may have it in hand for a moment yet.
    let gone = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !mappings(range.clone()).contains(&mapped[0])
    });
    assert!(gone);
    pool.mblock_delete(&ids).unwrap();
    assert!(matches!(cache.map(&pool, &ids, Temperature::Hot), Err(MapError::Object(ObjectError::NotFound(_)))));
}

#[test]
fn what_cannot_be_mapped_is_refused_with_a_sentence() {
    let Some(cache) = cache(Settings::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let id = write(&pool, &content(1, 5000));
    let error = cache.map(&pool, &[], Temperature::Hot).unwrap_err();
    assert!(matches!(error, MapError::Empty), "{error}");
    assert_eq!(error.to_string(), "a map needs at least one mblock");
    let map = cache.map(&pool, &[id], Temperature::Warm).unwrap();
    let error = map.get(0, 4999, 2).unwrap_err();
    assert!(matches!(error, MapError::Outside { .. }), "{error}");
    assert_eq!(error.to_string(), "no byte 5001 in mblock number 0 of the map");
    let error = pool.mblock_delete(&[id]).unwrap_err();
    assert!(matches!(error, ObjectError::Mapped { times: 1, .. }), "{error}");
    assert!(error.to_string().ends_with("is mapped 1 times; unmap it first"), "{error}");
    let make = || Mcache::new(Settings::default()).map(drop).unwrap_err();
    let error = kmem::testing::refusing(libc::SYS_userfaultfd, None, libc::ENOSYS, make);
    assert!(matches!(error, MapError::Userfaultfd(_)), "{error}");
    assert!(error.to_string().starts_with("an mcache map needs userfaultfd: "), "{error}");
}

/// 300 bytes from `at` on, or the whole page that they begin in.
fn read_some<'a>(map: &'a McacheMap, index: usize, at: usize, random: &mut crate::sim::Random) -> &'a [u8] {
    match random.below(3) {
        0 => &map.mblock(index)[at..at + 300],
        1 => map.get(index, at as u64, 300).unwrap(),
        _ => {
            let mut pages = Vec::new();
            let all = [at / BLOCK, random.below(256) as usize, random.below(256) as usize];
            map.get_pages(index, &all, &mut pages).unwrap();
            pages[0]
        }
    }
}

/// Readers by both ways, while far too little memory makes everything come and go.
fn churn(settings: Settings) {
    WAYS.into_iter().for_each(|map| churn_one(settings.clone(), map));
}

fn churn_one(settings: Settings, map: Map) {
    let Some(cache) = cache(settings) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let len = 1 << 20;
    let ids: Vec<u64> = (0..8).map(|seed| write(&pool, &content(seed, len))).collect();
    let want: Vec<Vec<u8>> = (0..8).map(|seed| content(seed, len)).collect();
    let maps: Vec<_> = ids.chunks(4).map(|ids| map(&cache, &pool, ids, Temperature::Cold).unwrap()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (maps, want, stop) = (&maps, &want, &stop);
            scope.spawn(move || {
                let mut random = crate::sim::Random::new(thread + 1);
                while !stop.load(Ordering::Relaxed) {
                    let (block, at) = (random.below(8) as usize, random.below(len as u64 - 300) as usize);
                    let bytes = read_some(&maps[block / 4], block % 4, at, &mut random);
                    let from = if bytes.len() == BLOCK { at / BLOCK * BLOCK } else { at };
                    assert!(bytes == &want[block][from..from + bytes.len()], "block {block} at {from}");
                }
            });
        }
        // Until enough came and went, however fast the machine is.
        let enough = |stats: crate::CacheStats| {
            stats.loaded > 2000 && stats.faults > 100 && stats.reaped + stats.evicted_directly > 1000
        };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2)
            || start.elapsed() < Duration::from_secs(60) && !enough(cache.stats())
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let stats = cache.stats();
    assert!(stats.memory.resident <= 2 << 20, "{stats:?}");
    assert!(stats.loaded > 2000 && stats.faults > 100, "{stats:?}");
    assert!(stats.reaped + stats.evicted_directly > 1000, "{stats:?}");
    // The reaper may still be evicting: two sums that are taken one after the other are equal once
    // it has enough.
    let sums = || (maps.iter().map(|m| m.resident_bytes()).sum::<u64>(), cache.stats().memory.resident);
    let equal = (0..6000).any(|_| {
        let (of_maps, of_all) = sums();
        if of_maps != of_all {
            std::thread::sleep(Duration::from_millis(10));
        }
        of_maps == of_all
    });
    assert!(equal, "{:?}", sums());
    drop(maps);
    assert_eq!(cache.stats().memory.resident, 0);
}

const TIGHT: u64 = 2 << 20;

/// A fault that another thread's loading ended, while a thread of the cache still loads for it.
#[test]
fn nothing_is_counted_after_a_map_is_dropped() {
    let Some(cache) = cache(Settings::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let want = content(1, 1 << 20);
    let id = write(&pool, &want);
    for way in 0..600 {
        let map = WAYS[way % 2](&cache, &pool, &[id], Temperature::Warm).unwrap();
        map.advise(0, 0, 0, Advice::Sequential).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(map.mblock(0)[0] == want[0]));
            assert!(map.get(0, 0, 1).unwrap() == &want[..1]);
        });
        drop(map);
        assert_eq!(cache.stats().memory.resident, 0);
    }
}

/// The reaper, and threads in need of memory, dropping pages of maps that are being dropped.
#[test]
fn nothing_is_counted_after_maps_are_dropped_under_pressure() {
    let settings = Settings { max_bytes: Some(TIGHT), low: 0.4, high: 0.6, floor: 0.1, ..Settings::default() };
    for settings in [settings.clone(), Settings { reaper: false, ..settings }] {
        let Some(cache) = cache(Settings { max_delay: Duration::ZERO, ..settings }) else { return };
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(dir.path(), "maps").unwrap();
        let ids: Vec<u64> = (0..4).map(|seed| write(&pool, &content(seed, 1 << 20))).collect();
        for way in 0..300 {
            std::thread::scope(|scope| {
                for id in &ids {
                    let (cache, pool) = (&cache, &pool);
                    scope.spawn(move || {
                        let map = WAYS[way % 2](cache, pool, &[*id], Temperature::Cold).unwrap();
                        map.get(0, 0, 1 << 20).unwrap();
                        map.get(0, 0, 1 << 20).unwrap();
                    });
                }
            });
            assert_eq!(cache.stats().memory.resident, 0);
        }
    }
}

#[test]
fn bytes_are_right_while_the_reaper_evicts() {
    churn(Settings {
        max_bytes: Some(TIGHT),
        low: 0.2,
        high: 0.3,
        floor: 0.1,
        watch: Some(Duration::from_millis(20)),
        ..Settings::default()
    });
}

#[test]
fn bytes_are_right_without_a_reaper() {
    churn(Settings { max_bytes: Some(TIGHT), reaper: false, ..Settings::default() });
}

#[test]
fn what_is_used_stays_and_temperature_counts() {
    // Nothing cools down meanwhile, however long it takes.
    let (watch, ttl) = (None, Duration::from_secs(100_000));
    let settings =
        Settings { max_bytes: Some(4 << 20), low: 0.3, high: 0.4, floor: 0.05, watch, ttl, ..Settings::default() };
    let Some(cache) = cache(settings) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let mib = 1 << 20;
    let ids: Vec<u64> = (0..8).map(|seed| write(&pool, &content(seed, mib))).collect();
    let pinned = cache.map(&pool, &ids[..1], Temperature::Pinned).unwrap();
    let hot = cache.map(&pool, &ids[1..2], Temperature::Hot).unwrap();
    let cold = cache.map(&pool, &ids[2..], Temperature::Cold).unwrap();
    pinned.get(0, 0, mib).unwrap();
    hot.get(0, 0, mib).unwrap();
    for index in 0..6 {
        for _ in 0..5 {
            cold.get(index, 0, 64 << 10).unwrap();
        }
        cold.get(index, 0, mib).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    let reaped = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        let stats = cache.stats();
        stats.reaped + stats.evicted_directly > 500 && cold.resident_bytes() < mib as u64
    });
    let stats = cache.stats();
    assert!(reaped, "{stats:?}");
    assert_eq!((pinned.resident_bytes(), hot.resident_bytes()), (mib as u64, mib as u64), "{stats:?}");
    assert!(cold.resident_bytes() < mib as u64, "{stats:?}");
    // Of the cold ones those that were used more than once.
    let before = cache.stats().loaded;
    for index in 3..6 {
        cold.get(index, 0, 64 << 10).unwrap();
    }
    let loaded = cache.stats().loaded - before;
    assert!(loaded < 24, "{loaded} of 48 pages that were used five times had gone; {stats:?}");
}

#[test]
fn what_is_needed_waits_for_memory_that_is_being_given_back() {
    let Some(cache) = cache(Settings { max_bytes: Some(1 << 20), reaper: false, ..Settings::default() }) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let ids: Vec<u64> = (0..2).map(|seed| write(&pool, &content(seed, 1 << 20))).collect();
    let held = cache.map(&pool, &ids[..1], Temperature::Hot).unwrap();
    let wanted = cache.map(&pool, &ids[1..], Temperature::Cold).unwrap();
    held.get(0, 0, 900 << 10).unwrap();
    let before = held.resident_bytes();
    // As if another thread were dropping 1000 pages.
    held.handle.core.dropping.fetch_add(1000, Ordering::AcqRel);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| wanted.get(0, 0, 256 << 10).unwrap().len());
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!((held.resident_bytes(), reader.is_finished()), (before, false));
        held.handle.core.dropping.fetch_sub(1000, Ordering::AcqRel);
        assert_eq!(reader.join().unwrap(), 256 << 10);
    });
    assert!(held.resident_bytes() < before);
}

#[test]
fn what_was_popular_cools_down_by_the_uses_of_others() {
    // By the clock nothing does.
    let (watch, ttl) = (Some(Duration::from_millis(10)), Duration::from_secs(100_000));
    let settings = Settings { max_bytes: Some(1 << 20), low: 0.1, high: 0.2, watch, ttl, ..Settings::default() };
    let Some(cache) = cache(settings) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let id = write(&pool, &content(1, 1 << 20));
    let map = cache.map(&pool, &[id], Temperature::Cold).unwrap();
    let hottest = || map.inner.heat[..16].iter().map(|heat| heat.load(Ordering::Relaxed)).max().unwrap();
    (0..200).for_each(|_| _ = map.get(0, 0, 64 << 10).unwrap());
    let start = Instant::now();
    while hottest() > 32 {
        assert!(start.elapsed() < Duration::from_secs(60), "{} and {:?}", hottest(), cache.stats());
        map.get(0, 64 << 10, 900 << 10).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How often the cache looks at uses, in the next test.
const WATCH: Duration = Duration::from_millis(20);

#[test]
fn uses_show_in_page_tables() {
    // While this thread is held up nobody uses the mblock, and it may go: that proves nothing.
    let known = (0..20).find_map(|_| match one_is_used_and_others_come_once() {
        Some((stats, longest)) => (longest < 2 * WATCH).then_some(Some(stats)),
        None => Some(None),
    });
    let Some(known) = known else { return println!("SKIPPED: this machine holds up each thread for long") };
    let Some(stats) = known else { return };
    assert!(stats.seen_used > 1000, "{stats:?}");
    assert!(stats.faults < 64, "mblock 0 was evicted although it was in use all the time: {stats:?}");
    assert!(stats.reaped > 500, "{stats:?}");
}

/// What the cache did, and the longest time for which mblock 0 was not used. `None`: there is no
/// cache here.
fn one_is_used_and_others_come_once() -> Option<(crate::CacheStats, Duration)> {
    let settings = Settings {
        max_bytes: Some(4 << 20),
        low: 0.45,
        high: 0.5,
        floor: 0.05,
        watch: Some(WATCH),
        ..Settings::default()
    };
    let cache = cache(settings)?;
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let mib = 1 << 20;
    let ids: Vec<u64> = (0..6).map(|seed| write(&pool, &content(seed, mib))).collect();
    let map = cache.map_touched(&pool, &ids, Temperature::Cold).unwrap();
    map.get(0, 0, mib).unwrap();
    let (mut sum, mut last, mut longest) = (0u64, Instant::now(), Duration::ZERO);
    // mblock 0 is only ever touched from here on; the others come once.
    for index in 1..6 {
        for part in 0..16 {
            map.get(index, part << 16, 1 << 16).unwrap();
            let touched = map.mblock(0).iter().step_by(BLOCK);
            sum += touched.map(|&b| u64::from(b)).sum::<u64>();
            longest = longest.max(last.elapsed());
            last = Instant::now();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(sum > 0);
    Some((cache.stats(), longest))
}

#[test]
fn damage_is_an_error_or_a_signal_and_the_rest_is_served() {
    let Some(cache) = cache(Settings::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let id = write(&pool, &content(1, 40_000));
    use std::os::unix::fs::FileExt;
    let data = std::fs::OpenOptions::new().write(true).open(dir.path().join("data")).unwrap();
    data.write_all_at(&[0xEE], 5 * BLOCK as u64).unwrap();
    data.sync_all().unwrap();
    let map = cache.map(&pool, &[id], Temperature::Warm).unwrap();
    match map.get(0, 5 * BLOCK as u64, 10) {
        Err(MapError::Object(ObjectError::Damaged(damage))) => assert_eq!(damage.offset, 5 * BLOCK as u64),
        other => panic!("{other:?}"),
    }
    // Touched: read-ahead over the damage must not take the good pages with it.
    assert!(map.mblock(0)[4 * BLOCK] == content(1, 40_000)[4 * BLOCK]);
    assert!(map.mblock(0)[6 * BLOCK..] == content(1, 40_000)[6 * BLOCK..]);
}

/// Dropping a part of a huge page, while others look at the rest of it.
#[test]
fn parts_of_huge_pages_go_whole() {
    let [asked, touched] = WAYS.map(huge_pages_in_parts);
    println!("huge pages: {asked:?} of anonymous memory, {touched:?} of memfds");
    // Of anonymous memory that is only read, kernels before 6.18 make none.
    assert!(touched.is_none_or(|huge| huge > 10));
}

fn huge_pages_in_parts(map: Map) -> Option<u64> {
    let cache = cache(Settings::default())?;
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(dir.path(), "maps").unwrap();
    let len = 2 << 20;
    let want = content(3, len);
    let id = write(&pool, &want);
    let map = map(&cache, &pool, &[id], Temperature::Warm).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (map, want, stop) = (&map, &want, &stop);
            scope.spawn(move || {
                let mut random = crate::sim::Random::new(thread + 1);
                while !stop.load(Ordering::Relaxed) {
                    let at = random.below(512) as usize * BLOCK;
                    let same = map.mblock(0)[at..at + BLOCK] == want[at..at + BLOCK];
                    if !same {
                        stop.store(true, Ordering::Relaxed);
                        let zeros = map.mblock(0)[at..at + BLOCK].iter().all(|&b| b == 0);
                        panic!("page {} is wrong (zeros now: {zeros})", at / BLOCK);
                    }
                }
            });
        }
        let mut random = crate::sim::Random::new(9);
        for _ in 0..100 {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            map.advise(0, 0, len as u64, Advice::WillNeed).unwrap();
            for _ in 0..20 {
                let at = random.below(512) * BLOCK as u64;
                map.advise(0, at, BLOCK as u64, Advice::DontNeed).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    Some(cache.stats().huge)
}

/// A program that keeps all its memory locked, in a process of its own: with `mlockall(2)` the
/// kernel fills new mappings with zeros, which are not the mblock's bytes.
#[test]
fn maps_of_a_program_that_locks_its_memory_are_not_zeros() {
    const CHILD: &str = "MPOOL_TEST_LOCKED";
    if std::env::var_os(CHILD).is_none() {
        let name = "tests::maps::maps_of_a_program_that_locks_its_memory_are_not_zeros";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let out = command.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        return;
    }
    if let Err(errno) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::FUTURE) {
        return println!("SKIPPED: cannot lock memory: {errno}");
    }
    for way in WAYS {
        let Some(cache) = cache(Settings { max_bytes: Some(1 << 20), ..Settings::default() }) else { return };
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(dir.path(), "maps").unwrap();
        let want = content(1, 3 << 20);
        let id = write(&pool, &want);
        let map = way(&cache, &pool, &[id], Temperature::Cold).unwrap();
        // Twice: what was dropped comes back.
        for _ in 0..2 {
            assert!(want.chunks(BLOCK).enumerate().all(|(i, want)| {
                let at = i * BLOCK;
                map.get(0, at as u64, BLOCK).unwrap() == want && &map.mblock(0)[at..at + BLOCK] == want
            }));
        }
        assert!(map.resident_bytes() <= 1 << 20, "{:?}", cache.stats());
    }
}
