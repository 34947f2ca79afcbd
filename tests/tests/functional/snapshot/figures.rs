//! How long a guest stands while it is stored, and how soon clones answer. Prints medians
//! (`make bench-snapshots`).

use std::time::Instant;

use super::*;

/// Number of snapshots, and of runs of clones.
const SAMPLES: usize = 7;
/// Clones of each run.
const CLONES: usize = 4;

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Asks a guest at its second serial port until it answers.
fn answer(socket: &Path) -> UnixStream {
    let stream = eventually("the port", Duration::from_secs(20), || UnixStream::connect(socket).ok());
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    writeln!(&stream, "hello").unwrap();
    let mut line = String::new();
    while !line.contains("PAGEONE-ANSWER hello") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the guest has ended");
    }
    stream
}

#[test]
#[ignore = "measures"]
fn snapshot_figures() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(mut source) = place.guest() else { return };
    answer(&place.path("answers"));
    let (mut pauses, mut stored, mut halts) = (Vec::new(), Vec::new(), Vec::new());
    for sample in 0..SAMPLES {
        let saved = place.save(source.pid(), &format!("s{sample}"));
        pauses.push(saved["pause_ms"].as_f64().unwrap());
        halts.push(saved["phases"]["pause_halt"].as_f64().unwrap() * 1e3);
        stored.push(saved["stored_bytes"].as_f64().unwrap() / f64::from(1 << 20));
        std::thread::sleep(Duration::from_secs(1));
    }
    source.rounds();
    source.kill();
    let (mut first, mut later) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let begin = Instant::now();
        let mut running = Vec::new();
        // One server for all: only the first one reads the pool.
        let clones = place.clones("s0", 1, &[]);
        answer(&clones.clones[0].directory.join("answers"));
        first.push(begin.elapsed().as_secs_f64() * 1e3);
        running.push(clones);
        drop(running);
        let begin = Instant::now();
        let clones = place.clones("s0", CLONES, &[]);
        for clone in &clones.clones {
            answer(&clone.directory.join("answers"));
        }
        later.push(begin.elapsed().as_secs_f64() * 1e3 / CLONES as f64);
        println!("clones ran after {:?} ms", clones.clones.iter().map(|clone| clone.ms).collect::<Vec<_>>());
    }
    // The first run that lasts long enough lists what it needs.
    let clones = place.clones("s0", 1, &[]);
    let list = || {
        std::fs::read_dir(place.path("clones-s0"))
            .ok()?
            .flatten()
            .find(|entry| entry.file_name().to_string_lossy().starts_with(".working-set"))
    };
    eventually("the list", Duration::from_secs(60), list);
    drop(clones);
    let listed = (0..5).map(|_| {
        let begin = Instant::now();
        let clones = place.clones("s0", 1, &[]);
        answer(&clones.clones[0].directory.join("answers"));
        begin.elapsed().as_secs_f64() * 1e3
    });
    println!("with a list of what the first run read, a clone answers after {:.0} ms", median(listed.collect()));
    println!(
        "guest of {MEMORY} MiB: pause {:.1} ms (of that stop, disks and devices {:.1}); first snapshot {:.1} MiB, later {:.2} MiB; \
         first clone answers {:.0} ms after the command's start; {CLONES} at once: {:.0} ms each",
        median(pauses),
        median(halts),
        stored[0],
        median(stored[1..].to_vec()),
        median(first),
        median(later)
    );
}
