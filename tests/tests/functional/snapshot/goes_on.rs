//! A guest goes on, whatever happens to those that store it, at whatever moment; and so does a
//! process whose checkpoint is taken.

use std::process::ExitStatus;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::*;

/// What happens to the processes of a command.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    /// SIGKILL to the command.
    KillCommand,
    /// SIGKILL to its guard alone.
    KillGuard,
    /// SIGKILL to all at once: the next command puts back what they have left.
    KillAll,
    /// SIGTERM to all, as a service manager sends it.
    EndAll,
    /// All are stopped, and continued a moment later.
    StopAll,
    /// Its guard is stopped for good.
    StopGuard,
    /// The command is stopped for a while.
    StopCommand,
    /// Ctrl-Z, and `fg` a moment later.
    Terminal,
    /// All are frozen by their cgroup, and thawed a moment later.
    Freeze,
}

impl What {
    pub(super) const ALL: [What; 9] = [
        What::KillCommand,
        What::EndAll,
        What::StopAll,
        What::KillAll,
        What::Freeze,
        What::StopGuard,
        What::StopCommand,
        What::KillGuard,
        What::Terminal,
    ];

    /// Does it. Gives from when on the guest must go on.
    pub(super) fn happen(self, command: &Child, next: &dyn Fn()) -> Instant {
        let own = command.id() as i32;
        let all = tree(own);
        let send = |pids: &[i32], signal| pids.iter().for_each(|pid| e2e::signal_process(*pid, signal));
        let for_a_moment = |pids: &[i32], signal| {
            send(pids, signal);
            std::thread::sleep(Duration::from_millis(100));
            let since = Instant::now();
            send(pids, libc::SIGCONT);
            since
        };
        let since = Instant::now();
        match self {
            What::KillCommand => send(&all[..1], libc::SIGKILL),
            What::KillGuard => send(&all[1..], libc::SIGKILL),
            What::StopGuard => {
                // Whoever starts a program waits until it has begun, for as long as it is stopped.
                let words = |pid: i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let begun: Vec<i32> = all[1..].iter().copied().filter(|&pid| words(pid) != words(own)).collect();
                send(&begun, libc::SIGSTOP);
            }
            What::EndAll => send(&all, libc::SIGTERM),
            What::StopAll => return for_a_moment(&all, libc::SIGSTOP),
            What::Terminal => return for_a_moment(&all[..1], libc::SIGTSTP),
            What::Freeze => return freeze(&all),
            What::KillAll => {
                // None of them sees the other's end.
                send(&all, libc::SIGSTOP);
                send(&all, libc::SIGKILL);
                let none = || (!all.iter().any(|pid| is_alive(*pid))).then_some(());
                eventually("they have ended", Duration::from_secs(20), none);
                let since = Instant::now();
                next();
                return since;
            }
            What::StopCommand => {
                send(&all[..1], libc::SIGSTOP);
                // The guest goes on before this does.
                std::thread::sleep(Duration::from_millis(1200));
                let since = Instant::now();
                send(&all[..1], libc::SIGCONT);
                return since;
            }
        }
        since
    }
}

/// Waits for a command's end. Ctrl-Z may stop it later than it was continued.
pub(super) fn end_of(command: &mut Child) -> ExitStatus {
    eventually("the command ends", Duration::from_secs(120), || {
        e2e::signal_process(command.id() as i32, libc::SIGCONT);
        command.try_wait().unwrap()
    })
}

/// A process and all that it has started, itself first.
fn tree(pid: i32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children = children.flat_map(|all| all.split(' ').flat_map(str::parse::<i32>).collect::<Vec<i32>>());
    [pid].into_iter().chain(children.flat_map(tree)).collect()
}

/// Freezes processes in a cgroup of their own for a moment; where there is none of version 2 they
/// are stopped.
fn freeze(pids: &[i32]) -> Instant {
    let root = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let group = root.into_iter().find(|root| root.join("cgroup.controllers").exists());
    let group = group.map(|root| root.join(format!("pageone-test-{}", pids[0])));
    let is_made = group.as_ref().is_some_and(|group| {
        std::fs::create_dir(group).is_ok()
            && pids
                .iter()
                .all(|pid| std::fs::write(group.join("cgroup.procs"), pid.to_string()).is_ok() || !is_alive(*pid))
            && std::fs::write(group.join("cgroup.freeze"), "1").is_ok()
    });
    if !is_made {
        skipped("no cgroup of version 2 can be made: its freezer is not tried");
    }
    std::thread::sleep(Duration::from_millis(300));
    let since = Instant::now();
    if let Some(group) = group.filter(|group| group.exists()) {
        let _ = std::fs::write(group.join("cgroup.freeze"), "0");
        // It goes when they have ended.
        std::thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(60);
            while std::fs::remove_dir(&group).is_err() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
    }
    since
}

/// Whether one of its threads has not ended: until then its files are open, and locked.
fn is_alive(pid: i32) -> bool {
    let state = |thread| kmem::procfs::Stat::of_thread(Some(pid), thread).ok()?.state();
    let runs = |thread| state(thread).is_some_and(|state| !matches!(state, 'Z' | 'X'));
    kmem::procfs::threads(pid).is_ok_and(|threads| threads.into_iter().any(runs))
}

/// Numbers that look random: a seed gives the same ones each time.
pub(super) struct Random(u64);

impl Random {
    /// From `SEED`, or the clock, which is printed.
    pub(super) fn new() -> Self {
        let clock = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64 >> 10;
        let seed = std::env::var("PAGEONE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(clock);
        println!("PAGEONE_SEED={seed}");
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Others, which these numbers begin.
    pub(super) fn other(&mut self) -> Self {
        Self(self.below(u64::MAX) | 1)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit.max(1)
    }
}

/// How many moments are tried: `PAGEONE_MOMENTS`, or a few.
fn moments(few: u64) -> u64 {
    std::env::var("PAGEONE_MOMENTS").ok().and_then(|moments| moments.parse().ok()).unwrap_or(few)
}

/// Number of a disk's images.
pub(super) fn chain(qmp: &mut Qmp) -> usize {
    let all = qmp.execute("query-block", json!({}));
    let next = |image: &Value| Some(image["backing-image"].clone()).filter(|image| !image.is_null());
    std::iter::successors(Some(all[0]["inserted"]["image"].clone()), next).count()
}

/// When the guest, or process, went on.
#[derive(Default)]
pub(super) struct Times {
    longest: Duration,
    late: usize,
}

impl Times {
    pub(super) fn add(&mut self, what: What, time: Duration) {
        self.longest = self.longest.max(time);
        if time > Duration::from_secs(1) {
            self.late += 1;
            println!("it ran after {time:.1?}: {what:?}");
        }
    }

    pub(super) fn say(&self, moments: u64) {
        println!("MOMENTS {moments}: it ran after {:.0?} at most, {} times after a second", self.longest, self.late);
    }
}

#[test]
fn a_snapshot_that_is_cut_short_at_any_moment_leaves_the_guest_running_and_nothing_else() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let (disk, machine) = place.machine_with_disk();
    cut_short(&place, &disk, &machine);
}

#[test]
fn a_migration_that_is_cut_short_at_any_moment_leaves_the_guest_running_and_nothing_else() {
    if !can_run() {
        return;
    }
    for accelerator in unprepared::accelerators() {
        let place = Place::new();
        let disk = place.path("disk.qcow2");
        e2e::qmp::make_disk(&disk);
        let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
        let more = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"];
        cut_short(&place, &disk, &unprepared::full_machine(&place, accelerator, &more));
    }
}

/// What happens at any moment to those that store the guest of a disk `d0`.
fn cut_short(place: &Place, disk: &Path, machine: &Machine) {
    let (mut qmp, mut random, mut times) = (machine.qmp(), Random::new(), Times::default());
    place.save(machine.pid(), "first");
    let start = Instant::now();
    place.save(machine.pid(), "second");
    let (takes, moments) = (start.elapsed().as_micros() as u64, moments(18));
    let images = || disks::images(place.dir.path()).len();
    let (mut cut, mut after_record) = (0, 0);
    for moment in 0..moments {
        let (pid, name) = (machine.pid().to_string(), format!("cut-{moment}"));
        let mut command = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", &name]);
        let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.below(takes)));
        let what = What::ALL[moment as usize % What::ALL.len()];
        let since = what.happen(&running, &|| drop(place.run(&["status"])));
        eventually("the guest runs", Duration::from_secs(30), || (status(&mut qmp) == "running").then_some(()));
        times.add(what, since.elapsed());
        cut += usize::from(!end_of(&mut running).success());
        place.ok(&["pool", "check", "store"]);
        eventually("it still runs, and images that it does not use are gone", Duration::from_secs(60), || {
            let chain = chain(&mut qmp);
            (status(&mut qmp) == "running" && images() == chain).then_some(())
        });
        // QEMU started with the same words would find what the guest writes now.
        let now = (moment % 250) as u8 + 1;
        disks::write(&mut qmp, now);
        eventually("it is there", Duration::from_secs(60), || (disks::byte(disk) == now).then_some(()));
        // One that is killed while the record is written keeps its image: the guest writes to it.
        after_record = images() - 1 - place.names().len();
    }
    times.say(moments);
    println!("{cut} were cut short, {after_record} of them when the record was being written");
    assert!(cut > 2 && after_record < cut);
    place.save(machine.pid(), "whole");
    let clone = place.clones("whole", 1, &[]);
    assert!(clone.clones.iter().all(OneClone::runs));
}

#[test]
fn a_checkpoint_that_is_cut_short_at_any_moment_leaves_the_process_running() {
    let place = Place::new();
    let mut client = place.daemon.scenario(&["hold", "4096", "1"]);
    client.expect("ready");
    let (pid, mut random, mut times) = (client.pid(), Random::new(), Times::default());
    let take = |name: &str| {
        let words = ["checkpoint", &pid.to_string(), "--to", "store", "--name", name, "--stop", "--full"];
        place.command(&words).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap()
    };
    let start = Instant::now();
    assert!(take("first").wait().unwrap().success());
    let (takes, moments) = (start.elapsed().as_micros() as u64, moments(18));
    for moment in 0..moments {
        let mut running = take(&format!("cut-{moment}"));
        std::thread::sleep(Duration::from_micros(random.below(takes)));
        let what = What::ALL[moment as usize % What::ALL.len()];
        let since = what.happen(&running, &|| drop(place.run(&["status"])));
        let runs = || (!kmem::procfs::is_stopped(pid).unwrap()).then_some(());
        eventually("the process runs", Duration::from_secs(30), runs);
        times.add(what, since.elapsed());
        end_of(&mut running);
        eventually("it still runs", Duration::from_secs(30), runs);
    }
    times.say(moments);
    client.go();
}

/// A file system that writes nothing until this is dropped.
struct Stalled(PathBuf);

impl Stalled {
    fn begin(at: &Path) -> Self {
        assert!(Command::new("fsfreeze").arg("-f").arg(at).status().unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).status();
    }
}

/// How long storage stalls: longer than a guard waits, in its lane.
fn stall() -> Duration {
    let seconds = std::env::var("PAGEONE_STALL_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(2))
}

/// A save to a pool that takes nothing any more since the guest, which is emulated, stands.
fn stalled_save(place: &Place, machine: &Machine, qmp: &mut Qmp, pool: &Path) -> (Child, Stalled) {
    let pid = machine.pid().to_string();
    for number in 0..40 {
        let name = format!("stalled-{number}");
        let mut command = place.command(&["snapshot", "save", &pid, "--to", "frozen", "--name", &name]);
        let mut save = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while status(qmp) == "running" && save.try_wait().unwrap().is_none() {}
        let stalled = Stalled::begin(pool);
        std::thread::sleep(Duration::from_secs(1));
        if status(qmp) != "running" {
            return (save, stalled);
        }
        drop(stalled);
        save.wait().unwrap();
        place.run(&["snapshot", "rm", "frozen", &name]);
    }
    panic!("no pool stalled while its guest stood");
}

#[test]
fn a_guest_goes_on_whose_pool_stalls_while_it_stands() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(xfs) = disks::Mounted::xfs(&place) else { return };
    place.ok(&["pool", "create", "frozen", "--capacity", &xfs.0.join("pool").display().to_string()]);
    let save_again = |machine: &Machine, name: &str| {
        place.ok(&["snapshot", "save", &machine.pid().to_string(), "--to", "frozen", "--name", name]);
    };
    // Ctrl-C, while its first thread waits for the pool and cannot end.
    let machine = unprepared::full_machine(&place, unprepared::TCG, &[]);
    let mut qmp = machine.qmp();
    let (mut save, stalled) = stalled_save(&place, &machine, &mut qmp, &xfs.0);
    let begun = Instant::now();
    e2e::signal_process(save.id() as i32, libc::SIGINT);
    eventually("the guest runs", guard::PROMISE * 2, || (status(&mut qmp) == "running").then_some(()));
    println!("it runs {:.1?} after Ctrl-C", begun.elapsed());
    assert!(save.try_wait().unwrap().is_none());
    drop(stalled);
    end_of(&mut save);
    save_again(&machine, "interrupted");
    drop(machine);
    // Nobody does anything, and its guard waits for a minute.
    let machine = unprepared::full_machine(&place, unprepared::TCG, &[]);
    let mut qmp = machine.qmp();
    let (mut save, stalled) = stalled_save(&place, &machine, &mut qmp, &xfs.0);
    let begun = Instant::now();
    while status(&mut qmp) != "running" && begun.elapsed() < stall() {
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("it is {} after {:.1?}", status(&mut qmp), begun.elapsed());
    let is_long = stall() > Duration::from_secs(70);
    assert_eq!(status(&mut qmp) == "running", is_long);
    drop(stalled);
    assert_eq!(end_of(&mut save).success(), !is_long);
    let text = std::io::read_to_string(save.stderr.take().unwrap()).unwrap();
    assert_eq!(text.contains("the guest was let go on"), is_long, "{text}");
    assert_eq!(status(&mut qmp), "running");
    save_again(&machine, "whole");
}

/// QEMU's `stop` waits for the disks: it comes to its end when nobody waits for it any more.
#[test]
fn a_guest_goes_on_when_storage_answers_that_stalled_while_it_was_stopped() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let Some(xfs) = disks::Mounted::xfs(&place) else { return };
    let disk = xfs.0.join("disk.qcow2");
    e2e::qmp::make_disk(&disk);
    let drive = format!("file={},if=none,id=d0,format=qcow2", disk.display());
    let source = place.machine("source", &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    let (mut tries, mut times) = (0, Times::default());
    for what in [None, Some(What::KillCommand), Some(What::EndAll)] {
        let mut was_hit = false;
        while !was_hit {
            tries += 1;
            assert!(tries < 30, "no save was in `stop` when the storage stalled");
            let (pid, name) = (source.pid().to_string(), format!("stall-{tries}"));
            let mut command = place.command(&["snapshot", "save", &pid, "--to", "store", "--name", &name]);
            let mut save = command.stdout(Stdio::null()).process_group(0).spawn().unwrap();
            // When its files are made it is held, until a write to the disk cannot end.
            let mut qmp = source.qmp();
            let mut is_made = || {
                let all = qmp.execute("query-migrate-capabilities", json!({}));
                all.as_array().unwrap().contains(&json!({ "capability": "x-ignore-shared", "state": true }))
            };
            while !is_made() && save.try_wait().unwrap().is_none() {}
            let held = save.id() as i32;
            e2e::signal_process(held, libc::SIGSTOP);
            drop(qmp);
            let stalled = Stalled::begin(&xfs.0);
            let (answered, since) = (Mutex::new(Instant::now()), AtomicBool::new(false));
            let begun = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut qmp = source.qmp();
                    qmp.monitor("qemu-io d0 \"aio_write -P 5 1M 64k\"");
                    e2e::signal_process(held, libc::SIGCONT);
                    while !since.load(Ordering::Relaxed) {
                        status(&mut qmp);
                        *answered.lock().unwrap() = Instant::now();
                    }
                });
                std::thread::sleep(stall() / 2);
                if let Some(what) = what {
                    what.happen(&save, &|| ());
                }
                std::thread::sleep(stall() / 2);
                was_hit = answered.lock().unwrap().elapsed() > stall() / 4;
                since.store(true, Ordering::Relaxed);
                let begun = Instant::now();
                drop(stalled);
                begun
            });
            let mut qmp = source.qmp();
            let runs = || (status(&mut qmp) == "running").then_some(());
            eventually("the guest runs", Duration::from_secs(60), runs);
            println!("{what:?}: {} after {:.1?}", if was_hit { "it ran" } else { "not in `stop`" }, begun.elapsed());
            if was_hit {
                times.add(what.unwrap_or(What::Terminal), begun.elapsed());
            }
            end_of(&mut save);
            eventually("it still runs, and images that it does not use are gone", Duration::from_secs(60), || {
                let chain = chain(&mut qmp);
                let images = disks::images(&xfs.0).len();
                (status(&mut qmp) == "running" && images == chain).then_some(())
            });
        }
    }
    times.say(3);
    place.save(source.pid(), "whole");
}
