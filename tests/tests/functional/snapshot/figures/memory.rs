//! What a clone's process takes, by kind of memory, under whichever accelerator the tests use.
//! Where tests may set the kernel's switches (`PAGEONE_TEST_SYSCTL=1`), also with the kernel's KSM
//! over all of it.

use kmem::ksm::Snapshot;

use super::*;

/// Clones on a slow machine.
const FEW: usize = 20;
/// Passes of KSM over all memory: a page is merged in the second one after it has not changed.
const SCANS: u64 = 4;

/// Kinds of memory; see [`kind`].
const KINDS: [&str; 7] = [
    "the guest's RAM",
    "QEMU's copy of the guest's kernel (-kernel)",
    "translated code",
    "heap",
    "programs and libraries, relocated or written",
    "programs and libraries, shared",
    "stacks and all else",
];

/// The kind of a mapping: an index of [`KINDS`]. `kernel`: KiB of the file of `-kernel`.
fn kind(permissions: &str, name: &str, size: f64, kernel: f64) -> usize {
    match name {
        "/ram" => 0,
        "[heap]" => 3,
        "" if permissions.contains('x') => 2,
        // The file, but for its first sectors; the kernel joins small neighbours with it.
        "" if (kernel - 64.0..kernel * 1.2).contains(&size) => 1,
        name if name.starts_with('/') => 4,
        _ => 6,
    }
}

/// A process's proportional share of memory by kind, MiB.
fn kinds(pid: i32, kernel: f64) -> [f64; 7] {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut sums, mut header, mut at, mut pss) = ([0.0; 7], ("", ""), 6, 0.0);
    for line in text.lines() {
        let kib = |name: &str| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<f64>().ok();
        if let Some(size) = kib("Size:") {
            at = kind(header.0, header.1, size, kernel);
        } else if let Some(share) = kib("Pss:") {
            pss = share;
        } else if let Some(own) = kib("Anonymous:") {
            // Of a file's mapping the rest is the file's.
            let own = if at == 4 { f64::min(own, pss) } else { pss };
            sums[at] += own / 1024.0;
            sums[5] += (pss - own) / 1024.0;
        } else if !line.contains(" kB") && !line.starts_with("VmFlags") && !line.starts_with("THP") {
            let mut words = line.split_ascii_whitespace();
            header = (words.nth(1).unwrap_or_default(), words.nth(3).unwrap_or_default());
        }
    }
    sums
}

/// Prints what clones take.
fn print(what: &str, clones: &Clones, kernel: f64) {
    let mut sums = [0.0; 7];
    for clone in &clones.clones {
        kinds(clone.pid, kernel).iter().zip(&mut sums).for_each(|(one, sum)| *sum += one / clones.clones.len() as f64);
    }
    figure(&format!("{what}: memory of a clone of {}, PSS", clones.clones.len()), sums.iter().sum(), "MiB", Some(6.0));
    figure(
        &format!("{what}: the same without the copy of the kernel"),
        sums.iter().sum::<f64>() - sums[1],
        "MiB",
        None,
    );
    for (name, sum) in KINDS.iter().zip(sums) {
        figure(&format!("{what}: {name}"), sum, "MiB", None);
    }
}

/// Has KSM pass over all memory that it may merge.
fn scan() {
    let set = |name: &str, value: &str| std::fs::write(format!("/sys/kernel/mm/ksm/{name}"), value).unwrap();
    let scans = || {
        let text = std::fs::read_to_string("/sys/kernel/mm/ksm/full_scans").unwrap();
        text.trim().parse::<u64>().unwrap()
    };
    set("pages_to_scan", "20000");
    set("sleep_millisecs", "20");
    set("run", "1");
    let end = scans() + SCANS;
    eventually("KSM has passed over all", Duration::from_secs(300), || (scans() >= end).then_some(()));
}

#[test]
#[ignore = "measures"]
fn snapshot_figures_of_a_clones_memory() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut words) = clones::guest_words(&place) else { return };
    let value = |name: &str| words.iter().position(|word| word == name).unwrap() + 1;
    let (append, kernel) = (value("-append"), value("-kernel"));
    let kernel = std::fs::metadata(&words[kernel]).unwrap().len() as f64 / 1024.0;
    words[append] += " PAGEONE_WORK=1";
    let mut source = Guest::start(place.prepared(&words));
    wait_until_it_rests(&mut source);
    place.save(source.pid(), "rest");
    source.kill();
    // On a slow machine QEMU would not answer in time.
    let count = if e2e::patience() > 1 { FEW } else { MANY };
    print("as they are", &ours(&place, count).0, kernel);
    if std::env::var("PAGEONE_TEST_SYSCTL").is_ok_and(|allowed| allowed == "1") {
        let before = Snapshot::take().unwrap();
        let (clones, _) = ours_with(&place, count, "ksm", &["--rm", "--ksm"]);
        scan();
        print("with KSM", &clones, kernel);
        drop(clones);
        before.restore().unwrap();
    } else {
        skipped("KSM over clones: tests may not set the kernel's switches here (PAGEONE_TEST_SYSCTL)");
    }
}
