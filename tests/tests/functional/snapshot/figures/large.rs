//! A large guest that writes to 1 % of its memory a second.

use super::*;

/// MiB of the guest; MiB that it has filled; MiB whose pages it writes to each second.
const LARGE: u32 = 8192;
const FILLED: u32 = 6144;
const WRITTEN: u32 = LARGE / 100;
/// Number of snapshots.
const SAVES: usize = 5;

#[test]
#[ignore = "measures"]
fn snapshot_figures_of_a_large_guest() {
    if !can_run() {
        return;
    }
    let guests = match e2e::recycler_guests() {
        Ok(guests) => guests,
        Err(why) => return skipped(&why),
    };
    let place = Place::new();
    let work = format!("WORK=write_{FILLED}_{WRITTEN}");
    let words = e2e::recycler_words(&guests[guests.len() - 1], LARGE, &work);
    let mut source = Guest::start(place.prepared(&words));
    eventually("its memory is filled", Duration::from_secs(900), || {
        source.rounds();
        source.console().iter().any(|line| line.contains("LOAD filled")).then_some(())
    });
    let mut pauses = Vec::new();
    for sample in 0..SAVES {
        let saved = place.save(source.pid(), &format!("s{sample}"));
        pauses.push(saved["pause_ms"].as_f64().unwrap());
        std::thread::sleep(Duration::from_secs(2));
    }
    let written = |line: &&String| line.contains("LOAD writes");
    println!("{:?}", source.console().iter().rfind(written));
    source.kill();
    let what = format!("pause of a guest of {LARGE} MiB that writes to {WRITTEN} MiB a second");
    figure(&what, median(pauses), "ms", Some(30.0));
}
