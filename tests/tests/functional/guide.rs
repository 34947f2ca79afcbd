//! Every command of the README and of the guides is run by a test.
//!
//! The commands are those in the documents' shell blocks. Most are run here, as they stand, with
//! the reader's words put in ([`Page::words`]). A command that needs another host, or more time,
//! names the test that runs it. A command that is in no table fails the test, and so does a row of
//! a table whose command has gone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use e2e::{Client, Guest, eventually, program, signal_process, skipped};

/// How a command is run.
enum How {
    /// Here. It ends by itself, with one of these codes.
    Ends(&'static [i32]),
    /// Here, until this command succeeds; then it is stopped at the page's end.
    Stays(&'static str),
    /// By another test or script: the file, and what stands there.
    By(&'static str, &'static str),
    /// By nothing: why.
    Nothing(&'static str),
}
use How::{By, Ends, Nothing, Stays};

const OK: How = Ends(&[0]);
const PACKAGES: &str = "scripts/lanes/packages.sh";
const DKMS: &str = "scripts/lanes/packages-dkms.sh";
const LIBVIRT: &str = "scripts/lanes/libvirt-steps.sh";
const LIBVIRT_COMMON: &str = "scripts/lib/libvirt-guests.sh";
const SELINUX: &str = "scripts/lanes/selinux-steps.sh";
const MODULE: &str = "scripts/lanes/module.sh";
const KSM: &str = "tests/tests/rates/ksm.rs";
const POOL: &str = "tests/tests/functional/pool.rs";
const SNAPSHOT: &str = "tests/tests/functional/snapshot.rs";
const DISKS: &str = "tests/tests/functional/snapshot/disks.rs";
const UFFD: &str = "tests/tests/functional/snapshot/uffd.rs";
const CLONES: &str = "tests/tests/functional/snapshot/clones.rs";
const PAUSING: &str = "tests/tests/functional/pausing.rs";
const SEEING: &str = "tests/tests/functional/seeing.rs";
const SEEING_REPORT: &str = "tests/tests/functional/seeing/report.rs";
/// The daemon answers.
const ANSWERS: &str = "pageone status";
/// The QEMU that `run` has started is a client.
const IS_CLIENT: &str = "pageone status | grep -q 'qemu-system'";

fn table() -> Vec<(&'static str, Vec<(&'static str, How)>)> {
    vec![
        (
            "README.md",
            vec![
                ("make demo", By("tests/tests/functional/guests.rs", "\"demo\"")),
                ("make test", By(".ci/run", "make test")),
                ("make build", By("Makefile", "deb: deps-deb build")),
                ("sudo target/release/pageone daemon", Stays(ANSWERS)),
                ("sudo target/release/pageone run -- qemu-system-x86_64 -m 4096 …", Stays(IS_CLIENT)),
                ("sudo target/release/pageone attach PID", OK),
                ("sudo target/release/pageone status", OK),
                ("sudo target/release/pageone detach PID", OK),
            ],
        ),
        (
            "running-guests.md",
            vec![
                ("sudo pageone daemon", Stays(ANSWERS)),
                ("sudo pageone run -- qemu-system-x86_64 -m 4096 …", Stays(IS_CLIENT)),
                ("sudo pageone status", OK),
                ("sudo pageone attach PID", OK),
                ("sudo pageone detach PID", OK),
                ("pageone daemon --target-scan-time 30 --max-cpu 20", Stays("pageone status | grep -q ' of 20 %$'")),
                (
                    "pageone daemon --merge-period 60 --target-scan-time 30",
                    Stays("pageone status | grep -q 'merge period 60 s'"),
                ),
                (
                    "pageone daemon --max-cpu 20 --max-cpu-under-pressure 80",
                    Stays("pageone status | grep -q ' of 20 %$'"),
                ),
                ("pageone status", OK),
            ],
        ),
        (
            "checkpoints.md",
            vec![
                ("pageone pool create store --capacity /srv/pool", OK),
                ("pageone checkpoint PID --to store", OK),
                ("pageone checkpoint PID --to store", OK),
                ("pageone pool ls store", OK),
                ("pageone restore store NAME --to FILE", OK),
                ("pageone pool rm store NAME", OK),
                ("pageone pool repack store", OK),
                ("pageone pool repack store --compress", OK),
                ("pageone pool create NAME --capacity /srv/pool [--staging /fast/pool]", By(POOL, "\"--staging\"")),
                ("pageone pool list | show | add | rename | check | destroy", By(POOL, "\"rename\"")),
                ("pageone pool ls | du | rm | repack", By("tests/tests/functional/checkpoint.rs", "\"pool\", \"du\"")),
                ("(umask 77; head -c 32 /dev/urandom > /etc/pageone/anna.key)", By(POOL, "(umask 77; head -c 32")),
                (
                    "pageone pool create anna --capacity /srv/anna --key-file /etc/pageone/anna.key",
                    By(POOL, "\"--key-file\", &first"),
                ),
                ("pageone pool key anna --key-file /etc/pageone/anna-2.key", By(POOL, "\"key\", \"tenant\"")),
                ("keyctl padd user anna @u < /etc/pageone/anna-2.key", By(POOL, "KernelKey::new(\"user\"")),
                ("pageone pool key anna --kernel-key anna", By(POOL, "\"key\", \"tenant\", \"--kernel-key\"")),
            ],
        ),
        (
            "snapshots.md",
            vec![
                ("pageone pool create store --capacity /srv/pool", By(SNAPSHOT, "\"pool\", \"create\"")),
                ("pageone run --snapshots -- qemu-system-x86_64 -m 4096 …", By(SNAPSHOT, "\"--snapshots\"")),
                ("pageone snapshot save PID --to store --name ready", By(SNAPSHOT, "\"snapshot\", \"save\"")),
                ("pageone snapshot ls store", By(SNAPSHOT, "\"snapshot\", \"ls\"")),
                (
                    "sudo pageone snapshot run store ready --count 8 --same-random",
                    By(SNAPSHOT, "\"snapshot\", \"run\""),
                ),
                ("pageone snapshot serve store ready --uffd /run/ready.sock", By(UFFD, "\"snapshot\", \"serve\"")),
                ("sudo pageone snapshot verify store ready", By(DISKS, "\"snapshot\", \"verify\"")),
                ("pageone snapshot prune store --keep-last 3 --keep-daily 7", By(DISKS, "\"snapshot\", \"prune\"")),
                ("pageone snapshot export store ready | zstd > ready.tar.zst", By(DISKS, "\"snapshot\", \"export\"")),
                (
                    "zstd -dc ready.tar.zst | pageone snapshot import store --name again --disks /srv/images",
                    By(DISKS, "\"snapshot\", \"import\""),
                ),
                ("sudo pageone snapshot verify store again --user anna", By(DISKS, "\"snapshot\", \"verify\"")),
                ("pageone snapshot rm store ready", By(CLONES, "\"snapshot\", \"rm\"")),
            ],
        ),
        (
            "dirty.md",
            vec![("pageone dirty [PID…] [--interval S] [--count N] [--json] [--bandwidth MIB_S] [--downtime MS]", OK)],
        ),
        (
            "estimate.md",
            vec![
                // A guest of another test may end meanwhile.
                ("pageone estimate --qemu", Ends(&[0, 8])),
                ("pageone estimate 4711 4712", OK),
                ("pageone estimate core.4711 disk.img /srv", OK),
                ("pageone estimate --qemu --json | jq .total", OK),
            ],
        ),
        (
            "free-pages.md",
            vec![
                ("pageone run --ppr -- qemu-system-x86_64 -m 2G …", Stays(IS_CLIENT)),
                ("pageone status", OK),
                ("apt-get install make gcc linux-headers-$(uname -r)", By("scripts/deps/kernels.sh", "linux-headers-")),
                ("make -C guest/linux/ppr && insmod guest/linux/ppr/ppr.ko", By("scripts/lib/module.sh", "make")),
                ("cat /sys/kernel/debug/ppr/stats", By("guest/load/init", "/sys/kernel/debug/ppr/stats")),
                (
                    "cp -r guest/linux/ppr /usr/src/ppr-0.1.0 && dkms install ppr/0.1.0",
                    By(DKMS, "dkms status $module/$1"),
                ),
                ("pageone ppr pause PID", By(PAUSING, "ppr(&daemon, \"pause\", pid)")),
                ("pageone ppr resume PID", By(PAUSING, "ppr(&daemon, \"resume\", pid)")),
            ],
        ),
        (
            "install.md",
            vec![
                (
                    "sudo apt install ./target/debian/{pageone,libpageone-agent}_*.deb",
                    By("scripts/lanes/packages.sh", "they install"),
                ),
                ("sudo pageone doctor", Ends(&[0, 1])),
                ("sudo systemctl status pageone", By(PACKAGES, "systemctl")),
                ("pageone config check", OK),
                ("sudo systemctl reload pageone", By(PACKAGES, "systemctl reload pageone")),
                ("sudo pageone detach PID", OK),
                ("sudo apt remove pageone", By("scripts/lanes/packages.sh", "they go")),
            ],
        ),
        (
            "ksm.md",
            vec![
                ("sudo pageone ksm advise --target 30 --max-cpu 20", By(KSM, "\"--max-cpu\"")),
                ("sudo pageone ksm advise --target 30 --once", By(KSM, "\"--once\"")),
                ("sudo pageone ksm advise --dry-run", By(KSM, "\"--dry-run\"")),
                ("pageone ksm status", OK),
                ("pageone run --backend ksm -- PROGRAM", By(KSM, "\"--backend\", \"ksm\"")),
            ],
        ),
        (
            "libvirt.md",
            vec![
                (
                    "sudo apt install ./pageone_*.deb ./libpageone-agent_*.deb ./pageone-libvirt_*.deb",
                    By(LIBVIRT_COMMON, "packages install"),
                ),
                (
                    "for pid in $(sudo cat /run/libvirt/qemu/*.pid); do sudo pageone attach \"$pid\"; done",
                    By(LIBVIRT, "pageone attach"),
                ),
                ("sudo pageone status", By(LIBVIRT, "pageone status")),
                (
                    "cp /usr/share/pageone/selinux/* . && make -f /usr/share/selinux/devel/Makefile pageone.pp",
                    By(SELINUX, "/usr/share/selinux/devel/Makefile pageone.pp"),
                ),
                ("sudo semodule -i pageone.pp", By(SELINUX, "semodule -i")),
                (
                    "sudo restorecon -RF /usr/bin/pageone /run/pageone && sudo systemctl restart pageone",
                    By(SELINUX, "restorecon -RF /usr/bin/pageone /run/pageone"),
                ),
            ],
        ),
        (
            "module.md",
            vec![
                (
                    "sudo apt install ./target/debian/pageone-pageonefs-dkms_*.deb linux-headers-$(uname -r)",
                    By(DKMS, "they install"),
                ),
                ("sudo pageone doctor", By("tests/tests/functional/module.rs", "\"doctor\"")),
                ("sudo mkdir -p /mnt/pageone", By(MODULE, "mkdir -p /mnt/pageone")),
                (
                    "sudo mount -t pageonefs -o domain=guests,huge=advise,size=48G,mode=0700,uid=64055 none /mnt/pageone",
                    By(MODULE, "mount -t pageonefs -o domain="),
                ),
                (
                    "sudo pageone run --backend module -- qemu-system-x86_64 -m 4096 …",
                    By("tests/tests/functional/module.rs", "\"--backend\", \"module\""),
                ),
                ("sudo pageone status", By("tests/tests/functional/module.rs", "try_status")),
                ("sudo apt install openssl mokutil", By("scripts/deps/roots.sh", "dkms,openssl,linux-headers-amd64")),
                (
                    "sudo mokutil --import /var/lib/dkms/mok.pub",
                    Nothing("a person has to answer the firmware; that dkms signs is tested"),
                ),
            ],
        ),
        (
            "monitoring.md",
            vec![
                ("pageone metrics", OK),
                ("sudo systemctl enable --now pageone-metrics", By(PACKAGES, "systemctl start pageone-metrics")),
            ],
        ),
        // Read and run by that script, line by line.
        ("operations.md", vec![("", By(PACKAGES, "docs/guide/operations.md"))]),
        (
            "proxmox.md",
            vec![
                ("sudo apt install ./pageone-proxmox_*.deb", By("scripts/lanes/packages.sh", "Proxmox")),
                ("qm shutdown 100 && qm start 100", Nothing("there is no Proxmox VE to test on; what `qm` starts is")),
                ("pageone status", By("tests/tests/functional/proxmox.rs", "daemon.")),
            ],
        ),
        (
            "seeing.md",
            vec![
                ("sudo pageone top", By(SEEING, "\"top\"")),
                ("sudo pageone record -o day.rec", By(SEEING, "\"record\"")),
                ("pageone replay day.rec --at 14:05", By(SEEING, "\"replay\"")),
                ("pageone report day.rec -o report.html --csv tables/", By(SEEING_REPORT, "\"--csv\"")),
            ],
        ),
        (
            "troubleshooting.md",
            vec![
                ("sudo pageone doctor", Ends(&[0, 1])),
                ("sudo pageone doctor PID…", Ends(&[0, 1])),
                ("sudo pageone doctor --fix", Ends(&[0, 1])),
                ("sudo pageone doctor --apply", By(PACKAGES, "doctor --apply")),
            ],
        ),
    ]
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The commands in a document's shell blocks, without what is said beside them.
fn commands(document: &Path) -> Vec<String> {
    let mut is_shell = false;
    let mut commands = Vec::new();
    for line in std::fs::read_to_string(document).unwrap().lines() {
        if line.starts_with("```") {
            is_shell = line == "```sh";
        } else if is_shell && !line.trim_start().starts_with('#') && !line.trim().is_empty() {
            commands.push(line.split("  #").next().unwrap().trim_end_matches(" #").trim().to_owned());
        }
    }
    commands
}

fn document(name: &str) -> PathBuf {
    if name == "README.md" { root().join(name) } else { root().join("docs/guide").join(name) }
}

#[test]
fn every_command_of_the_documents_has_a_test() {
    let tables: BTreeMap<_, _> = table().into_iter().collect();
    let mut pages: Vec<String> = std::fs::read_dir(root().join("docs/guide"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    pages.push("README.md".into());
    for page in pages {
        let found = commands(&document(&page));
        let rows = tables.get(page.as_str()).map_or(&[][..], Vec::as_slice);
        if !rows.iter().any(|(command, _)| command.is_empty()) {
            let expected: Vec<_> = rows.iter().map(|(command, _)| *command).collect();
            assert_eq!(found, expected, "the commands of {page}, and those of the table");
        }
        for (command, how) in rows {
            if let By(file, text) = how {
                let there = std::fs::read_to_string(root().join(file)).unwrap();
                assert!(there.contains(text), "{page}: {command}: {file} is to run it, and has no {text:?}");
            }
        }
    }
}

/// A reader of one page: a shell in a folder of its own, and what runs meanwhile.
struct Page {
    home: tempfile::TempDir,
    /// The reader's words for those in capitals.
    words: Vec<(&'static str, String)>,
    running: Vec<Child>,
}

impl Page {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("srv")).unwrap();
        let srv = home.path().join("srv").display().to_string();
        let words = [("/srv", &*srv), ("S", "0.2"), ("N", "2"), ("MIB_S", "100"), ("MS", "300"), ("FILE", "memory")];
        let words = words.map(|(from, to)| (from, to.to_owned())).to_vec();
        Self { home, words, running: Vec::new() }
    }

    /// A command as the reader types it.
    fn typed(&self, command: &str) -> String {
        let whole = command.replace(['[', ']'], " ").replace("PID…", "PID");
        let own = |word: &str| {
            let (start, rest) = word.split_once('/').map_or((word, ""), |_| word.split_at(word.len().min(4)));
            let found = self.words.iter().find(|(from, _)| *from == word || (*from == start && start == "/srv"));
            found.map_or(word.to_owned(), |(from, to)| if *from == word { to.clone() } else { format!("{to}{rest}") })
        };
        let words: Vec<_> = whole.split_whitespace().filter(|word| *word != "sudo").map(own).collect();
        words.join(" ").replace("target/release/", "")
    }

    fn shell(&self, text: &str) -> Command {
        let bin = program("pageone").parent().unwrap().display().to_string();
        let mut command = Command::new("bash");
        command.args(["-c", text]).current_dir(self.home.path()).stdin(Stdio::null());
        command.env("PATH", format!("{bin}:{}", std::env::var("PATH").unwrap()));
        command.env("PAGEONE_DIR", self.home.path().join("run")).env("PAGEONE_POOLS", self.home.path().join("pools"));
        command
    }

    fn run(&mut self, command: &str, how: &How) {
        let text = self.typed(command);
        match how {
            Ends(codes) => {
                let output = self.shell(&text).output().unwrap();
                let said =
                    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                assert!(output.status.code().is_some_and(|code| codes.contains(&code)), "{text}: {said}");
                println!("{text}");
            }
            Stays(until) => {
                // A page that shows several daemons means one of them.
                if text.starts_with("pageone daemon") {
                    self.stop();
                }
                self.running.push(self.shell(&format!("exec {text}")).stdout(Stdio::null()).spawn().unwrap());
                eventually(until, Duration::from_secs(60), || {
                    self.shell(until).output().unwrap().status.success().then_some(())
                });
                println!("{text} (runs, until: {until})");
            }
            By(file, _) => println!("{command}: run by {file}"),
            Nothing(why) => skipped(&format!("{command}: {why}")),
        }
    }

    /// Ends what runs, the latest first.
    fn stop(&mut self) {
        for mut child in self.running.drain(..).rev() {
            signal_process(child.id() as i32, libc::SIGTERM);
            child.wait().unwrap();
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop();
    }
}

fn read(page: &mut Page, name: &str) {
    let (_, rows) = table().into_iter().find(|(of, _)| *of == name).unwrap();
    for (command, how) in &rows {
        if command.contains("NAME") && matches!(how, Ends(_)) {
            let list = page.shell("pageone pool ls store --json").output().unwrap();
            let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
            page.words.retain(|(from, _)| *from != "NAME");
            page.words.push(("NAME", list[0]["name"].as_str().unwrap().to_owned()));
        }
        // Names of checkpoints have the time in them, in seconds.
        if command.contains("--to store") {
            std::thread::sleep(Duration::from_secs(1));
        }
        page.run(command, how);
    }
}

/// The words of a small guest's command behind `qemu-system-x86_64 -m SIZE`.
fn guest_words() -> Result<(Vec<String>, String), String> {
    let words = Guest::words(192)?;
    let size = words.iter().position(|word| word == "-m").unwrap();
    let rest = words[1..size].iter().chain(&words[size + 2..]);
    let quoted: Vec<_> = rest.map(|word| format!("'{word}'")).collect();
    Ok((words.clone(), quoted.join(" ")))
}

/// Pages on which guests are started, and one that runs already is attached.
#[test]
fn the_commands_for_guests_run_as_they_stand() {
    let (words, rest) = match guest_words() {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    for name in ["README.md", "running-guests.md", "free-pages.md"] {
        let mut page = Page::new();
        if name == "free-pages.md" {
            page.run("pageone daemon", &Stays(ANSWERS));
        }
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        let guest = Guest::start(command);
        let size = (if name == "free-pages.md" { "2G" } else { "4096" }, "192".to_owned());
        page.words.extend([("PID", guest.pid().to_string()), ("…", rest.clone()), size]);
        read(&mut page, name);
    }
}

/// Pages whose commands look at programs, or at the host.
#[test]
fn the_commands_for_programs_run_as_they_stand() {
    let (words, _) = match guest_words() {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let start = |page: &Page, seed: &str| {
        let client = program("pageone-test-client").display().to_string();
        let mut client =
            Client::spawn(page.shell(&format!("exec pageone run --no-start -- {client} hold 1024 2 {seed}")));
        client.expect("ready");
        let pid = client.pid();
        eventually("it is a client", Duration::from_secs(20), || {
            let status = page.shell("pageone status --json").output().unwrap();
            String::from_utf8_lossy(&status.stdout).contains(&format!("\"pid\": {pid}")).then_some(())
        });
        client
    };
    for name in
        ["checkpoints.md", "dirty.md", "estimate.md", "install.md", "ksm.md", "monitoring.md", "troubleshooting.md"]
    {
        let mut page = Page::new();
        page.run("pageone daemon --merge-period 0.2", &Stays(ANSWERS));
        let clients = [start(&page, "5"), start(&page, "6")];
        // `estimate --qemu` wants a QEMU to look at.
        let _guest = (name == "estimate.md").then(|| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            let mut guest = Guest::start(command);
            guest.pass_rounds(1);
            guest
        });
        let [first, second] = clients.each_ref().map(|client| client.pid().to_string());
        page.words.extend([("PID", first.clone()), ("4711", first), ("4712", second)]);
        for file in ["core.4711", "disk.img", "srv/file"] {
            std::fs::write(page.home.path().join(file), vec![7; 1 << 20]).unwrap();
        }
        read(&mut page, name);
    }
}
