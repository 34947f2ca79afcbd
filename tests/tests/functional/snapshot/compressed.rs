//! Snapshots whose pages were compressed (`pageone pool repack --compress`), in a pool that is
//! encrypted.

use super::*;

#[test]
fn clones_of_a_compressed_snapshot_check_their_files_and_it_is_exported_as_it_was() {
    if !can_run() {
        return;
    }
    let place = Place::with_pool(true);
    let Some(mut source) = place.guest() else { return };
    place.save(source.pid(), "one");
    source.pass_rounds(1);
    place.save(source.pid(), "two");
    source.kill();
    let file = |name: &str| place.path(name).display().to_string();
    place.ok(&["snapshot", "export", "store", "one", "-o", &file("before")]);
    // The newest one has nearly all of these pages.
    println!("{}", place.ok(&["pool", "repack", "store", "--compress"]));
    let done = place.ok(&["pool", "repack", "store", "--compress=0"]);
    println!("{done}{}", place.ok(&["pool", "du", "store"]));
    let usage: Value = serde_json::from_str(&place.ok(&["pool", "du", "store", "--json"])).unwrap();
    let bytes = |name: &str| usage[name].as_u64().unwrap();
    assert!(done.contains(" compressed to "), "{done}");
    assert!(bytes("compressed_bytes") > 16 << 20, "{usage}");
    assert!(bytes("compressed_to_bytes") * 10 < bytes("compressed_bytes") * 9, "{usage}");
    place.ok(&["pool", "check", "store"]);
    place.ok(&["snapshot", "export", "store", "one", "-o", &file("after")]);
    assert!(std::fs::read(file("before")).unwrap() == std::fs::read(file("after")).unwrap(), "other bytes");
    let both = place.clones("one", 2, &[]);
    both.clones.iter().for_each(|clone| clone.pass_rounds(1));
    // The next server knows by the lease alone that they are compressed.
    place.ok(&["snapshot", "rm", "store", "one"]);
    place.ok(&["pool", "repack", "store", "--compress"]);
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    clones::kill_servers(&place, 1);
    let before: Vec<usize> = both.clones.iter().map(OneClone::rounds).collect();
    both.clones.iter().zip(before).for_each(|(clone, before)| clone.pass_rounds(before + 2));
    drop(both);
    let two = place.clones("two", 2, &[]);
    two.clones[0].pass_rounds(1);
    let merged = place.clones_with("two", "merged", 2, &["--merge"], &[]);
    merged.clones.iter().for_each(|clone| clone.pass_rounds(1));
}
