//! Other ways to clones: the same guest in a QEMU that PageONE has not touched.

use super::*;

/// A way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A migration stream with the RAM in it; each clone reads it.
    FullCopy,
    /// A RAM file in tmpfs, mapped privately, and a migration stream without RAM.
    Tmpfs,
    /// QEMU's savevm, and loadvm in a copy of the disk, which was made before.
    Loadvm,
}

pub(super) const WAYS: [Way; 3] = [Way::FullCopy, Way::Tmpfs, Way::Loadvm];

/// A clone.
pub(super) struct Rival(Child);

impl Rival {
    pub(super) fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the guest left when it had been stored in each way.
pub(super) struct Plain {
    dir: tempfile::TempDir,
    words: Vec<String>,
}

impl Plain {
    /// Boots a guest with these words, lets it work and rest, and stores it.
    pub(super) fn new(words: &[String]) -> Self {
        // Its sockets and its console are made anew for each.
        let mut own = words.to_vec();
        for option in ["-qmp", "-serial"] {
            let at = own.iter().rposition(|word| word == option).unwrap();
            own.drain(at..at + 2);
        }
        let plain = Self { dir: tempfile::tempdir_in("/dev/shm").unwrap(), words: own };
        e2e::qmp::make_disk(&plain.path("disk"));
        let mut command = plain.command("source", "on", "disk");
        command.args(Qmp::words(&plain.path("qmp")));
        let mut source = Guest::start(command);
        wait_until_it_rests(&mut source);
        let mut qmp = Qmp::connect(&plain.path("qmp"));
        let begin = Instant::now();
        assert_eq!(qmp.monitor("savevm one"), "");
        figure("Loadvm: pause", ms(begin), "ms", None);
        let store = |qmp: &mut Qmp, name: &str, ignore: bool| {
            let all = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": ignore }] });
            qmp.execute("migrate-set-capabilities", all);
            qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }));
            qmp.execute("stop", json!({}));
            let begin = Instant::now();
            qmp.migrate(&format!("exec:cat > {}", plain.path(name).display())).unwrap();
            let pause = ms(begin);
            qmp.execute("cont", json!({}));
            pause
        };
        figure("FullCopy: pause, the guest stands all the time", store(&mut qmp, "full", false), "ms", None);
        store(&mut qmp, "state", true);
        // What it writes from now on would be in its clones.
        source.kill();
        plain
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// QEMU with RAM in the file, shared or not, and a disk that no guest sees.
    fn command(&self, name: &str, share: &str, disk: &str) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        let ram = self.path("ram");
        let file = format!("memory-backend-file,id=r,size={MIB}M,mem-path={},share={share}", ram.display());
        command.args(["-object", &file, "-machine", "memory-backend=r"]);
        self.finish(command, name, disk)
    }

    fn finish(&self, mut command: Command, name: &str, disk: &str) -> Command {
        command.args(["-drive", &format!("file={},if=none,id=d,format=qcow2", self.path(disk).display())]);
        command.args(["-serial", &format!("unix:{},server=on,wait=off", self.path(name).display())]);
        command
    }

    /// Starts clones; gives them, and when all had answered, ms.
    pub(super) fn clones(&self, way: Way, count: usize) -> (Vec<Rival>, f64) {
        let disk = |number: usize| format!("disk-{number}");
        for number in 0..count {
            let _ = std::fs::remove_file(self.path(&format!("clone-{number}")));
            std::fs::copy(self.path("disk"), self.path(&disk(number))).unwrap();
        }
        let begin = Instant::now();
        let start = |number: usize| {
            let (name, monitor) = (format!("clone-{number}"), self.path(&format!("qmp-{number}")));
            let _ = std::fs::remove_file(&monitor);
            let mut command = match way {
                Way::Tmpfs => self.command(&name, "off", &disk(number)),
                _ => {
                    let mut command = Command::new(&self.words[0]);
                    command.args(&self.words[1..]);
                    let ram = format!("memory-backend-ram,id=r,size={MIB}M");
                    command.args(["-object", &ram, "-machine", "memory-backend=r"]);
                    self.finish(command, &name, &disk(number))
                }
            };
            match way {
                Way::Loadvm => command.args(["-loadvm", "one"]),
                _ => command.args(["-incoming", "defer"]),
            };
            command.args(Qmp::words(&monitor)).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
            let clone = Rival(command.spawn().unwrap());
            if way != Way::Loadvm {
                self.load(way, &monitor);
            }
            clone
        };
        let clones: Vec<Rival> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || start(number))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (0..count).for_each(|number| drop(answer(&self.path(&format!("clone-{number}")))));
        (clones, ms(begin))
    }

    /// Loads a stream, as soon as QEMU can.
    fn load(&self, way: Way, monitor: &Path) {
        while UnixStream::connect(monitor).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut qmp = Qmp::connect(monitor);
        let shared = way == Way::Tmpfs;
        let all = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": shared }] });
        qmp.execute("migrate-set-capabilities", all);
        let file = self.path(if shared { "state" } else { "full" });
        qmp.execute("migrate-incoming", json!({ "uri": format!("exec:cat {}", file.display()) }));
        while qmp.execute("query-migrate", json!({}))["status"] != "completed" {
            std::thread::sleep(Duration::from_micros(500));
        }
        qmp.execute("cont", json!({}));
    }
}
