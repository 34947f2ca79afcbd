//! The KSM driver: it governs the real ksmd, puts back what it found, and gives way to others.
//! KSM's settings are the host's, so these tests run only where KSM is not in use, one at a
//! time, and put everything back.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use e2e::{eventually, program, signal_process, skipped};
use governor::kernel::{Advisor, Tunables};
use kmem::ksm::{Ksm, Snapshot};
use serde_json::Value;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// KSM for the time of a test.
struct Host {
    ksm: Ksm,
    before: Snapshot,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    fn take() -> Option<Self> {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Ok(ksm) = Ksm::open() else {
            skipped("this kernel has no KSM");
            return None;
        };
        if !rustix::process::geteuid().is_root() || ksm.run().unwrap() == 1 {
            skipped("needs root, and KSM not in use");
            return None;
        }
        let before = Snapshot::of(&ksm).unwrap();
        ksm.set_run(0).unwrap();
        if ksm.advisor_mode().is_ok() {
            ksm.set_advisor_mode("none").unwrap();
        }
        ksm.set_pages_to_scan(123).unwrap();
        Some(Self { ksm, before, _alone: alone })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.ksm.set_run(2).unwrap();
        self.before.restore().unwrap();
    }
}

fn advise(args: &[&str]) -> Command {
    let mut command = Command::new(program("pageone"));
    command.args(["ksm", "advise"]).args(args).stdin(Stdio::null());
    command
}

fn failed(out: &Output) -> String {
    assert!(!out.status.success());
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A process with memory that KSM may merge; ended with this value.
struct Mergeable(Child);

impl Mergeable {
    fn start(pages: usize) -> Self {
        Self::spawn(pages, 0, 2)
    }

    /// One whose pages are all different, with children that have the same pages mapped: KSM looks
    /// at them once a process, and they take the memory of one.
    fn forked(pages: usize, children: usize) -> Self {
        Self::spawn(pages, children, 1)
    }

    /// `alike`: how many pages in a row have the same content.
    fn spawn(pages: usize, children: usize, alike: usize) -> Self {
        let script = "import mmap,os,random,struct,sys\n\
                      n,children,alike=map(int,sys.argv[1:])\n\
                      m=mmap.mmap(-1,n*4096,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
                      salt=random.getrandbits(63) if alike==1 else 0\n\
                      for i in range(n): m[i*4096:i*4096+8]=struct.pack('<Q',salt^i//alike)\n\
                      m.madvise(12)\n\
                      r,w=os.pipe()\n\
                      for _ in range(children):\n\
                      \x20 if os.fork()==0:\n\
                      \x20   os.close(w);os.read(r,1);os._exit(0)\n\
                      print('ready',flush=True)\nsys.stdin.read()";
        let mut command = Command::new("python3");
        command.args(["-c", script]).args([pages, children, alike].map(|number| number.to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for Mergeable {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_governs_and_puts_back_what_it_found_after_sigterm() {
    let Some(host) = Host::take() else { return };
    let _memory = Mergeable::start(20_000);
    let mut command = advise(&["--target", "1", "--max-cpu", "50", "--min-pages", "50", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut ended = Vec::new();
    for line in lines {
        let decision: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if decision["cause"] == "scan_ended" {
            assert!(decision["reason"].as_str().unwrap().starts_with("scan took"), "{decision}");
            ended.push(decision["scan_seconds"].as_f64().unwrap());
        }
        // Once it knows the scanner, a scan takes its target; on a busy machine not each.
        let is_near = |time: &f64| (time - 1.0).abs() < 0.2;
        if ended.iter().skip(3).any(is_near) || ended.len() == 60 {
            break;
        }
    }
    assert_eq!(host.ksm.run().unwrap(), 1);
    assert_ne!(host.ksm.pages_to_scan().unwrap(), 123);
    assert!(ended.len() < 60, "none of these scans took its target: {ended:?}");
    signal_process(child.id() as i32, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!((host.ksm.pages_to_scan().unwrap(), host.ksm.run().unwrap()), (123, 0));
}

#[test]
fn it_gives_way_to_another_writer_and_leaves_what_that_one_wrote() {
    let Some(host) = Host::take() else { return };
    let mut child = advise(&["--target", "5"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the first decision is made", Duration::from_secs(60), || {
        (host.ksm.run().ok()? == 1 && host.ksm.pages_to_scan().ok()? != 123).then_some(())
    });
    host.ksm.set_pages_to_scan(777).unwrap();
    let status = eventually("it ends", Duration::from_secs(60), || child.try_wait().unwrap());
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text).unwrap();
    assert_eq!(status.code(), Some(6), "{text}");
    assert!(text.contains("777") && text.contains("another program"), "{text}");
    assert_eq!(host.ksm.pages_to_scan().unwrap(), 777);
}

#[test]
fn it_does_not_begin_beside_the_kernels_advisor() {
    let Some(host) = Host::take() else { return };
    if host.ksm.set_advisor_mode("scan-time").is_err() {
        return skipped("this kernel has no advisor");
    }
    let out = advise(&["--target", "5"]).output().unwrap();
    assert_eq!(out.status.code(), Some(6));
    assert!(failed(&out).contains("advisor_mode"), "{}", failed(&out));
    assert_eq!(host.ksm.run().unwrap(), 0, "it has not been started");
}

#[test]
fn once_sets_a_rate_after_one_scan_and_leaves_it() {
    let Some(host) = Host::take() else { return };
    let _memory = Mergeable::start(2_000);
    let out = advise(&["--target", "2", "--once"]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("scan took"), "{said}{}", String::from_utf8_lossy(&out.stderr));
    assert_ne!(host.ksm.pages_to_scan().unwrap(), 123);
}

#[test]
fn a_dry_run_prints_its_decisions_and_changes_nothing() {
    let Some(host) = Host::take() else { return };
    let _memory = Mergeable::start(2_000);
    // It looks at a scanner that runs; at one that does not there is nothing to decide.
    host.ksm.set_pages_to_scan(500).unwrap();
    host.ksm.set_run(1).unwrap();
    let mut child = advise(&["--target", "1", "--dry-run"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let decision = lines.find(|line| line.as_ref().unwrap().contains("scan took")).unwrap().unwrap();
    assert!(decision.contains("pages"), "{decision}");
    assert_eq!((host.ksm.pages_to_scan().unwrap(), host.ksm.run().unwrap()), (500, 1));
    signal_process(child.id() as i32, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!((host.ksm.pages_to_scan().unwrap(), host.ksm.run().unwrap()), (500, 1));
}

#[test]
fn bad_input_is_named_with_its_range() {
    for (args, words) in [
        (&["--target", "0"][..], ["0.1", "86400"]),
        (&["--target=-3"], ["-3", "86400"]),
        (&["--max-cpu", "200"], ["200 %", "0.1 and 100 %"]),
        (&["--min-pages", "9", "--max-pages", "8"], ["9 to 8", "10000000"]),
        (&["--mode", "scan-time", "--target", "1.5"], ["1.5", "whole seconds"]),
    ] {
        let out = advise(args).output().unwrap();
        assert_eq!(out.status.code(), Some(5), "{args:?}");
        let error = failed(&out);
        assert!(words.iter().all(|word| error.contains(word)), "{args:?}: {error}");
    }
}

#[test]
fn the_daemons_limits_are_named_with_their_range() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program("pageone"));
    command.arg("--dir").arg(dir.path()).args(["daemon", "--config", "/dev/null", "--max-cpu", "0.01"]);
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(5));
    assert!(failed(&out).contains("max_cpu") && failed(&out).contains("0.1"), "{}", failed(&out));
}

#[test]
fn status_shows_every_statistic() {
    if Ksm::open().is_err() {
        return skipped("this kernel has no KSM");
    }
    let out = Command::new(program("pageone")).args(["ksm", "status", "--json"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    for name in ["pages_shared", "pages_sharing", "pages_unshared", "pages_volatile", "full_scans"] {
        assert!(report["statistics"][name].is_i64(), "{name}: {report}");
    }
    assert!(report["settings"]["pages_to_scan"].is_string() && report["net_profit_bytes"].is_i64());
}

#[test]
fn a_program_runs_with_all_of_its_memory_mergeable() {
    let (major, minor, _) = kmem::procfs::kernel_release();
    if Ksm::open().is_err() || (major, minor) < (6, 16) {
        return skipped("needs KSM, and Linux 6.16 to see it");
    }
    let run = |options: &[&str]| {
        let mut command = Command::new(program("pageone"));
        command.args(["run", "--backend", "ksm"]).args(options).args(["--", "cat", "/proc/self/ksm_stat"]);
        command.output().unwrap()
    };
    let out = run(&[]);
    assert!(String::from_utf8_lossy(&out.stdout).contains("ksm_merge_any: yes"), "{out:?}");
    // What KSM cannot give is not silently left out, and the program runs all the same.
    let out = run(&["--domain", "web"]);
    assert!(String::from_utf8_lossy(&out.stdout).contains("ksm_merge_any: no"), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("no domains"), "{out:?}");
}

/// Tracing is the kernel's own account of what its advisor saw and decided.
struct Tracing {
    root: std::path::PathBuf,
    /// Whether this test mounted it.
    mounted: bool,
}

/// Scan time in seconds, CPU percentage, and the `pages_to_scan` that followed.
#[derive(Copy, Clone, Debug)]
struct Decision {
    scan_time: u64,
    cpu: u32,
    pages: u32,
}

impl Tracing {
    fn start() -> Option<Self> {
        let root = std::path::PathBuf::from("/sys/kernel/tracing");
        let mounted = !root.join("events").exists();
        if mounted {
            let done = Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(&root).status();
            if !done.is_ok_and(|status| status.success()) {
                return None;
            }
        }
        let event = root.join("events/ksm/ksm_advisor/enable");
        std::fs::OpenOptions::new().write(true).open(event).ok()?.write_all(b"1").ok()?;
        Some(Self { root, mounted })
    }

    fn clear(&self) {
        std::fs::write(self.root.join("trace"), "").unwrap();
    }

    /// The decisions since the last `clear`.
    fn decisions(&self) -> Vec<Decision> {
        let text = std::fs::read_to_string(self.root.join("trace")).unwrap();
        let number = |line: &str, before: &str| -> Option<u64> {
            line.split_once(before)?.1.split_whitespace().next()?.parse().ok()
        };
        let one = |line: &str| {
            let (pages, cpu) = (number(line, "pages_to_scan ")?, number(line, "cpu percent ")?);
            Some(Decision { scan_time: number(line, "ksm scan time ")?, cpu: cpu as u32, pages: pages as u32 })
        };
        text.lines().filter_map(one).collect()
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let _ = std::fs::write(self.root.join("events/ksm/ksm_advisor/enable"), "0");
        if self.mounted {
            let _ = Command::new("umount").arg(&self.root).status();
        }
    }
}

/// The step of the arithmetic that gave a decision its number.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Bound {
    /// The target's own: none of the limits applied.
    Target,
    /// `advisor_max_cpu`.
    MaxCpu,
    /// A tenth of a CPU.
    MinCpu,
    /// `advisor_max_pages_to_scan`.
    MaxPages,
}

impl Bound {
    fn of(before: u32, decision: &Decision, tunables: &Tunables) -> Self {
        let pages = u64::from(decision.pages);
        let cost = u64::from((before / decision.cpu.max(1)).max(1));
        if pages == tunables.max_pages_to_scan {
            Self::MaxPages
        } else if pages == cost * 10 {
            Self::MinCpu
        } else if pages == cost * u64::from(tunables.max_cpu) {
            Self::MaxCpu
        } else {
            Self::Target
        }
    }
}

fn set(name: &str, value: u64) {
    std::fs::write(format!("/sys/kernel/mm/ksm/{name}"), value.to_string()).unwrap();
}

/// Whether the kernel agreed with our arithmetic in all `decisions`. `settings`: each with the
/// number of decisions before it. Gives what made each decision.
fn check(begin: u32, settings: &[(usize, Tunables)], decisions: &[Decision]) -> Vec<Bound> {
    let (mut advisor, mut pages, mut bounds) = (Advisor::default(), begin, Vec::new());
    for (n, decision) in decisions.iter().enumerate() {
        let tunables = &settings.iter().rfind(|(since, _)| *since <= n).unwrap().1;
        bounds.push(Bound::of(pages, decision, tunables));
        pages = advisor.step(tunables, pages, decision.scan_time, decision.cpu);
        assert_eq!(pages, decision.pages, "decision {n} under {tunables:?}: {:?}", &decisions[..=n]);
    }
    bounds
}

/// Runs the kernel's advisor until `bound` made three decisions, and compares all of them with
/// ours.
///
/// First ksmd has next to nothing to scan. Its CPU use is 1 %, so the floor of a tenth of a CPU
/// raises the number of pages to its maximum. That also hides the CPU time that ksmd used before.
/// Then memory comes.
fn compare(host: &Host, tracing: &Tracing, mut tunables: Tunables, bound: Bound) {
    const BEGIN: u32 = 507;
    // The mode is left and entered again: the kernel forgets what it learned.
    host.ksm.set_run(0).unwrap();
    host.ksm.set_advisor_mode("none").unwrap();
    set("advisor_target_scan_time", tunables.target_scan_time);
    set("advisor_max_cpu", tunables.max_cpu.into());
    set("advisor_min_pages_to_scan", BEGIN.into());
    set("advisor_max_pages_to_scan", tunables.max_pages_to_scan);
    tracing.clear();
    host.ksm.set_advisor_mode("scan-time").unwrap();
    let mut settings = vec![(0, tunables)];
    let mut memory = vec![Mergeable::start(64)];
    host.ksm.set_run(1).unwrap();
    let count = |bounds: &[Bound], bound| bounds.iter().filter(|&&other| other == bound).count();
    eventually("the floor raises the number of pages", Duration::from_secs(60), || {
        (count(&check(BEGIN, &settings, &tracing.decisions()), Bound::MaxPages) >= 3).then_some(())
    });

    memory.push(Mergeable::forked(20_000, 8));
    let (mut seen, mut few) = (tracing.decisions().len(), 0);
    let raised = seen;
    let deadline = Instant::now() + Duration::from_secs(300);
    while count(&check(BEGIN, &settings, &tracing.decisions())[raised..], bound) < 3 {
        assert!(Instant::now() < deadline, "{bound:?} made too few of these: {:?}", tracing.decisions());
        std::thread::sleep(Duration::from_millis(20));
        let decisions = tracing.decisions();
        if decisions.len() == seen {
            continue;
        }
        // While ksmd is stopped no scan can end, so it is known which settings a decision has.
        host.ksm.set_run(0).unwrap();
        let decisions = tracing.decisions();
        (seen, few) = (decisions.len(), few + 1);
        // The target's own number decides where the target is what a scan takes on this machine,
        // and the maximum is far away.
        if bound == Bound::Target {
            tunables.target_scan_time = decisions[seen - 1].scan_time;
            tunables.max_pages_to_scan = 30_000_001;
            set("advisor_target_scan_time", tunables.target_scan_time);
            set("advisor_max_pages_to_scan", tunables.max_pages_to_scan);
            settings.push((seen, tunables));
        }
        // On a quicker machine the same CPU time takes more pages.
        if few >= 6 && decisions[seen - 1].scan_time == 1 && memory.len() < 16 {
            memory.push(Mergeable::forked(20_000, 8));
            few = 0;
        }
        host.ksm.set_run(1).unwrap();
    }
    host.ksm.set_run(0).unwrap();
    let decisions = tracing.decisions();
    check(BEGIN, &settings, &decisions);
    println!("{bound:?}: {} decisions agree, the last {:?}", decisions.len(), &decisions[raised..]);
}

/// The settings and the memory are chosen so that each part of the arithmetic decides, however fast
/// the machine is.
#[test]
fn the_kernels_advisor_decides_as_ours_does_in_its_mode() {
    let Some(host) = Host::take() else { return };
    if host.ksm.advisor_mode().is_err() {
        return skipped("this kernel has no advisor");
    }
    let Some(tracing) = Tracing::start() else { return skipped("the tracepoint ksm_advisor can't be used here") };
    // Every scan looks at every page, with pauses of the usual length.
    host.ksm.set_smart_scan(0).unwrap();
    host.ksm.set_sleep_millisecs(20).unwrap();
    for (target_scan_time, max_cpu, max_pages_to_scan, bound) in
        [(1_000, 70, 100_003, Bound::MinCpu), (1, 11, 100_043, Bound::MaxCpu), (1, 400, 1_000_003, Bound::Target)]
    {
        compare(&host, &tracing, Tunables { target_scan_time, max_cpu, max_pages_to_scan }, bound);
    }
}
