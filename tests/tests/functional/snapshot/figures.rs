//! `make bench-snapshots`: how long a guest stands while it is stored, how soon clones answer and
//! what they take, beside full copies, RAM in tmpfs and QEMU's own snapshots. Prints medians, each
//! with its bar.

mod compressed;
mod large;
mod memory;
mod merged;
mod rivals;

use std::time::Instant;

use checkpoint::Catalog;
use mpool::{Access, AlignedBuf, BLOCK, OpenOptions, Pool};

use super::*;

/// MiB of the guests.
const MIB: u32 = 512;
/// Seconds for which a guest works before it rests.
const WORK: u32 = 100;
/// Number of snapshots.
const SAMPLES: usize = 7;
/// Number of runs of clones, of us and of each rival.
const RUNS: usize = 5;
/// Clones of a run with more than one.
const CLONES: usize = 4;
/// Clones that are started at once.
const MANY: usize = 50;

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Prints a figure with its bar, if it has one.
fn figure(what: &str, value: f64, unit: &str, most: Option<f64>) {
    let bar = most
        .map_or(String::new(), |most| format!(" (bar {most:.2}, {})", if value <= most { "met" } else { "MISSED" }));
    println!("FIGURE {what}: {value:.2} {unit}{bar}");
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Asks a guest at its second serial port until it answers.
fn answer(socket: &Path) -> UnixStream {
    let begin = Instant::now();
    let stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) => assert!(begin.elapsed() < Duration::from_secs(60), "{}: {error}", socket.display()),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    writeln!(&stream, "hello").unwrap();
    let mut line = String::new();
    while !line.contains("PAGEONE-ANSWER hello") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the guest has ended");
    }
    stream
}

/// Words of a guest that works for a while, rests then, and answers at any time.
fn words(place: &Place, mib: u32) -> Option<Vec<String>> {
    let mut words = clones::guest_words_of(place, mib)?;
    let append = words.iter().position(|word| word == "-append").unwrap();
    words[append + 1] += &format!(" PAGEONE_WORK={WORK}");
    Some(words)
}

fn wait_until_it_rests(guest: &mut Guest) {
    eventually("it rests", Duration::from_secs(600), || {
        guest.rounds();
        guest.console().iter().any(|line| line.contains("PAGEONE-RESTS")).then_some(())
    });
}

/// CPU time of processes so far, those that they have waited for included; ms.
fn cpu_ms(pids: &[i32]) -> f64 {
    let one = |pid: &i32| {
        let stat = kmem::procfs::Stat::of(Some(*pid)).unwrap();
        (14..18).map(|number| stat.field(number).unwrap()).sum::<u64>() as f64 * 10.0
    };
    pids.iter().map(one).sum()
}

/// A process's proportional share of memory, MiB: of the guest's RAM, if it has one, and of all
/// else.
fn pss(pid: i32) -> (f64, f64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut ram, mut rest, mut is_ram, mut is_merged) = (0.0, 0.0, false, false);
    for line in text.lines() {
        let kib = |name: &str| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<f64>().ok();
        if let Some(size) = kib("Size:") {
            is_ram = is_merged || size == f64::from(MIB * 1024);
        } else if line.split(' ').nth(1).is_some_and(|permissions| permissions.len() == 4) {
            is_merged = line.contains(" rw-p ") && line.contains("/memfd:pageone:");
        }
        *if is_ram { &mut ram } else { &mut rest } += kib("Pss:").unwrap_or(0.0) / 1024.0;
    }
    (ram, rest)
}

/// Prints what guests take, on average.
fn memory(what: &str, pids: &[i32], most: Option<f64>) {
    let all = pids.iter().map(|pid| pss(*pid)).fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let count = pids.len() as f64;
    figure(&format!("{what}memory of a clone of {count}, PSS"), (all.0 + all.1) / count, "MiB", most);
    figure(&format!("{what}of it the guest's RAM"), all.0 / count, "MiB", None);
}

/// Starts clones of `rest`; gives them, and when all had answered, ms.
fn ours(place: &Place, count: usize) -> (Clones, f64) {
    ours_with(place, count, "rest", &[])
}

/// The same with options of the command, and the clones' files in `clones-FILES`.
fn ours_with(place: &Place, count: usize, files: &str, options: &[&str]) -> (Clones, f64) {
    let begin = Instant::now();
    let clones = place.clones_with("rest", files, count, options, &[]);
    clones.clones.iter().for_each(|clone| drop(answer(&clone.directory.join("answers"))));
    let after = ms(begin);
    (clones, after)
}

/// Bytes that differ between two snapshots, in whole pages.
fn changed(place: &Place, before: &str, after: &str) -> f64 {
    let options = OpenOptions { access: Access::Shared, ..OpenOptions::default() };
    let pool = Pool::open(&place.path("capacity"), options).unwrap();
    let catalog = Catalog::open(&pool).unwrap();
    let [before, after] = [before, after].map(|name| catalog.image(catalog.find(name).unwrap()).unwrap());
    let [mut a, mut b] = [(); 2].map(|()| AlignedBuf::zeroed(256 * BLOCK));
    let mut pages = 0;
    for first in (0..after.pages()).step_by(256) {
        before.read(first, &mut a).unwrap();
        after.read(first, &mut b).unwrap();
        pages += a.chunks(BLOCK).zip(b.chunks(BLOCK)).filter(|(a, b)| a != b).count();
    }
    (pages * BLOCK) as f64
}

/// Bytes of the medium that the pool takes.
fn used(place: &Place) -> f64 {
    use std::os::unix::fs::MetadataExt;
    let all = std::fs::read_dir(place.path("capacity")).unwrap().flatten();
    all.map(|entry| entry.metadata().unwrap().blocks() as f64 * 512.0).sum()
}

/// Stores a guest while it works, and once when it rests.
fn save(place: &Place, source: &mut Guest) {
    let (mut pauses, mut halts, mut ratios, mut stored) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut before = used(place);
    for sample in 0..SAMPLES {
        let name = format!("s{sample}");
        let saved = place.save(source.pid(), &name);
        pauses.push(saved["pause_ms"].as_f64().unwrap());
        halts.push(saved["phases"]["pause_halt"].as_f64().unwrap() * 1e3);
        let now = used(place);
        stored.push((now - before) / f64::from(1 << 20));
        if sample > 0 {
            let pages = changed(place, &format!("s{}", sample - 1), &name);
            let stream = saved["stream_bytes"].as_f64().unwrap();
            println!("changed: {pages} bytes of pages, a stream of {stream}; the pool took {} bytes", now - before);
            ratios.push((now - before) / (pages + stream));
        }
        before = now;
        std::thread::sleep(Duration::from_secs(1));
    }
    figure(&format!("pause of a working guest of {MIB} MiB"), median(pauses), "ms", Some(15.0));
    figure("of that, stop, disks and devices", median(halts), "ms", None);
    figure("first snapshot in the pool", stored[0], "MiB", None);
    figure("each later one", median(stored[1..].to_vec()), "MiB", None);
    figure("a later one in the pool, of what changed", median(ratios), "", Some(1.05));
    wait_until_it_rests(source);
    place.save(source.pid(), "rest");
}

/// Clones of the guest that rests: when they answer, beside others' ways; what they take.
fn clone_all(place: &Place, plain: &rivals::Plain) {
    let (mut first, mut later, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
    let mut others = rivals::WAYS.map(|_| (Vec::new(), Vec::new()));
    for _ in 0..RUNS {
        // Nothing is known of an earlier run.
        let _ = std::fs::remove_dir_all(place.path("clones-rest"));
        let (clones, after) = ours(place, 1);
        first.push(after);
        cpu.push(cpu_ms(&[clones.server.id() as i32, clones::servers(place)[0], clones.clones[0].pid]));
        drop(clones);
        later.push(ours(place, CLONES).1 / CLONES as f64);
        for (way, (first, later)) in rivals::WAYS.into_iter().zip(&mut others) {
            first.push(plain.clones(way, 1).1);
            later.push(plain.clones(way, CLONES).1 / CLONES as f64);
        }
    }
    let (first, later, cpu) = (median(first), median(later), median(cpu));
    figure("first clone answers after", first, "ms", Some(200.0));
    figure(&format!("each of {CLONES} at once"), later, "ms", Some(120.0));
    for (way, (one, more)) in rivals::WAYS.into_iter().zip(others) {
        let (one, more) = (median(one), median(more));
        figure(&format!("{way:?}: first clone answers after"), one, "ms", None);
        figure(&format!("{way:?}: each of {CLONES} at once"), more, "ms", None);
        if way == rivals::Way::Tmpfs {
            figure("ours, of that in tmpfs, each at once", later / more, "", Some(1.2));
        }
    }
    let (mut many, mut many_in_tmpfs) = (Vec::new(), Vec::new());
    for _ in 0..RUNS - 1 {
        many.push(ours(place, MANY).1);
        many_in_tmpfs.push(plain.clones(rivals::Way::Tmpfs, MANY).1);
    }
    let (clones, after) = ours(place, MANY);
    many.push(after);
    figure("CPU time of one clone until it answers", cpu, "ms", None);
    figure(&format!("{MANY} at once, until the last one answers"), median(many), "ms", Some(MANY as f64 * cpu));
    figure("in tmpfs", median(many_in_tmpfs), "ms", None);
    memory("", &clones.clones.iter().map(|clone| clone.pid).collect::<Vec<_>>(), Some(6.0));
    let beside = pss(clones.server.id() as i32).1 + pss(clones::servers(place)[0]).1;
    figure("memory of the command and the page server", beside, "MiB", None);
    drop(clones);
    for way in rivals::WAYS {
        let many = if way == rivals::Way::Tmpfs { MANY } else { CLONES };
        let (clones, after) = plain.clones(way, many);
        figure(&format!("{way:?}: {many} at once, until the last one answers"), after, "ms", None);
        memory(&format!("{way:?}: "), &clones.iter().map(rivals::Rival::pid).collect::<Vec<_>>(), None);
    }
}

/// A place, and a guest in it that works and answers; with its words. `None`: that cannot be here.
fn source() -> Option<(Place, Guest, Vec<String>)> {
    if !can_run() {
        return None;
    }
    let place = Place::new();
    let words = words(&place, MIB)?;
    let mut source = Guest::start(place.prepared(&words));
    source.pass_rounds(1);
    drop(answer(&place.path("answers")));
    Some((place, source, words))
}

#[test]
#[ignore = "measures"]
fn snapshot_figures() {
    let Some((place, mut source, words)) = source() else { return };
    save(&place, &mut source);
    source.kill();
    let plain = rivals::Plain::new(&words);
    clone_all(&place, &plain);
}
