use super::*;

#[test]
fn used_memory_is_what_is_not_available() {
    let text = "MemTotal:       24683812 kB\nMemFree:        1 kB\nMemAvailable:   24352868 kB\n";
    assert_eq!(used_in(text), Some(f64::from(24_683_812 - 24_352_868) / 1024.0));
    assert_eq!(used_in("MemTotal: 1 kB\n"), None);
    assert!(used_mib().unwrap() > 0.0);
    let dir = tempfile::tempdir().unwrap();
    let meminfo = dir.path().join("meminfo");
    assert_eq!(used_by(&meminfo).unwrap_err().to_string(), "cannot read /proc/meminfo");
    std::fs::write(&meminfo, "MemTotal: 1 kB\n").unwrap();
    let error = used_by(&meminfo).unwrap_err().to_string();
    assert!(error.starts_with("/proc/meminfo has no MemTotal or no MemAvailable"), "{error}");
}

#[test]
fn median_of_odd_and_even_sets() {
    assert_eq!(median(vec![3.0]), 3.0);
    assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
    assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.0);
}

#[test]
fn it_passes_only_with_checks_and_without_failures() {
    assert!(passed(0, 1, 0));
    assert!(!passed(0, 1, 1));
    assert!(!passed(1, 1, 0));
    assert!(!passed(0, 0, 0));
}

/// Merges nothing; asks for a daemon in a directory, if there is one.
struct Merging(Option<PathBuf>);

impl Backend for Merging {
    fn launcher(&self, _guest: usize) -> Vec<OsString> {
        Vec::new()
    }

    fn start_merging(&self) -> Result<()> {
        Ok(())
    }

    fn status(&self) -> Result<HostMetrics> {
        match &self.0 {
            Some(directory) => Ok(control::client::status(std::slice::from_ref(directory))?.metrics),
            None => Ok(HostMetrics::default()),
        }
    }

    fn stop(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

/// One test, because the signal of one reaches them all.
#[test]
fn a_demo_that_cannot_go_on_says_why() {
    use clap::Parser;
    let options = Line::parse_from(["demo", "--guests", "1", "--seconds", "0", "--json"]).options;
    let dir = tempfile::tempdir().unwrap();
    let (merging, away) = (Merging(None), Merging(Some(dir.path().join("none"))));
    // A guest is a script that says what guests do.
    let demo = |backend, script: &str, limit| {
        let mut demo = Demo::new(&options, backend, Interrupt::catch().unwrap());
        (demo.tick, demo.first_round_limit) = (Duration::from_millis(10), limit);
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        demo.start(command).unwrap();
        demo
    };
    let (long, now) = (Duration::from_secs(60), Instant::now());
    let first = |script: &str, limit: Duration| {
        demo(&merging, script, limit).wait_for_first_rounds(now).unwrap_err().to_string()
    };
    let error = first("echo PAGEONE-BOOTED; echo oops; exit 3", long);
    assert!(error.contains("before its first round: DEAD: QEMU ended") && error.contains("| oops"), "{error}");
    let error = first("exec sleep 600", Duration::ZERO);
    assert!(error.starts_with("not every guest has verified its files once in 0 s"), "{error}");
    let merge = |backend, script: &str| {
        let mut demo = demo(backend, script, long);
        demo.wait_for_first_rounds(now).unwrap();
        demo.merge(1.0)
    };
    let error = merge(&away, "echo PAGEONE-ROUND 0 PASS checks=2; exec sleep 600").unwrap_err().to_string();
    assert_eq!(error, "cannot ask how merging does");
    let wrong = "echo PAGEONE-ROUND 0 CORRUPT checks=2 failures=1 file=x; exec sleep 600";
    let error = merge(&merging, wrong).unwrap().verdict().unwrap_err().to_string();
    assert!(error.starts_with("a guest died or found a wrong byte"), "{error}");
    let error = Demo::new(&options, &merging, Interrupt::catch().unwrap()).start(Command::new("/nonexistent"));
    assert_eq!(error.unwrap_err().to_string(), "cannot start guest 0");
    let mut interrupted = demo(&merging, "exec sleep 600", long);
    signal_hook::low_level::raise(signal_hook::consts::SIGTERM).unwrap();
    assert_eq!(interrupted.wait_for_first_rounds(now).unwrap_err().to_string(), "interrupted");
    // The kernel has no signals of these numbers.
    let error = Interrupt::at([9998, 9999]).err().unwrap().to_string();
    assert_eq!(error, "cannot catch SIGINT and SIGTERM");
}
