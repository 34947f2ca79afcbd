//! `recycle PAGES SECONDS`: a program that marks pages of its own, as a guest's driver would, and
//! checks that none that it uses is taken.
//!
//! Told `free`, it marks every second page, one by one. Told `work`, two threads allocate, fill,
//! check and free pages for so long, at random; 0: until the next line. Told `hostile`, a thread
//! writes whatever it likes into the pool meanwhile: then any page may be zeros, but nothing else.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use kmem::memfd::{self, SharedMap};
use rustix::fs::{MemfdFlags, SealFlags};

use e2e::{patience, pattern};

use super::{Region, check, hear, say, verdict};

struct Shared {
    pool: ppr::Pool,
    map: SharedMap,
}

/// A pool in a memfd, shared with the agent that was preloaded.
fn share(region: &Region) -> Shared {
    let bytes = ppr::Layout::for_frames(region.pages as u64).unwrap().pool_bytes();
    let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let map = memfd::map_shared(&fd, bytes).unwrap();
    // SAFETY: mapped until the process ends; the file cannot shrink.
    let pool = unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr()).unwrap(), map.len()) }.unwrap();
    pool.initialise();
    // SAFETY: a symbol of the agent, with this signature; it takes a descriptor and memory of this
    // process.
    let answer = unsafe {
        let symbol = libc::dlsym(libc::RTLD_DEFAULT, c"pageone_ppr_share".as_ptr());
        assert!(!symbol.is_null(), "the agent is not here");
        let share: extern "C" fn(i32, *mut libc::c_void, usize) -> i32 = std::mem::transmute(symbol);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&fd);
        share(fd, region.address(0), region.pages * super::PAGE)
    };
    assert_eq!(answer, 0, "{}", std::io::Error::from_raw_os_error(answer));
    pool.set_guest_state(ppr::GuestState::Active);
    Shared { pool, map }
}

pub(super) fn run(pages: usize, seconds: usize) {
    let region = Region::new(pages, true);
    let seed = |page: usize| 1 + (page % (pages / 4)) as u64;
    (0..pages).for_each(|page| region.fill(page, seed(page)));
    let shared = share(&region);
    let guest = ppr::Guest::new(&shared.pool);
    say("ready");
    while let Some(line) = hear() {
        let mut problems = Vec::new();
        match line.as_str() {
            "free" => (0..pages as u64).step_by(2).for_each(|page| guest.mark(page..page + 1)),
            "take" => {
                let odd = (1..pages).step_by(2).filter(|&page| region.wrong(page..page + 1, seed) > 0).count();
                check(&mut problems, "never marked", odd);
                for page in (0..pages).step_by(2) {
                    guest.cancel(page as u64..page as u64 + 1, || true).unwrap();
                    region.fill(page, seed(page));
                }
                std::thread::sleep(Duration::from_millis(500));
                check(&mut problems, "taken back", region.wrong(0..pages, seed));
            }
            "work" | "hostile" => {
                let lost = work(&region, &shared, seconds, line == "hostile", &mut problems);
                say(&format!("waits {lost}"));
                if line == "work" {
                    (0..pages).for_each(|page| region.fill(page, seed(page)));
                }
            }
            other => panic!("no step {other}"),
        }
        verdict(&problems);
    }
    std::process::exit(0);
}

/// Two threads allocate and free. Returns how many cancels had to wait for the host.
fn work(region: &Region, shared: &Shared, seconds: usize, hostile: bool, problems: &mut Vec<String>) -> u64 {
    let guest = ppr::Guest::new(&shared.pool);
    let stop = AtomicBool::new(false);
    let waits = AtomicU64::new(0);
    let (wrong, held): (usize, usize) = std::thread::scope(|scope| {
        if hostile {
            scope.spawn(|| fuzz(&shared.map, &stop));
        }
        let workers: Vec<_> = (0..2)
            .map(|half| {
                scope.spawn({
                    let (stop, waits) = (&stop, &waits);
                    move || allocate(region, guest, half, stop, waits, hostile)
                })
            })
            .collect();
        match seconds {
            0 => drop(hear()),
            seconds => std::thread::sleep(Duration::from_secs(seconds as u64)),
        }
        stop.store(true, Relaxed);
        let counts = workers.into_iter().map(|worker| worker.join().unwrap());
        counts.fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1))
    });
    check(problems, if hostile { "neither zeros nor as filled" } else { "in use" }, wrong);
    check(problems, "held by the host for too long", held);
    waits.load(Relaxed)
}

/// Returns how many pages in use were not as they were filled, and how many free ones the host did
/// not give back in time.
fn allocate(
    region: &Region,
    guest: ppr::Guest<'_>,
    half: usize,
    stop: &AtomicBool,
    waits: &AtomicU64,
    hostile: bool,
) -> (usize, usize) {
    let pages = region.pages / 2;
    let first = half * pages;
    // Every page of this half is this thread's. 0: free.
    let mut content = vec![0u64; pages];
    (first..first + pages).for_each(|page| guest.mark(page as u64..page as u64 + 1));
    let mut random = 0x9e37_79b9_7f4a_7c15u64 + half as u64;
    let (mut next, mut wrong, mut held) = (1u64, 0, 0);
    // One that is stuck for good is met by a hostile program alone, and again and again.
    let most = Duration::from_secs(if hostile { 2 } else { 60 }) * patience();
    let is_wrong = |page: usize, seed: u64| {
        let wrong = region.wrong(page..page + 1, |_| seed) > 0;
        wrong && !(hostile && page_is_mixed_of_zeros(region, page, seed))
    };
    while !stop.load(Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let start = (random >> 8) as usize % pages;
        let count = 1 + (random >> 40) as usize % 12;
        for (at, content) in content.iter_mut().enumerate().skip(start).take(count) {
            let page = first + at;
            if *content == 0 {
                let begin = Instant::now();
                match guest.cancel(page as u64..page as u64 + 1, || begin.elapsed() < most) {
                    Ok(cancelled) => {
                        waits.fetch_add(cancelled.waits, Relaxed);
                        next += 1;
                        *content = (half as u64 + 1) << 56 | next;
                        region.fill(page, *content);
                    }
                    // Only a program that writes the pool itself can be stuck.
                    Err(_) => held += usize::from(!hostile),
                }
            } else {
                wrong += usize::from(is_wrong(page, *content));
                *content = 0;
                guest.mark(page as u64..page as u64 + 1);
            }
        }
        if random & 63 == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    let left = (0..pages).filter(|&at| content[at] != 0 && is_wrong(first + at, content[at])).count();
    for at in 0..pages {
        guest.mark((first + at) as u64..(first + at) as u64 + 1);
        // Stuck where the pool was written to at random: what is there does not matter any more.
        let _ = guest.cancel((first + at) as u64..(first + at) as u64 + 1, || false);
    }
    (wrong + left, held)
}

/// Whether each word is what was written, or 0: the page was taken while it was being filled.
fn page_is_mixed_of_zeros(region: &Region, page: usize, seed: u64) -> bool {
    (0..super::WORDS).all(|word| [0, pattern(seed, word)].contains(&region.read(page, word)))
}

/// Writes into the pool behind its header as a guest could that is out for mischief; the last thing
/// that it does is to spoil the header.
fn fuzz(map: &SharedMap, stop: &AtomicBool) {
    let mut random = 0x1234_5678_9abc_def1u64;
    while !stop.load(Relaxed) {
        for _ in 0..1000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let offset = 4096 + (random >> 8) as usize % (map.len() - 4096) / 8 * 8;
            let word = map.atomic_u64(offset);
            match random & 3 {
                0 => word.store(random, SeqCst),
                1 => word.store(u64::MAX, SeqCst),
                2 => word.store(0, SeqCst),
                _ => drop(word.fetch_xor(random, SeqCst)),
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    (0..8).for_each(|field| map.atomic_u64(field * 8).store(random, SeqCst));
}
