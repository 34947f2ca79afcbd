//! Pages that merge: every byte stays, frames are shared and come back.

use std::time::Duration;

use e2e::{Client, Daemon, eventually, signal_process, skipped, stop_process};

#[test]
fn two_threads_write_while_their_pages_merge() {
    let daemon = Daemon::start();
    // On a slow machine 15 s are but a few merge periods, and pages are written to only after they
    // merged.
    let seconds = 15 * (1 + e2e::patience() / 4);
    eventually("merged pages were written to", Duration::from_secs(300), || {
        let mut client = daemon.scenario(&["writers", "65536", &seconds.to_string()]);
        client.expect("ready");
        client.tell("go");
        let longest = client.hear();
        client.expect("ok");
        let merged = daemon.client(client.pid()).unwrap();
        println!("{longest} µs; {merged}");
        // How many are merged at the end says little: a page is written to as soon as it is.
        (merged["pages_copied_total"].as_u64()? > 1000).then_some(())
    });
}

#[test]
fn two_clients_share_frames_and_leave_no_trace() {
    let daemon = Daemon::start();
    let mut one = daemon.scenario(&["hold", "8192", "1", "5"]);
    let mut two = daemon.scenario(&["hold", "8192", "1", "5"]);
    one.expect("ready");
    two.expect("ready");
    daemon.wait_merged(one.pid(), 8192);
    daemon.wait_merged(two.pid(), 8192);
    let status = daemon.status();
    assert_eq!(
        (status["pages_shared"].as_u64(), status["pages_sharing"].as_u64()),
        (Some(8192), Some(8192)),
        "{status}"
    );
    assert!(status["general_profit"].as_i64() > Some(8192 * 4096 / 2), "{status}");
    one.go();
    two.go();
    two.kill();
    one.go();
    assert_eq!(one.finish(), Some(0));
    eventually("frames and segments go with the last client", Duration::from_secs(10), || {
        let status = daemon.status();
        let empty = |domain: &serde_json::Value| domain["segments"] == 0 && domain["known_contents"] == 0;
        status["domains"].as_array()?.iter().all(empty).then_some(())
    });
}

#[test]
fn pages_filled_before_the_daemon_hears_of_their_discard_merge() {
    const PAGES: u64 = 2048;
    let daemon = Daemon::start();
    let mut clients = [(); 2].map(|()| daemon.scenario(&["poison", &PAGES.to_string(), "1"]));
    for client in &mut clients {
        client.expect("ready");
        client.tell("mark");
        client.expect("ok");
    }
    for _ in 0..5 {
        clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
        // When it goes on it scans at once, with a thousand reports still to hear.
        stop_process(daemon.pid());
        for page in (0..PAGES).step_by(2) {
            clients[0].tell(&format!("renew {page}"));
            clients[0].expect("ok");
        }
        signal_process(daemon.pid(), libc::SIGCONT);
    }
    for client in &mut clients {
        daemon.wait_merged(client.pid(), PAGES);
        client.tell("go");
        client.expect("ok, 0 lost");
    }
}

#[test]
fn pages_that_were_predicted_wrong_keep_their_bytes_and_the_others_merge() {
    let daemon = Daemon::start();
    let mut alike: Vec<Client> = (0..2).map(|_| daemon.scenario(&["hold", "8192", "1", "5"])).collect();
    alike.iter_mut().for_each(|client| client.expect("ready"));
    alike.iter().for_each(|client| daemon.wait_merged(client.pid(), 8192));
    // Predictions that hold for a while, each ended by a page that does not match.
    let mut other = daemon.scenario(&["hold", "8192", "1", "5", "100"]);
    other.expect("ready");
    daemon.wait_merged(other.pid(), 8192 - 81);
    // The pages that did not match are read in a later pass.
    let status = eventually("all is looked at", Duration::from_secs(20), || {
        daemon.client(other.pid()).filter(|status| status["pages_unshared"].as_u64() >= Some(81))
    });
    assert_eq!((&status["pages_merged"], &status["pages_unshared"]), (&(8192 - 81).into(), &81.into()), "{status}");
    other.go();
    alike.iter_mut().for_each(Client::go);
}

/// Frames come and go as fast as can be, shared between clients; one that is used again too early
/// would show as a wrong byte.
#[test]
fn frames_that_come_and_go_are_never_taken_from_their_users() {
    let seconds: u64 = std::env::var("PAGEONE_CHURN_SECONDS").map_or(10, |s| s.parse().unwrap());
    let mut daemon = Daemon::with(&["--merge-period", "0.05"]);
    let mut clients: Vec<Client> = (0..3).map(|_| daemon.scenario(&["churn", "8192", &seconds.to_string()])).collect();
    for client in &mut clients {
        client.expect("ready");
        client.tell("go");
    }
    for second in 0..seconds {
        // Pauses leave batches half done and reports unread.
        let stopped = if second % 2 == 0 { daemon.pid() } else { clients[1].pid() };
        signal_process(stopped, libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(100));
        signal_process(stopped, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(900));
    }
    for client in &mut clients {
        client.hear();
        client.expect("ok");
    }
    let merged = daemon.status()["pages_merged_total"].as_u64().unwrap();
    println!("{merged} pages were merged in {seconds} s");
    assert!(merged > 1000, "little was merged: {merged} pages");
    drop(clients);
    eventually("the store is empty", Duration::from_secs(30), || {
        daemon.status()["domains"].as_array()?.iter().all(|d| d["segments"] == 0).then_some(())
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn what_was_spliced_out_of_merged_memory_keeps_its_bytes() {
    const PAGES: usize = 256;
    let daemon = Daemon::with(&["--merge-period", "0.05"]);
    // Another client's frames keep the segment: without any it would be closed with its slots.
    let mut anchor = daemon.scenario(&["hold", "512", "2", "9"]);
    anchor.expect("ready");
    daemon.wait_merged(anchor.pid(), 512);
    let anchored = daemon.status()["pages_shared"].clone();
    for (base, exits) in [(1, false), (2, true)] {
        let mut client = daemon.scenario(&["spliced", &PAGES.to_string(), &base.to_string()]);
        client.expect("ready");
        daemon.wait_merged(client.pid(), PAGES as u64);
        client.tell("splice");
        let numbers: Vec<i32> = client.hear().split(' ').map(|number| number.parse().unwrap()).collect();
        let [before, after] = [0, 1].map(|at| client.descriptor(numbers[at]));
        let read = |pipe| {
            let mut bytes = vec![0; PAGES * kmem::PAGE_SIZE];
            std::io::Read::read_exact(&mut std::fs::File::from(pipe), &mut bytes).unwrap();
            bytes
        };
        let right = read(before);
        if exits {
            client.kill();
        } else {
            client.tell("unmap");
            client.expect("ok");
        }
        eventually("its frames have no users", Duration::from_secs(20), || {
            (daemon.status()["pages_shared"] == anchored).then_some(())
        });
        // Others merge other contents meanwhile, several times as much.
        let mut others: Vec<Client> = (0..2).map(|_| daemon.scenario(&["churn", "8192", "4"])).collect();
        others.iter_mut().for_each(|other| other.expect("ready"));
        others.iter_mut().for_each(|other| other.tell("go"));
        for other in &mut others {
            other.hear();
            other.expect("ok");
        }
        let left = read(after);
        let pages = || right.chunks(kmem::PAGE_SIZE).zip(left.chunks(kmem::PAGE_SIZE));
        let wrong = pages().filter(|(right, left)| right != left).count();
        assert_eq!(wrong, 0, "of {PAGES} pages in a pipe, other bytes after the client's end: {exits}");
    }
    anchor.go();
}

#[test]
fn a_store_is_compacted_under_writers() {
    const PAGES: u64 = 40_960;
    let daemon = Daemon::start();
    let mut writers = daemon.scenario(&["writers", "16384", "30"]);
    writers.expect("ready");
    writers.tell("go");
    let mut clients = [(); 2].map(|()| daemon.scenario(&["thin", &PAGES.to_string(), "16"]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    // Of every 16 frames 15 lose their users: 150 MiB are dead.
    clients.iter_mut().for_each(|client| client.tell("thin"));
    clients.iter_mut().for_each(|client| client.expect("ok"));
    let status = eventually("the store is compacted", Duration::from_secs(60), || {
        let status = daemon.status();
        let domain = &status["domains"][0];
        let (shared, dead) = (domain["pages_shared"].as_u64()?, domain["pages_dead"].as_u64()?);
        (domain["pages_compacted_total"].as_u64()? > 0 && dead <= shared / 4 + 16_384 + 1024).then_some(status)
    });
    println!("{}", status["domains"][0]);
    clients.iter_mut().for_each(Client::go);
    writers.hear();
    writers.expect("ok");
    // Those that are being moved at the moment count as neither.
    eventually("what was moved is merged", Duration::from_secs(20), || {
        let merged = clients.iter().map(|c| daemon.client(c.pid()).unwrap()["pages_merged"].as_u64().unwrap());
        (merged.sum::<u64>() >= 2 * PAGES / 16).then_some(())
    });
}

#[test]
fn zero_pages_become_untouched_memory() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["zeros", "4096"]);
    client.expect("ready");
    eventually("all zero pages are given back", Duration::from_secs(20), || {
        (daemon.client(client.pid())?["pages_zero"] == 4096).then_some(())
    });
    // What it had before is not known: merging may have begun.
    let after = kmem::procfs::smaps_rollup(Some(client.pid())).unwrap().anonymous;
    assert!(after < 8 << 10, "of 16 MiB of zeros and the program {after} KiB are there");
    client.go();
}

/// KiB of huge pages in memory for which a process has asked for them. Where the kernel gives them
/// to all memory, a heap may have some, too.
fn huge_kib(pid: i32) -> u64 {
    e2e::smaps_kib(pid, "AnonHugePages", "hg")
}

#[test]
fn a_huge_page_is_split_only_when_enough_of_it_merges() {
    // On a slow machine, too, nothing is merged before it is known how much is huge.
    let daemon = Daemon::with_config(&["--merge-period", "1"], "huge_page_share = 85");
    let mut clients = [(); 2].map(|()| daemon.scenario_with(&["--huge-pages", "keep"], &["huge", "10", "90"], &[]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    let before = clients.each_ref().map(|client| huge_kib(client.pid()));
    if before.iter().any(|&kib| kib < 4096) {
        return skipped(
            "the kernel gave no huge pages; it does with `madvise` in /sys/kernel/mm/transparent_hugepage/enabled, where memory is free",
        );
    }
    // Of the second huge page of each 461 pages have duplicates, of the first 52.
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 461));
    eventually("what is left in huge pages is known", Duration::from_secs(20), || {
        let known = clients.iter().all(|client| daemon.client(client.pid()).unwrap()["pages_kept_huge"] == 52);
        known.then_some(())
    });
    std::thread::sleep(Duration::from_secs(3));
    for (client, before) in clients.iter().zip(before) {
        assert_eq!(daemon.client(client.pid()).unwrap()["pages_merged"], 461);
        assert_eq!(huge_kib(client.pid()), before - 2048, "the first stays whole");
    }
    // A write takes it apart in any case: then nothing is left to keep.
    clients.iter_mut().for_each(|client| client.tell("write"));
    clients.iter_mut().for_each(|client| client.expect("ok"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 461 + 52));
    clients.iter_mut().for_each(Client::go);
}

#[test]
fn what_a_new_client_shows_before_its_holders_come_back_after_a_restart_is_merged_with_theirs() {
    let mut daemon = Daemon::start();
    let mut holders = [(); 2].map(|()| daemon.scenario(&["hold", "4096", "1", "6"]));
    holders.iter_mut().for_each(|client| client.expect("ready"));
    holders.iter().for_each(|client| daemon.wait_merged(client.pid(), 4096));
    holders.iter().for_each(|client| stop_process(client.pid()));
    daemon.kill();
    daemon.restart();
    let mut late = daemon.scenario(&["hold", "4096", "1", "6"]);
    late.expect("ready");
    eventually("the new client's pages are read", Duration::from_secs(60), || {
        (daemon.client(late.pid())?["pages_unshared"] == 4096).then_some(())
    });
    holders.iter().for_each(|client| signal_process(client.pid(), libc::SIGCONT));
    daemon.wait_merged(late.pid(), 4096);
    assert_eq!(daemon.status()["domains"][0]["pages_shared"], 4096, "in the frames that there were");
    late.go();
    holders.iter_mut().for_each(Client::go);
}

/// `make test-kernels` runs this in guests with two nodes.
#[test]
fn pages_of_two_numa_nodes_share_nothing_if_so_configured() {
    if kmem::numa::nodes() < 2 {
        return skipped("this machine has one NUMA node; `make test-kernels` makes guests with two");
    }
    let mut daemon = Daemon::with_config(&["--merge-period", "0.1"], "merge_across_nodes = false");
    let start = |daemon: &Daemon, node: &str| {
        let mut client = daemon.scenario_with(&[], &["hold", "4096", "1", "6"], &[("PAGEONE_TEST_NODE", node)]);
        client.expect("ready");
        client
    };
    let (mut zero, mut one) = (start(&daemon, "0"), start(&daemon, "1"));
    eventually("both are looked at", Duration::from_secs(60), || {
        let looked = |pid| Some(daemon.client(pid)?["pages_unshared"] == 4096);
        (looked(zero.pid())? && looked(one.pid())?).then_some(())
    });
    assert_eq!(daemon.status()["pages_shared"], 0, "the same content on two nodes is not shared");
    let mut other = start(&daemon, "1");
    daemon.wait_merged(other.pid(), 4096);
    daemon.wait_merged(one.pid(), 4096);
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", daemon.pid())).unwrap();
    let store: Vec<&str> = maps.lines().filter(|line| line.contains("memfd:pageone:uid-")).collect();
    assert!(!store.is_empty() && store.iter().all(|line| line.contains(" N1=") && !line.contains(" N0=")), "{store:?}");
    // The successor knows where its predecessor's frames lie.
    daemon.kill();
    daemon.restart();
    let mut late = start(&daemon, "1");
    daemon.wait_merged(late.pid(), 4096);
    eventually("the other node's pages are looked at again", Duration::from_secs(60), || {
        (daemon.client(zero.pid())?["pages_unshared"] == 4096).then_some(())
    });
    [&mut zero, &mut one, &mut other, &mut late].into_iter().for_each(Client::go);
}
