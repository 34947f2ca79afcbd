use super::process::parse_process_stat;
use super::*;
use crate::testing::{Child, forking, is_root};

#[test]
fn reads_statistics_and_does_without() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(Ksm::at(root.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
    for (name, text) in [("run", "1\n"), ("pages_shared", "12\n"), ("general_profit", "-4096\n")] {
        fs::write(root.path().join(name), text).unwrap();
    }
    let ksm = Ksm::at(root.path()).unwrap();
    let expected = Stats { pages_shared: Some(12), general_profit: Some(-4096), ..Stats::default() };
    assert_eq!(ksm.stats().unwrap(), expected);
    assert_eq!(expected.values().collect::<Vec<_>>(), [("pages_shared", 12), ("general_profit", -4096)]);
    fs::write(root.path().join("pages_shared"), "many").unwrap();
    assert_eq!(ksm.stats().unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(ksm.run().unwrap(), 1);
    ksm.set_run(2).unwrap();
    assert_eq!(ksm.run().unwrap(), 2);
}

#[test]
fn the_advisor_is_the_word_in_brackets() {
    assert_eq!(selected("[none] scan-time\n"), "none");
    assert_eq!(selected("none [scan-time]\n"), "scan-time");
    assert_eq!(selected("20\n"), "20");
}

#[test]
fn a_snapshot_puts_back_what_changed() {
    let root = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
    let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap();
    write("run", "0\n");
    write("pages_to_scan", "100\n");
    write("advisor_mode", "none [scan-time]\n");
    write("sleep_millisecs", "20\n");
    let ksm = Ksm::at(root.path()).unwrap();
    let snapshot = Snapshot::of(&ksm).unwrap();
    ksm.set_run(1).unwrap();
    ksm.set_pages_to_scan(5).unwrap();
    write("advisor_mode", "[none] scan-time\n");
    snapshot.restore().unwrap();
    assert_eq!(
        (read("run").as_str(), read("pages_to_scan").as_str(), read("advisor_mode").as_str()),
        ("0", "100", "scan-time")
    );
    assert_eq!(read("sleep_millisecs"), "20\n", "what did not change is not written");

    // One failure does not keep the rest from being put back, and names its file.
    ksm.set_run(1).unwrap();
    fs::remove_file(root.path().join("sleep_millisecs")).unwrap();
    fs::create_dir(root.path().join("sleep_millisecs")).unwrap();
    let error = snapshot.restore().unwrap_err();
    assert!(error.to_string().contains("sleep_millisecs"), "{error}");
    assert_eq!(read("run"), "0");
}

#[test]
fn this_systems_settings_are_put_back() {
    let Ok(ksm) = Ksm::open() else {
        println!("SKIPPED: this kernel has no KSM");
        return;
    };
    let stats = ksm.stats().unwrap();
    assert!(stats.pages_shared.is_some() && stats.full_scans.is_some());
    let before = ksm.sleep_millisecs().unwrap();
    let snapshot = Snapshot::take().unwrap();
    if let Err(error) = ksm.set_sleep_millisecs(before + 1) {
        println!("SKIPPED: KSM's settings cannot be changed: {error}");
        return;
    }
    let changed = ksm.sleep_millisecs().unwrap();
    snapshot.restore().unwrap();
    assert_eq!((changed, ksm.sleep_millisecs().unwrap()), (before + 1, before));
}

#[test]
fn profit_is_the_kernels_or_the_same_sum() {
    let stats = Stats { pages_shared: Some(1), pages_sharing: Some(3), pages_volatile: Some(6), ..Stats::default() };
    assert_eq!((stats.candidates(), stats.profit()), (10, 3 * 4096 - 640));
    assert_eq!(Stats { general_profit: Some(-5), ..stats }.profit(), -5);
}

#[test]
fn the_kernels_thread_has_a_cpu_time() {
    match Ksmd::find().unwrap() {
        Some(ksmd) => {
            let first = ksmd.cpu_time().unwrap();
            assert!(ksmd.cpu_time().unwrap() >= first);
        }
        None => assert!(Ksm::open().is_err() || !is_root(), "KSM is there, so its thread is"),
    }
}

#[test]
fn a_snapshot_lists_what_it_holds() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("run"), "1\n").unwrap();
    fs::write(root.path().join("advisor_mode"), "none [scan-time]\n").unwrap();
    let snapshot = Snapshot::of(&Ksm::at(root.path()).unwrap()).unwrap();
    assert_eq!(snapshot.values().collect::<Vec<_>>(), [("advisor_mode", "scan-time"), ("run", "1")]);
}

#[test]
fn parses_process_stat() {
    let text = "ksm_rmap_items 7\nksm_zero_pages 3\nksm_merging_pages 2\nksm_process_profit -448\nksm_merge_any: no\nksm_mergeable: yes\n";
    let expected = ProcessStat {
        rmap_items: Some(7),
        zero_pages: Some(3),
        merging_pages: Some(2),
        process_profit: Some(-448),
        merge_any: Some(false),
        mergeable: Some(true),
    };
    assert_eq!(parse_process_stat(text), expected);
    match process_stat(std::process::id() as i32) {
        Ok(stat) => assert!(stat.rmap_items.is_some()),
        Err(error) => println!("SKIPPED: {error}"),
    }
}

#[test]
fn merging_is_switched_for_the_whole_process() {
    let _forking = forking();
    let merges = process::merges_all_memory;
    if !is_root() || merges().is_err() {
        println!("SKIPPED: needs root and Linux 6.4 with KSM");
        return;
    }
    let child = Child::fork(|| {
        u8::from(merges().is_ok_and(|on| !on) && merge_all_memory().is_ok() && merges().is_ok_and(|on| on))
    });
    assert_eq!(child.code(), 1);
}
