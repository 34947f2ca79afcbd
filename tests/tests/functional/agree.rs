//! Every metric agrees with what `/proc` and sysfs say at the same moment, within 1 %.
//!
//! A scrape stands between two looks at the kernel's files. Its value must lie between the two,
//! with 1 % on each side. Every metric of the table is either compared here, or listed with the
//! reason why nothing else knows it: one that is new fails the test until somebody has decided.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use control::{METRICS, Scope};
use e2e::{Client, Daemon, eventually};

/// Pages of a client; a part is zero pages, and a part is its own.
const PAGES: u64 = 4096;
const PAGE: f64 = 4096.0;

/// What is looked up: by the name and the scope of a metric, summed over clients or stores.
type Facts = BTreeMap<(&'static str, &'static str), f64>;

/// Metrics that are not compared: by scope, name, and why.
const ALONE: &[(&str, &str, &str)] = &[
    ("host", "merge_period_seconds", "a setting"),
    ("host", "scans_total", "the daemon counts its own work"),
    ("host", "pages_merged_total", "history: the kernel keeps none"),
    ("host", "pages_recycled_total", "needs a guest that marks: recycling.rs compares it with QEMU's memory"),
    ("host", "reclaim_period_seconds", "a setting"),
    ("host", "pages_recycled", "needs a guest that marks: recycling.rs"),
    ("host", "pages_unshared", "equality is known to the daemon alone"),
    ("host", "pages_volatile", "when a page changed is known to the daemon alone"),
    ("host", "general_profit", "a sum of others: its parts are compared"),
    ("host", "unmerge_bytes_per_second", "history: the kernel keeps none"),
    ("host", "unmerge_headroom_seconds", "from the former"),
    ("host", "headroom_is_short", "a decision: headroom.rs"),
    ("host", "frames_doubted_total", "what went wrong is known to the daemon alone"),
    ("governor", "target_scan_time_seconds", "a setting"),
    ("governor", "scan_time_seconds", "the daemon times its own work"),
    ("governor", "scan_pages", "the daemon counts its own work"),
    ("governor", "scan_cpu_seconds", "of one scan: the sums are compared"),
    ("governor", "pages_due", "the daemon's plan"),
    ("governor", "pages_per_second", "the daemon's plan"),
    ("governor", "cpu_percent", "over a window of its own: the sums are compared"),
    ("governor", "max_cpu_percent", "a setting"),
    ("governor", "memory_is_short", "a decision"),
    ("domain", "pages_recycled", "needs a guest that marks: recycling.rs"),
    ("domain", "pages_zero", "the host's is compared, and is its sum"),
    ("domain", "pages_unshared", "equality is known to the daemon alone"),
    ("domain", "pages_volatile", "when a page changed is known to the daemon alone"),
    ("domain", "general_profit", "a sum of others: its parts are compared"),
    ("domain", "frames_doubted_total", "what went wrong is known to the daemon alone"),
    ("domain", "pages_pinned", "the daemon's count of unknown mappings"),
    ("domain", "pages_dead", "the daemon's use of its store"),
    ("domain", "slots_free", "the daemon's use of its store"),
    ("domain", "slots_quarantined", "the daemon's use of its store"),
    ("domain", "pages_compacted_total", "the daemon counts its own work"),
    ("domain", "known_contents", "the daemon's index"),
    ("client", "regions", "of which mappings the agent makes regions is its own division"),
    ("client", "pages_recycled", "needs a guest that marks: recycling.rs"),
    ("client", "pages_unshared", "equality is known to the daemon alone"),
    ("client", "pages_volatile", "when a page changed is known to the daemon alone"),
    ("client", "general_profit", "a sum of others: its parts are compared"),
    ("client", "pages_kept_huge", "what could be merged is known to the daemon alone"),
    ("client", "pages_pending", "the daemon's batches"),
    ("client", "pages_copied_total", "history: the kernel keeps none"),
    ("client", "pages_discarded_total", "history: the kernel keeps none; pausing.rs compares what a guest frees"),
    ("client", "pages_differed_total", "history: the kernel keeps none"),
    ("client", "pages_unreadable_total", "history: the kernel keeps none"),
    ("client", "pages_retained_total", "history: the kernel keeps none"),
    ("client", "full_scans", "the daemon counts its own work"),
    ("client", "max_map_count_binds", "a decision: merging.rs of the hazards"),
    ("client", "dirty_pages_per_second", "history: the kernel keeps none; dirty.rs compares what is written"),
    ("client", "window_max_us", "the agent times its own work"),
    ("recycler", "pages_recycled_total", "needs a guest that marks: recycling.rs"),
    ("recycler", "reclaim_period_seconds", "a setting"),
    ("recycler", "managed_bytes", "needs a guest that marks: recycling.rs"),
    ("recycler", "pool_bytes", "needs a guest that marks: recycling.rs"),
    ("recycler", "pages_recycled_per_second", "needs a guest that marks: recycling.rs"),
    ("recycler", "runs_total", "needs a guest that marks: recycling.rs"),
    ("recycler", "pages_lost_total", "needs a guest that marks: recycling.rs"),
    ("recycler", "sweeps_total", "needs a guest that marks: recycling.rs"),
    ("recycler", "sweep_seconds", "needs a guest that marks: recycling.rs"),
    ("recycler", "claim_max_us", "needs a guest that marks: recycling.rs"),
    ("domain", "pages_shared", "the host's is compared, and is its sum"),
    ("domain", "pages_sharing", "the host's is compared, and is its sum"),
    ("domain", "store_bytes", "the host's is compared, and is its sum"),
    ("domain", "frame_bytes", "needs the module: module/alone.rs"),
    ("host", "frame_bytes", "needs the module: module/alone.rs"),
    ("client", "agent_cpu_seconds", "the host's is compared, and is its sum"),
    ("client", "pages_zero", "the host's is compared, and is its sum"),
];

/// The sample of each metric that is compared: the text before the labels, and a label of it.
const SAMPLES: &[(&str, &str, &str, &str)] = &[
    ("host", "uptime_seconds", "pageone_uptime_seconds", ""),
    ("host", "daemon_cpu_seconds", "pageone_cpu_seconds_total", "part=\"daemon\""),
    ("host", "agent_cpu_seconds", "pageone_cpu_seconds_total", "part=\"agent\""),
    ("host", "memory_total_bytes", "pageone_memory_total_bytes", ""),
    ("host", "memory_available_bytes", "pageone_memory_available_bytes", ""),
    ("host", "swap_free_bytes", "pageone_swap_free_bytes", ""),
    ("host", "memory_pressure_ratio", "pageone_memory_pressure_ratio", ""),
    ("host", "cpu_pressure_ratio", "pageone_cpu_pressure_ratio", ""),
    ("host", "pages_shared", "pageone_pages", "state=\"shared\""),
    ("host", "pages_sharing", "pageone_pages", "state=\"sharing\""),
    ("host", "pages_zero", "pageone_pages", "state=\"zero\""),
    ("host", "unmerge_bytes", "pageone_unmerge_bytes", ""),
    ("host", "unmerge_headroom_bytes", "pageone_unmerge_headroom_bytes", ""),
    ("host", "store_bytes", "pageone_store_bytes", ""),
    ("domain", "segments", "pageone_domain_segments", ""),
    ("client", "region_bytes", "pageone_client_region_bytes", ""),
    ("client", "pages_merged", "pageone_client_pages", "state=\"merged\""),
    ("client", "mappings", "pageone_client_maps", ""),
    ("client", "mappings_limit", "pageone_client_maps_limit", ""),
    ("client", "faults_total", "pageone_client_faults_total", ""),
];

/// The sum of a sample over its labels.
fn sample(text: &str, name: &str, label: &str) -> Option<f64> {
    let of =
        |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label));
    let values: Vec<f64> =
        text.lines().filter(of).map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

/// The number behind a word of a text of lines.
fn field(text: &str, word: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(word)).unwrap_or_else(|| panic!("{word} in {text}"));
    line[word.len()..].split_ascii_whitespace().next().unwrap().parse().unwrap()
}

/// `some avg10` of a file of PSI, as a part; `None`: the kernel has none.
fn pressure(what: &str) -> Option<f64> {
    let text = read_to_string(format!("/proc/pressure/{what}")).ok()?;
    Some(text.split("avg10=").nth(1)?.split(' ').next()?.parse::<f64>().ok()? / 100.0)
}

/// Field `number` of a process's `stat`, counted from 1, as proc_pid_stat(5) does.
fn stat(pid: i32, number: usize) -> f64 {
    kmem::procfs::Stat::of(Some(pid)).unwrap().field(number).unwrap() as f64
}

/// CPU seconds of the agent's threads in a process.
fn agent_cpu(pid: i32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of_agent = |dir: &std::path::PathBuf| read_to_string(dir.join("comm")).unwrap().starts_with("pageone-agent");
    threads
        .map(|thread| thread.path())
        .filter(of_agent)
        .map(|dir| {
            read_to_string(dir.join("schedstat")).unwrap().split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
        })
        .sum()
}

/// The store's segments that the daemon has open: bytes that they take, by inode.
fn segments(daemon: &Daemon) -> BTreeMap<u64, f64> {
    let mut all = BTreeMap::new();
    for fd in std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().flatten() {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("/memfd:pageone:")
            && let Ok(stat) = std::fs::metadata(fd.path())
        {
            all.insert(stat.ino(), stat.blocks() as f64 * 512.0);
        }
    }
    all
}

/// Of a client: pages of mappings of the store that are no copies; the frames among them; bytes of
/// memory that is registered with userfaultfd; and pages of that which hold nothing.
struct Memory {
    merged: f64,
    frames: std::collections::BTreeSet<(u64, u64)>,
    registered: f64,
    untouched: f64,
}

/// `regions`: first and last byte of each, as the daemon says. The agent has memory of its own that
/// is registered, and maps of whole segments.
fn memory(pid: i32, regions: &[(u64, u64)]) -> Memory {
    let smaps = read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut found = Memory { merged: 0.0, frames: Default::default(), registered: 0.0, untouched: 0.0 };
    let mut head: Vec<&str> = Vec::new();
    let (mut size, mut rss, mut anonymous) = (0.0, 0.0, 0.0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match words.next().unwrap() {
            "Size:" => size = words.next().unwrap().parse::<f64>().unwrap() * 1024.0,
            "Rss:" => rss = words.next().unwrap().parse::<f64>().unwrap() * 1024.0,
            "Anonymous:" => anonymous = words.next().unwrap().parse::<f64>().unwrap() * 1024.0,
            "VmFlags:" => {
                let start = u64::from_str_radix(head[0].split('-').next().unwrap(), 16).unwrap();
                if !regions.iter().any(|&(first, last)| (first..=last).contains(&start)) {
                    continue;
                }
                let is_store = line_is_store(&head);
                // `uw`: registered for write-protection.
                if is_store || words.any(|flag| flag == "uw") {
                    found.registered += size;
                    found.untouched += if is_store { 0.0 } else { (size - rss) / PAGE };
                }
                if is_store {
                    found.merged += (size - anonymous) / PAGE;
                    let offset = u64::from_str_radix(head[2], 16).unwrap();
                    let ino: u64 = head[4].parse().unwrap();
                    let pages = (size / PAGE) as u64;
                    found.frames.extend((0..pages).map(|page| (ino, offset / 4096 + page)));
                }
            }
            word if !word.ends_with(':') => head = line.split_whitespace().collect(),
            _ => {}
        }
    }
    found
}

fn line_is_store(head: &[&str]) -> bool {
    head.get(5).is_some_and(|name| name.starts_with("/memfd:pageone:"))
}

/// What the kernel says now.
fn look(daemon: &Daemon, clients: &[Client]) -> Facts {
    let meminfo = read_to_string("/proc/meminfo").unwrap();
    let of = |word: &str| field(&meminfo, word) * 1024.0;
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let up: f64 = read_to_string("/proc/uptime").unwrap().split(' ').next().unwrap().parse().unwrap();
    let limit: f64 = read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let lines = |pid: i32| read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count() as f64;
    let place = [daemon.dir.path().to_path_buf()];
    let memory_of = |client: &Client| {
        let map = control::client::map(&place, client.pid()).unwrap();
        let of = |region: &control::RegionMap| (region.start, region.start + u64::from(region.pages) * 4096 - 1);
        memory(client.pid(), &map.regions.iter().map(of).collect::<Vec<_>>())
    };
    let memories: Vec<_> = clients.iter().map(memory_of).collect();
    let sum = |of: &dyn Fn(&Memory) -> f64| memories.iter().map(of).sum::<f64>();
    let pids = || clients.iter().map(Client::pid);
    let frames: std::collections::BTreeSet<_> = memories.iter().flat_map(|memory| &memory.frames).collect();
    let (merged, frames, zero) = (sum(&|m| m.merged), frames.len() as f64, sum(&|m| m.untouched));
    let store = segments(daemon);
    let unmerge = (merged - frames + zero) * PAGE;
    let available = of("MemAvailable:");
    let swap = of("SwapFree:");
    let mut facts = Facts::from([
        (("host", "uptime_seconds"), up - stat(daemon.pid(), 22) / ticks),
        (("host", "daemon_cpu_seconds"), (stat(daemon.pid(), 14) + stat(daemon.pid(), 15)) / ticks),
        (("host", "agent_cpu_seconds"), pids().map(agent_cpu).sum()),
        (("host", "memory_total_bytes"), of("MemTotal:")),
        (("host", "memory_available_bytes"), available),
        (("host", "swap_free_bytes"), swap),
        (("host", "pages_shared"), frames),
        (("host", "pages_sharing"), merged - frames),
        (("host", "pages_zero"), zero),
        (("host", "unmerge_bytes"), unmerge),
        (("host", "unmerge_headroom_bytes"), available + swap - unmerge),
        (("host", "store_bytes"), store.values().sum()),
        (("domain", "segments"), store.len() as f64),
        (("client", "region_bytes"), sum(&|m| m.registered)),
        (("client", "pages_merged"), merged),
        (("client", "mappings"), pids().map(lines).sum()),
        (("client", "mappings_limit"), limit * clients.len() as f64),
        (("client", "faults_total"), pids().map(|pid| stat(pid, 10)).sum()),
    ]);
    for (name, what) in [("memory_pressure_ratio", "memory"), ("cpu_pressure_ratio", "cpu")] {
        if let Some(ratio) = pressure(what) {
            facts.insert(("host", name), ratio);
        }
    }
    facts
}

/// What is granted beside 1 %: steps of the kernel's clock, and moments between a start and the
/// note of it.
fn grain(name: &str) -> f64 {
    match name {
        "uptime_seconds" => 0.3,
        "daemon_cpu_seconds" => 0.02,
        // Of each of four: its start, and the end of its work behind its last report.
        "agent_cpu_seconds" => 4.0 * 0.004,
        // avg10 is renewed every 2 s.
        "memory_pressure_ratio" | "cpu_pressure_ratio" => 0.01,
        _ => 0.0,
    }
}

fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Host => "host",
        Scope::Governor => "governor",
        Scope::Domain => "domain",
        Scope::Client => "client",
        Scope::Recycler => "recycler",
    }
}

#[test]
fn every_metric_is_compared_or_is_known_to_the_daemon_alone() {
    let compared = SAMPLES.iter().map(|&(scope, name, ..)| (scope, name));
    let decided: Vec<_> = compared.chain(ALONE.iter().map(|&(scope, name, _)| (scope, name))).collect();
    for metric in METRICS {
        for scope in Scope::ALL.into_iter().filter(|&scope| metric.is_in(scope)) {
            let key = (scope_name(scope), metric.name);
            let times = decided.iter().filter(|&&other| other == key).count();
            assert_eq!(times, 1, "{key:?}: compare it, or say why nothing else knows it; once");
        }
    }
    for (scope, name) in decided {
        let is_it = |metric: &&control::Metric| {
            metric.name == name && Scope::ALL.into_iter().any(|s| metric.is_in(s) && scope_name(s) == scope)
        };
        assert!(METRICS.iter().any(|metric| is_it(&metric)), "{scope} {name} is no metric");
    }
}

#[test]
fn metrics_agree_with_what_the_kernel_says() {
    let daemon = Daemon::start();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "2", "7", "5"]);
        client.expect("ready");
        clients.push(client);
    }
    let mut zeros = daemon.scenario(&["zeros", &PAGES.to_string()]);
    zeros.expect("ready");
    clients.push(zeros);
    for client in &clients[..3] {
        daemon.wait_merged(client.pid(), PAGES * 4 / 5 - 1);
    }
    let (mut agreed, mut wrong) = (std::collections::BTreeSet::new(), Vec::new());
    let mut agrees = |wrong: &mut Vec<String>| {
        wrong.clear();
        let before = look(&daemon, &clients);
        let out = daemon.pageone(&["metrics"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let after = look(&daemon, &clients);
        for &(scope, name, family, label) in SAMPLES {
            let (Some(before), Some(after)) = (before.get(&(scope, name)), after.get(&(scope, name))) else {
                println!("SKIPPED: {name}: this kernel does not tell");
                continue;
            };
            let Some(value) = sample(&text, family, label) else {
                wrong.push(format!("{family} has no sample"));
                continue;
            };
            let (least, most) = (before.min(*after), before.max(*after));
            let least = least - 0.01 * least.abs() - grain(name);
            if (least..=most + 0.01 * most.abs() + grain(name)).contains(&value) {
                agreed.insert((scope, name));
            } else if !agreed.contains(&(scope, name)) {
                wrong.push(format!("{scope} {name}: {value}, and the kernel says {before} and {after}"));
            }
        }
        wrong.is_empty()
    };
    // Merging may go on, and other programs take memory: some scrape finds each of them at rest.
    let end = std::time::Instant::now() + Duration::from_secs(60) * e2e::patience();
    while !agrees(&mut wrong) {
        assert!(std::time::Instant::now() < end, "{wrong:#?}\n{}", daemon.status());
        std::thread::sleep(Duration::from_millis(300));
    }
    // The parts of a profit are the whole.
    let status = daemon.status();
    let domains = status["domains"].as_array().unwrap();
    let sum = |values: &mut dyn Iterator<Item = i64>| values.sum::<i64>();
    for domain in domains {
        let clients = domain["clients"].as_array().unwrap();
        let parts = sum(&mut clients.iter().map(|client| client["general_profit"].as_i64().unwrap()));
        assert_eq!(parts, domain["general_profit"].as_i64().unwrap(), "{domain}");
    }
    let whole = sum(&mut domains.iter().map(|domain| domain["general_profit"].as_i64().unwrap()));
    assert_eq!(whole, status["general_profit"].as_i64().unwrap());
    // Windows were opened: somebody could have waited.
    eventually("stalls are counted", Duration::from_secs(10), || {
        let out = daemon.pageone(&["metrics"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let count = sample(&text, "pageone_writer_stall_seconds_count", "")?;
        let of_clients = sample(&text, "pageone_client_writer_stall_seconds_count", "")?;
        let longest = sample(&text, "pageone_writer_stall_seconds_bucket", "le=\"+Inf\"")?;
        (count > 0.0 && count == of_clients && longest == count).then_some(())
    });
}
