//! The governor of the engine: real daemons, real clients. What it promises is checked from
//! outside, by the kernel's own counters.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, eventually, skipped};
use serde_json::Value;

/// Over how long the CPU limit holds.
const WINDOW: f64 = 10.0;
const PAGES: usize = 4096;

/// CPU times would be at odds with one another.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// CPU time of the threads of a process, in seconds. `agents`: only those of its agent.
fn cpu(pid: i32, agents: bool) -> f64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0.0 };
    let time = |task: &Path| {
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        // The program itself is called pageone-test-client.
        let main = task.file_name().is_some_and(|tid| *tid == *pid.to_string());
        let ours = !agents || name.starts_with("pageone-") && !main;
        // Nanoseconds on a CPU, waiting for one, time slices.
        let text = std::fs::read_to_string(task.join("schedstat")).ok()?;
        ours.then(|| text.split_whitespace().next()?.parse::<u64>().ok()).flatten()
    };
    tasks.flatten().filter_map(|task| time(&task.path())).sum::<u64>() as f64 / 1e9
}

/// Clients that hold the same content, and new content whenever they are told to.
fn clients(daemon: &Daemon, count: usize) -> Vec<Client> {
    let mut clients: Vec<_> = (0..count).map(|_| daemon.scenario(&["hold", &PAGES.to_string(), "1", "1"])).collect();
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients
}

/// Times and CPU times of daemon and agents while clients write all their memory anew, one after
/// the other, for `seconds`.
fn under_load(daemon: &Daemon, clients: &mut [Client], seconds: f64) -> Vec<(f64, f64)> {
    let mut samples = Vec::new();
    let begin = Instant::now();
    let mut rewritten = 0;
    loop {
        let at = begin.elapsed().as_secs_f64();
        let agents: f64 = clients.iter().map(|client| cpu(client.pid(), true)).sum();
        samples.push((at, cpu(daemon.pid(), false) + agents));
        if at >= seconds {
            return samples;
        }
        // Twelve times a second a client: each has time enough to be merged before it writes again.
        if at * 12.0 >= rewritten as f64 {
            let client = &mut clients[rewritten % 8];
            client.tell("rewrite");
            client.expect("ok");
            rewritten += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The most that was used in a window that begins with a sample and is no longer than [`WINDOW`],
/// in percent of a CPU.
fn most(samples: &[(f64, f64)]) -> f64 {
    let used = |n: usize| {
        let last = samples.partition_point(|sample| sample.0 <= samples[n].0 + WINDOW) - 1;
        samples[last].1 - samples[n].1
    };
    (0..samples.len()).map(used).fold(0.0, f64::max) / WINDOW * 100.0
}

fn governor(daemon: &Daemon) -> Value {
    daemon.status()["governor"].clone()
}

#[test]
fn the_cpu_limit_holds_over_every_ten_seconds() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let limit = 4.0;
    let daemon = Daemon::with(&["--merge-period", "0.1", "--max-cpu", &limit.to_string()]);
    let mut clients = clients(&daemon, 8);
    let samples = under_load(&daemon, &mut clients, 22.0);
    let most = most(&samples);
    println!("at most {most:.2} % of a CPU over 10 s, of {limit} %");
    assert!(most <= limit, "{most} %");
    // The limit was what held it: without one the same load takes several times as much.
    assert!(most > 0.7 * limit, "{most} %");
    // It says so, and of which limit. A scan may have ended in time just then.
    let governor = eventually("the limit binds", Duration::from_secs(120), || {
        under_load(&daemon, &mut clients, 2.0);
        let governor = governor(&daemon);
        let reason = governor["reason"].as_str().unwrap();
        let binds = reason.contains("pages due") && reason.ends_with("of 4 %: the CPU limit binds");
        println!("{governor}");
        binds.then_some(governor)
    });
    assert_eq!(governor["max_cpu_percent"], limit);
    let said = governor["cpu_percent"].as_f64().unwrap();
    assert!(said <= limit && said > 0.5 * limit, "{governor}");
    // And it still works: what stays is merged.
    // It is asked seldom: what its answers take counts for its limit, too.
    let merged = || {
        std::thread::sleep(Duration::from_secs(2));
        daemon.status()["pages_merged_total"].as_u64().unwrap()
    };
    let before = merged();
    eventually("it merges", Duration::from_secs(120), || (merged() >= before + PAGES as u64).then_some(()));
}

/// Reads a file again and again within a memory cgroup that is too small for it.
struct Thrashing {
    cgroup: PathBuf,
    child: Child,
    _file: tempfile::NamedTempFile,
}

impl Thrashing {
    fn start(daemon: &Daemon) -> Result<Self, String> {
        let pressure = std::fs::read_to_string("/proc/pressure/memory").map_err(|e| format!("no PSI: {e}"))?;
        if !pressure.contains("some avg10=0.") {
            return Err(format!("memory is short here already: {pressure}"));
        }
        let places = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        let (root, limit) = places
            .into_iter()
            .find(|(root, _)| ["memory.limit_in_bytes", "memory.stat"].iter().any(|f| Path::new(root).join(f).exists()))
            .ok_or("no memory cgroups")?;
        let cgroup = Path::new(root).join(format!("pageone-test-{}", std::process::id()));
        let failed = |what: &str, e: std::io::Error| format!("{what} {}: {e}", cgroup.display());
        std::fs::create_dir(&cgroup).map_err(|e| failed("cannot make", e))?;
        let written = std::fs::write(cgroup.join(limit), (32 << 20).to_string());
        if let Err(e) = written {
            let _ = std::fs::remove_dir(&cgroup);
            return Err(failed("cannot limit", e));
        }
        let file = tempfile::NamedTempFile::new_in(daemon.dir.path()).map_err(|e| e.to_string())?;
        std::fs::write(file.path(), vec![7u8; 96 << 20]).map_err(|e| e.to_string())?;
        // `dd` has the file written and forgotten, so that its pages are charged to the reader.
        let script =
            "dd of=\"$1\" oflag=nocache conv=notrunc,fdatasync count=0 status=none; echo $$ > \"$2\"/cgroup.procs
            while :; do cat \"$1\" \"$1\" \"$1\" > /dev/null; done";
        let mut command = Command::new("sh");
        command.args(["-c", script, "thrash"]).arg(file.path()).arg(&cgroup).stdin(Stdio::null());
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = command.spawn().map_err(|e| e.to_string())?;
        Ok(Self { cgroup, child, _file: file })
    }
}

impl Drop for Thrashing {
    fn drop(&mut self) {
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
        // Its last program may take a moment to end.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.cgroup).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn memory_pressure_raises_the_limit_to_the_second_one() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let (usual, short) = (2.0, 6.0);
    let args = ["--merge-period", "0.1", "--max-cpu", "2", "--max-cpu-under-pressure", "6"];
    let daemon = Daemon::with_config(&args, "pressure_percent = 2\n");
    let mut clients = clients(&daemon, 8);
    // Others may have made it short a moment ago.
    eventually("memory is not short", Duration::from_secs(60), || {
        (!governor(&daemon)["memory_is_short"].as_bool()?).then_some(())
    });
    assert_eq!(governor(&daemon)["max_cpu_percent"], usual);
    let thrashing = match Thrashing::start(&daemon) {
        Ok(thrashing) => thrashing,
        Err(why) => return skipped(&why),
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while governor(&daemon)["memory_is_short"] == false {
        if Instant::now() > deadline {
            return skipped("reading a file in a small cgroup does not stall for 2 % of the time here");
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(governor(&daemon)["max_cpu_percent"], short);
    let samples = under_load(&daemon, &mut clients, 13.0);
    let most = most(&samples);
    println!("at most {most:.2} % of a CPU over 10 s, of {usual} % and, under pressure, {short} %");
    assert!(most <= short && most > 1.2 * usual, "{most} %");
    drop(thrashing);
    eventually("memory is no longer short", Duration::from_secs(60), || {
        (governor(&daemon)["max_cpu_percent"] == usual).then_some(())
    });
}

#[test]
fn a_scan_takes_its_target_from_the_first_on_and_after_a_tripling() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let daemon = Daemon::with(&["--target-scan-time", "1"]);
    assert_eq!(daemon.status()["merge_period_seconds"], 1.0);
    let mut clients = clients(&daemon, 12);
    let mut scans: Vec<(u64, f64)> = Vec::new();
    let (mut halfway, mut next, mut last) = (0, 0, None);
    let begin = Instant::now();
    for second in 0..18 {
        // Every second one client's pages begin to age; then those of three.
        for _ in 0..if second < 9 { 1 } else { 3 } {
            let client = &mut clients[next % 12];
            client.tell("rewrite");
            client.expect("ok");
            next += 1;
        }
        while begin.elapsed() < Duration::from_secs(second + 1) {
            let now = governor(&daemon);
            let (pages, time) = (now["scan_pages"].as_u64().unwrap(), now["scan_time_seconds"].as_f64());
            // Two in a row may have as many pages and as much time; their CPU time tells them
            // apart.
            let scan = time.map(|time| (pages, time, now["scan_cpu_seconds"].as_f64()));
            if let Some((pages, time, _)) = scan.filter(|_| scan != last)
                && pages >= PAGES as u64 / 2
            {
                scans.push((pages, time));
            }
            last = scan;
            let due = now["pages_due"].as_u64().unwrap();
            halfway += usize::from((PAGES as u64 / 4..3 * PAGES as u64 / 4).contains(&due));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    println!("{scans:?}, {halfway} times halfway");
    assert!(scans.len() >= 10, "{scans:?}");
    let middle = |part: &[(u64, f64)]| {
        let mut pages: Vec<u64> = part.iter().map(|scan| scan.0).collect();
        pages.sort_unstable();
        pages[pages.len() / 2]
    };
    // The first ones merge what all clients began with.
    // On a busy host a client's scan is put off now and then, so what is due is not the same in
    // each.
    let after = scans[scans.len() / 2..].iter().map(|scan| scan.0).max().unwrap();
    let before = middle(&scans[2..scans.len() / 2]);
    assert!(after >= 2 * before, "no tripling, {before} to {after}: {scans:?}");
    // Other programs want the CPUs too; without a pace a scan takes a few hundredths.
    let in_time = scans.iter().filter(|&&(_, time)| (0.9..1.2).contains(&time)).count();
    assert!(in_time * 4 >= scans.len() * 3 && scans.iter().all(|&(_, time)| time > 0.9), "{scans:?}");
    assert!(halfway >= 5, "the work comes in bursts: seen halfway {halfway} times");
}

#[test]
fn settings_out_of_range_are_named_with_their_range() {
    let refused = |args: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(e2e::program("pageone"));
        let out = command.arg("--dir").arg(dir.path()).args(["daemon", "--config", "/dev/null"]).args(args).output();
        let out = out.unwrap();
        assert!(!out.status.success(), "{args:?}");
        String::from_utf8(out.stderr).unwrap()
    };
    for (args, words) in [
        (vec!["--mode", "fast"], ["--mode", "none, scan-time and target"]),
        (vec!["--target-scan-time", "30", "--merge-period", "20"], ["target_scan_time", "the merge period of 20 s"]),
        (vec!["--target-scan-time", "1.5", "--mode", "scan-time"], ["1.5 s", "whole seconds"]),
        (vec!["--max-cpu", "0.01"], ["max_cpu", "between 0.1 and"]),
        (vec!["--max-cpu", "20", "--max-cpu-under-pressure=-1"], ["max_cpu_under_pressure", "between 0.1 and"]),
    ] {
        let said = refused(&args);
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    }
}
