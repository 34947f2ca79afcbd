use std::time::Instant;

use super::maps::parse;
use super::*;
use crate::testing::{Child, Memory, forking, pause_for_ever};
use crate::{PAGE_SIZE, Range};

fn parsed(text: &str) -> Option<MapLine> {
    let mut line = MapLine {
        range: Range::new(9, 9),
        perms: Perms::default(),
        offset: 9,
        dev: 9,
        inode: 9,
        path: "left over".to_owned(),
    };
    parse(text.as_bytes(), &mut line).map(|()| line)
}

#[test]
fn parses_map_lines() {
    let line = parsed("7f12a000-7f12c000 r-xp 0001f000 fd:02 131 /usr/lib/a b.so").unwrap();
    assert_eq!(line.range, Range::new(0x7f12_a000, 0x2000));
    assert_eq!(line.perms, Perms { read: true, write: false, exec: true, shared: false });
    assert_eq!((line.offset, line.dev, line.inode), (0x1_f000, libc::makedev(0xfd, 2), 131));
    assert_eq!(line.path, "/usr/lib/a b.so");

    let line = parsed("00400000-00401000 rw-s 00000000 00:01 2049                       /memfd:x (deleted)").unwrap();
    assert_eq!((line.dev, line.inode, line.path.as_str()), (1, 2049, "/memfd:x (deleted)"));
    assert!(line.perms.shared && line.perms.write);

    for anonymous in ["1000-2000 ---p 00000000 00:00 0", "1000-2000 ---p 00000000 00:00 0 "] {
        let line = parsed(anonymous).unwrap();
        assert_eq!((line.dev, line.inode, line.path.as_str()), (0, 0, ""));
    }
    let line = parsed("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]").unwrap();
    assert_eq!((line.range.start, line.path.as_str()), (0xffff_ffff_ff60_0000, "[vsyscall]"));

    for bad in [
        "",
        "1000",
        "1000-2000",
        "1000-2000 rw",
        "2000-1000 rw-p 0 0:0 0",
        "-2000 rw-p 0 0:0 0",
        "1000-2000 rw-p 0 0:0 x",
        "g000-2000 rw-p 0 0:0 0",
        "10000000000000000-2 rw-p 0 0:0 0",
    ] {
        assert_eq!(parsed(bad), None, "{bad:?}");
    }
}

#[test]
fn lists_this_process() {
    let memory = Memory::new(5);
    // A hole on either side: two mappings that nothing else can join.
    memory.unmap(1).unwrap();
    memory.unmap(3).unwrap();
    let mut found = false;
    let mut count = 0usize;
    let mut last = 0;
    for_each_map(None, |line| {
        found |= line.range == memory.pages(2, 1) && line.perms.read && line.perms.write && !line.perms.shared;
        assert!(line.range.start >= last && line.range.pages() > 0);
        last = line.range.end();
        count += 1;
    })
    .unwrap();
    assert!(found);
    let again = count_maps(None).unwrap();
    assert!(again.abs_diff(count) < 100, "{count} {again}"); // Other tests map things meanwhile.
    assert!(again < max_map_count().unwrap());
    assert_eq!(count_maps(Some(i32::MAX)).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn many_mappings_are_all_listed() {
    const PAGES: usize = 20_001;
    if max_map_count().unwrap() < 2 * PAGES {
        println!("SKIPPED: vm.max_map_count is too low");
        return;
    }
    let _forking = forking();
    // In a child, so that no other test's mappings come and go meanwhile.
    let memory = Memory::new(PAGES);
    let child = Child::fork(|| {
        for page in (1..PAGES).step_by(2) {
            if memory.unmap(page).is_err() {
                return 1;
            }
        }
        pause_for_ever()
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    while count_maps(Some(child.0)).unwrap() < PAGES / 2 || !sleeping(child.0) {
        assert!(Instant::now() < deadline);
    }
    let start = Instant::now();
    let (mut count, mut ours) = (0, 0);
    for_each_map(Some(child.0), |line| {
        count += 1;
        ours += usize::from(memory.0.contains(&line.range) && line.range.len == PAGE_SIZE);
    })
    .unwrap();
    let took = start.elapsed();
    assert_eq!(ours, PAGES.div_ceil(2));
    assert_eq!(count, count_maps(Some(child.0)).unwrap());
    println!("{count} mappings listed in {took:?}, {} ns each", took.as_nanos() / count as u128);
}

#[test]
fn start_and_faults_of_this_process_are_known() {
    let own = std::process::id() as i32;
    assert!(start_time(own).unwrap() > 0 && start_time(own).unwrap() == start_time(own).unwrap());
    assert!(minor_faults(std::process::id() as i32).unwrap() > 0);
}

fn sleeping(pid: i32) -> bool {
    Stat::of(Some(pid)).unwrap().state() == Some('S')
}

#[test]
fn parses_status() {
    let text = "Name:\ta: b\nState:\tS (sleeping)\nTgid:\t41\nPid:\t42\nUid:\t1\t1000\t2\t3\nVmLck:\t      8 kB\n\
                VmPin:\t     12 kB\nVmHWM:\t  130000 kB\nVmRSS:\t  123456 kB\nRssAnon:\t 1 kB\nRssShmem:\t 44 kB\nThreads:\t7\nNoNewPrivs:\t1\nSeccomp:\t2\n\
                Seccomp_filters:\t9\n";
    let expected = Status {
        name: "a: b".to_owned(),
        tgid: 41,
        uid: 1000,
        vm_lck_kib: 8,
        vm_pin_kib: 12,
        vm_rss_kib: 123_456,
        vm_hwm_kib: 130_000,
        rss_shmem_kib: 44,
        threads: 7,
        no_new_privs: true,
        seccomp: 2,
    };
    assert_eq!(parse_status(text), expected);
    assert_eq!(parse_status("garbage"), Status::default());
}

#[test]
fn tells_this_process() {
    let status = status(None).unwrap();
    assert_eq!(status.tgid, std::process::id() as i32);
    assert_eq!(status.uid, rustix::process::geteuid().as_raw());
    assert!(status.threads >= 1 && status.vm_rss_kib > 100);
    assert_eq!(super::status(Some(status.tgid)).unwrap().name, status.name);
    assert!(super::status(Some(i32::MAX)).is_err());
}

#[test]
fn parses_smaps_rollup() {
    let text = "00400000-7fff rw-p 00000000 00:00 0    [rollup]\nRss:     884 kB\nPss:     385 kB\nPss_Dirty: 68 kB\n\
                Shared_Clean:  696 kB\nShared_Dirty: 1 kB\nPrivate_Clean:  120 kB\nPrivate_Dirty:   67 kB\n\
                Anonymous:  68 kB\nAnonHugePages: 5 kB\nSwap:  3 kB\nSwapPss: 4 kB\n";
    let expected = SmapsRollup {
        rss: 884,
        pss: 385,
        private_clean: 120,
        private_dirty: 67,
        shared_clean: 696,
        shared_dirty: 1,
        anonymous: 68,
        anon_huge_pages: 5,
        swap: 3,
    };
    assert_eq!(parse_smaps_rollup(text), expected);
}

#[test]
fn rollup_follows_what_is_touched() {
    let _forking = forking();
    let memory = Memory::new(256);
    let idle = Child::idle();
    let before = smaps_rollup(Some(idle.0)).unwrap();
    let busy = Child::fork(|| {
        for page in 0..256 {
            memory.write(page, 1);
        }
        pause_for_ever()
    });
    while !sleeping(busy.0) {
        std::thread::yield_now();
    }
    let after = smaps_rollup(Some(busy.0)).unwrap();
    assert!(after.anonymous >= before.anonymous + 1000, "{before:?} {after:?}");
    assert!(after.rss >= after.pss);
}

#[test]
fn parses_meminfo() {
    let text = "MemTotal:  24 kB\nMemFree:  5 kB\nMemAvailable:  18 kB\nCached: 7 kB\nSwapCached: 1 kB\nSwapTotal: 2 kB\n\
                SwapFree: 1 kB\nAnonPages: 6 kB\nShmem:  4 kB\nShmemHugePages: 9 kB\nSlab: 3 kB\nPageTables: 8 kB\n\
                HardwareCorrupted: 4 kB\n";
    let expected = MemInfo {
        total_kib: 24,
        free_kib: 5,
        available_kib: 18,
        cached_kib: 7,
        shmem_kib: 4,
        anon_pages_kib: 6,
        slab_kib: 3,
        page_tables_kib: 8,
        swap_total_kib: 2,
        swap_free_kib: 1,
        corrupted_kib: 4,
    };
    assert_eq!(parse_meminfo(text), expected);
    let info = meminfo().unwrap();
    assert!(info.total_kib > info.available_kib && info.available_kib > 0 && info.free_kib > 0);
}

#[test]
fn cpu_time_grows() {
    let pid = std::process::id() as i32;
    let before = cpu_time(pid).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while cpu_time(pid).unwrap() < before + Duration::from_millis(30) {
        assert!(Instant::now() < until, "this process uses no time");
    }
    assert!(cpu_time(i32::MAX).is_err());
}

#[test]
fn knows_the_kernel() {
    assert_eq!(parse_release("6.18.44-generic"), (6, 18));
    assert_eq!(parse_release("6.7-rc1"), (6, 7));
    assert_eq!(parse_release("x"), (0, 0));
    let (major, minor, release) = kernel_release();
    assert!(major >= 5 && release.starts_with(&format!("{major}.{minor}")), "{release}");
    let yama = std::path::Path::new("/proc/sys/kernel/yama").exists();
    assert_eq!(ptrace_scope().is_some(), yama);
}

#[test]
#[allow(unsafe_code)] // Ends one thread.
fn a_process_is_stopped_when_all_of_its_threads_are() {
    let _forking = forking();
    let child = Child::fork(|| {
        std::thread::spawn(|| pause_for_ever());
        // SAFETY: ends this thread, the first of the child process, whose other thread uses nothing
        // of it.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        0
    });
    let soon = |what: &str, is: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    };
    let state = || read_to_string(format!("/proc/{}/stat", child.0)).unwrap();
    soon("its first thread has ended", &|| state().contains(") Z "));
    assert_eq!(threads(child.0).unwrap().len(), 2);
    let process = crate::pidfd::PidFd::open(child.0).unwrap();
    assert!(!is_stopped(child.0).unwrap());
    process.send_signal(libc::SIGSTOP).unwrap();
    soon("it stops", &|| is_stopped(child.0).unwrap());
    assert!(state().contains(") Z "), "of the first thread nothing is to be seen");
    process.send_signal(libc::SIGCONT).unwrap();
    soon("it goes on", &|| !is_stopped(child.0).unwrap());
    assert!(is_stopped(i32::MAX).is_err());
}

#[test]
fn a_name_cannot_look_like_other_fields() {
    let of = |text: &str| Stat::from_text(text.into());
    let stat = of("42 (a) b (c) R 1 2 3 0 -1 4194304 10 11 12 13 1500 250 7 8 20 0 1 0 99");
    assert_eq!((stat.state(), stat.field(4).ok(), stat.field(14).ok()), (Some('R'), Some(1), Some(1500)));
    assert_eq!(stat.field(25).ok(), None);
    for number in [0, 2, 3, 8, 26] {
        assert_eq!(stat.field(number).unwrap_err().kind(), io::ErrorKind::InvalidData, "{number}");
    }
    for text in ["", "42 (a", "42 (a)", ") ) ", "7 (a) S 1"] {
        assert!(of(text).field(10).is_err(), "{text}");
    }
    assert_eq!((of("42 (a").state(), of("42 (a)").state(), of("7 (a)Z 1").state()), (None, None, Some('Z')));
}

#[test]
fn this_process_runs_and_so_does_its_thread() {
    let own = std::process::id() as i32;
    assert_eq!(Stat::of_thread(None, rustix::thread::gettid().as_raw_nonzero().get()).unwrap().state(), Some('R'));
    assert_eq!(Stat::of(None).unwrap().field(22).unwrap(), start_time(own).unwrap());
    assert!(Stat::of(Some(i32::MAX)).is_err());
}
