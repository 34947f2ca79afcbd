//! What the daemon needs itself: memory, and calls.

use std::time::Duration;

use e2e::{Client, Daemon, eventually};

/// Pages of a client: 128 MiB.
const PAGES: u64 = 32_768;
/// Clients at a time.
const CLIENTS: u64 = 12;

/// Resident memory of the daemon in KiB, without pages of its store.
fn resident(daemon: &Daemon) -> u64 {
    kmem::procfs::smaps_rollup(Some(daemon.pid())).unwrap().anonymous
}

fn looked_at(daemon: &Daemon, client: &Client) -> Option<()> {
    (daemon.client(client.pid())?["pages_unshared"].as_u64()? + 16 >= PAGES).then_some(())
}

/// A client of which no page is equal to another.
fn unique(daemon: &Daemon) -> Client {
    let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "1", "7", "1"]);
    client.expect("ready");
    client
}

#[test]
fn what_is_known_of_clients_that_ended_goes_back_to_the_kernel_while_others_stay() {
    let daemon = Daemon::start();
    let stays = unique(&daemon);
    eventually("the first is looked at", Duration::from_secs(60), || looked_at(&daemon, &stays));
    let before = resident(&daemon);
    let mut most = before;
    for round in 0..3 {
        let clients: Vec<_> = (0..CLIENTS).map(|_| unique(&daemon)).collect();
        for client in &clients {
            eventually("they are looked at", Duration::from_secs(120), || looked_at(&daemon, client));
        }
        most = most.max(resident(&daemon));
        drop(clients);
        let began = std::time::Instant::now();
        let mut now = 0;
        eventually("a tenth of what they took is left, and 2 MiB", Duration::from_secs(60), || {
            now = resident(&daemon);
            println!("{round}: {before} KiB, {most}, and now {now}, after {:?}", began.elapsed());
            (now <= before + (most - before) / 10 + 2048).then_some(())
        });
    }
    assert!(looked_at(&daemon, &stays).is_some());
}

/// Calls by which the daemon has read something: `/proc/PID/io`.
fn reads(daemon: &Daemon) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/io", daemon.pid())).unwrap();
    text.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap().parse().unwrap()
}

/// Scans of all clients so far.
fn scans(daemon: &Daemon) -> u64 {
    let status = daemon.status();
    let clients = status["domains"].as_array().unwrap().iter().flat_map(|d| d["clients"].as_array().unwrap());
    clients.map(|client| client["full_scans"].as_u64().unwrap()).sum()
}

#[test]
fn of_clients_that_do_nothing_the_daemon_reads_little() {
    let daemon = Daemon::with_settings(&["--merge-period", "0.1"], "direct_io_seconds = 1\n");
    let mut clients: Vec<Client> = (0..32).map(|_| daemon.scenario(&["hold", "512", "1"])).collect();
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 512));
    let (scans_before, reads_before) = (scans(&daemon), reads(&daemon));
    // A status reads of every client, too: one is asked for seldom, however slow the machine is.
    let mut wait = Duration::from_secs(3);
    let scanned = eventually("each is scanned 30 times", Duration::from_secs(120), || {
        wait *= 2;
        std::thread::sleep(wait / 2);
        Some(scans(&daemon) - scans_before).filter(|&scanned| scanned >= 30 * clients.len() as u64)
    });
    let each = (reads(&daemon) - reads_before) as f64 / scanned as f64;
    println!("{each:.1} reads for each scan of a client");
    assert!(each < 8.0, "{each} reads for each scan of a client");
}
