//! Clones with RAM of their own (`snapshot run --merge`), beside those that share the snapshot's.

use super::*;

/// Clones of a run.
const CLONES: usize = 8;
/// How long the number of merged pages must not grow.
const STILL: Duration = Duration::from_secs(10);

/// Waits until the daemon knows all.
fn wait_until_known(place: &Place, pids: &[i32]) {
    for &pid in pids {
        eventually("a clone is known", Duration::from_secs(120), || place.daemon.client(pid));
    }
}

/// Waits until no more is merged.
fn wait_until_merged(place: &Place, pids: &[i32]) {
    let (mut most, mut since) = (0, Instant::now());
    eventually("all is merged", Duration::from_secs(600), || {
        let clients = pids.iter().filter_map(|pid| place.daemon.client(*pid));
        let of = |client: &Value, name: &str| client[name].as_u64().unwrap_or(0);
        let now: u64 = clients.map(|client| of(&client, "pages_merged") + of(&client, "pages_zero")).sum();
        if now > most + most / 100 {
            (most, since) = (now, Instant::now());
        }
        (since.elapsed() > STILL).then_some(())
    });
}

#[test]
#[ignore = "measures"]
fn snapshot_figures_of_merged_clones() {
    let Some((place, mut source, _)) = source() else { return };
    wait_until_it_rests(&mut source);
    place.save(source.pid(), "rest");
    source.kill();
    let (mut plain, mut merged) = (Vec::new(), Vec::new());
    let (mut first, mut more) = (Vec::new(), Vec::new());
    for run in 0..RUNS {
        plain.push(ours_with(&place, CLONES, &format!("plain-{run}"), &["--rm"]).1 / CLONES as f64);
        merged.push(ours_with(&place, CLONES, &format!("merged-{run}"), &["--merge", "--rm"]).1 / CLONES as f64);
    }
    for run in 0..RUNS {
        let one = |name: &str| ours_with(&place, 1, &format!("{name}-{run}"), &["--merge", "--rm"]);
        let (clones, after) = one("first");
        first.push(after);
        more.push(one("more").1);
        drop(clones);
    }
    figure("merged: the first clone, for which the snapshot is read, answers after", median(first), "ms", None);
    figure("merged: one more answers after", median(more), "ms", None);
    figure(&format!("shared: each of {CLONES} at once answers after"), median(plain), "ms", None);
    figure(&format!("merged: each of {CLONES} at once answers after"), median(merged), "ms", None);
    let (clones, _) = ours_with(&place, CLONES, "plain", &["--rm"]);
    let pids = |clones: &Clones| clones.clones.iter().map(|clone| clone.pid).collect::<Vec<_>>();
    memory("shared: ", &pids(&clones), None);
    drop(clones);
    let begin = Instant::now();
    let (clones, _) = ours_with(&place, CLONES, "merged", &["--merge", "--rm"]);
    let pids = pids(&clones);
    wait_until_known(&place, &pids);
    figure(&format!("merged: the daemon knows {CLONES} after"), begin.elapsed().as_secs_f64(), "s", None);
    memory("at first: ", &pids, None);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pids[0])).unwrap();
    let mapped = maps.lines().filter(|line| line.contains("/memfd:pageone:snapshot")).count();
    figure("mappings of the snapshot in a clone", mapped as f64, "", None);
    wait_until_merged(&place, &pids);
    figure("and merged after", (begin.elapsed() - STILL).as_secs_f64(), "s", None);
    memory("merged: ", &pids, None);
}
