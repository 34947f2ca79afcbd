//! What compressing snapshots saves, and what it costs to compress and to read them.

use super::*;

/// Snapshots while the guest works.
const TAKEN: usize = 4;
/// Pages that are read alone.
const READ: usize = 4000;

fn open(place: &Place, access: Access) -> Pool {
    Pool::open(&place.path("capacity"), OpenOptions { access, ..OpenOptions::default() }).unwrap()
}

/// Reads pages here and there, each alone, and runs of 32; prints what one takes.
fn reading(place: &Place, what: &str) {
    let pool = open(place, Access::Shared);
    let catalog = Catalog::open(&pool).unwrap();
    let image = catalog.image(catalog.find("rest").unwrap()).unwrap();
    let filled: Vec<u64> = image.filled().collect();
    for (pages, name) in [(1, "a page alone"), (32, "32 pages at once")] {
        let mut bytes = AlignedBuf::zeroed(pages * BLOCK);
        let mut all = Vec::new();
        for number in 0..READ / pages {
            let first = filled[number * 7_919 % filled.len()];
            let begin = Instant::now();
            image.read(first, &mut bytes).unwrap();
            all.push(ms(begin) * 1e3);
        }
        figure(&format!("{what}: {name} is read in"), median(all), "us", None);
    }
}

/// Clones of the guest that rests, from each of two pools in turn: what the host does meanwhile
/// hits both.
fn answering(places: [(&str, &Place); 2]) {
    let mut all = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    for _ in 0..RUNS {
        for ((_, place), (first, later)) in places.iter().zip(&mut all) {
            let _ = std::fs::remove_dir_all(place.path("clones-rest"));
            first.push(ours(place, 1).1);
            later.push(ours(place, CLONES).1 / CLONES as f64);
        }
    }
    for ((what, _), (first, later)) in places.iter().zip(all) {
        figure(&format!("{what}: first clone answers after"), median(first), "ms", None);
        figure(&format!("{what}: each of {CLONES} at once"), median(later), "ms", None);
    }
}

/// Compresses what these many checkpoints do not have.
fn compress(place: &Place, newest: usize) {
    let before = used(place);
    let (begin, cpu) = (Instant::now(), cpu_ms(&[std::process::id() as i32]));
    let done = Catalog::open(&open(place, Access::Exclusive)).unwrap().repack(Some(newest)).unwrap();
    let (seconds, cpu) = (begin.elapsed().as_secs_f64(), cpu_ms(&[std::process::id() as i32]) - cpu);
    let (mib, gib) = (f64::from(1 << 20), f64::from(1 << 30));
    println!("all but the newest {newest}: {done:?}, {seconds:.2} s");
    let bytes = (done.compressed * BLOCK as u64) as f64;
    figure(&format!("pool before, all but the newest {newest}"), before / mib, "MiB", None);
    figure("pool after", used(place) / mib, "MiB", None);
    if bytes > 0.0 {
        figure("compressed pages", bytes / mib, "MiB", None);
        figure("of that on the medium", done.compressed_bytes as f64 / bytes * 100.0, "%", None);
        figure("CPU time of repacking a GiB compressed", cpu / 1e3 / (bytes / gib), "s", None);
    }
}

#[test]
#[ignore = "measures"]
fn compressed_snapshot_figures() {
    let Some((place, mut source, _)) = source() else { return };
    for sample in 0..TAKEN {
        place.save(source.pid(), &format!("s{sample}"));
        source.pass_rounds(1);
    }
    wait_until_it_rests(&mut source);
    place.save(source.pid(), "rest");
    source.kill();
    let (plain, tar) = (Place::new(), place.path("rest.tar").display().to_string());
    place.ok(&["snapshot", "export", "store", "rest", "-o", &tar]);
    plain.ok(&["snapshot", "import", "store", &tar]);
    reading(&place, "plain");
    compress(&place, 1);
    reading(&place, "all but the newest");
    compress(&place, 0);
    reading(&place, "compressed");
    answering([("plain", &plain), ("compressed", &place)]);
}
