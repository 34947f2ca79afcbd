//! Domains by what manages a client.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use control::client::{self, Error, Freeze};
use e2e::user::{ENV_UID, give_up_privileges};
use e2e::{Client, Daemon, eventually, program, skipped};

const PAGES: u64 = 4096;
/// The user of all guests, as libvirt has one.
const GUESTS: u32 = 64055;
/// Directory of a daemon, and a client of it: what a process is to ask for.
const ENV_ASKS: &str = "PAGEONE_TEST_ASKS";

/// Groups of the hierarchy in which systemd would have clients; removed at the end.
struct Groups {
    top: PathBuf,
    made: Vec<PathBuf>,
}

impl Groups {
    /// `Err`: why there can be none.
    fn new() -> Result<Self, String> {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let v1 = own.contains(":name=systemd:");
        let top = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (top, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let is_it = if v1 { options.split(',').any(|o| o == "name=systemd") } else { kind == "cgroup2" };
            is_it.then(|| PathBuf::from(top))
        });
        let mut groups = Self { top: top.ok_or("no cgroup hierarchy is mounted")?, made: Vec::new() };
        groups.make("machine.slice/pageone-test.scope").map_err(|e| format!("no cgroups can be made: {e}"))?;
        Ok(groups)
    }

    fn make(&mut self, group: &str) -> std::io::Result<PathBuf> {
        let mut at = self.top.clone();
        for part in Path::new(group) {
            at.push(part);
            if !at.exists() {
                std::fs::create_dir(&at)?;
                self.made.push(at.clone());
            }
        }
        Ok(at)
    }

    /// A client that runs in this group; its pages hold what those of all such clients do.
    fn client(&mut self, daemon: &Daemon, group: &str, options: &[&str]) -> Client {
        self.client_of(daemon, group, options, rustix::process::geteuid().as_raw())
    }

    /// The same, of a user.
    fn client_of(&mut self, daemon: &Daemon, group: &str, options: &[&str], uid: u32) -> Client {
        let mut run = daemon.run(options);
        run.arg(program("pageone-test-client")).args(["hold", &PAGES.to_string(), "1", "6"]);
        let mut command = self.command(group, &run);
        if uid != rustix::process::geteuid().as_raw() {
            command.env(ENV_UID, uid.to_string());
        }
        let mut client = Client::spawn(command);
        client.expect("ready");
        client
    }

    /// A command that runs in this group.
    fn command(&mut self, group: &str, run: &Command) -> Command {
        let procs = self.make(group).unwrap().join("cgroup.procs");
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(procs).arg(run.get_program()).args(run.get_args());
        command
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // The clients have ended; the kernel takes a moment to know.
        for group in self.made.iter().rev() {
            for _ in 0..100 {
                match std::fs::remove_dir(group) {
                    Err(e) if e.raw_os_error() == Some(libc::EBUSY) => std::thread::sleep(Duration::from_millis(20)),
                    _ => break,
                }
            }
        }
    }
}

/// The domain of a client, once all of it was looked at.
fn domain(daemon: &Daemon, client: &Client) -> serde_json::Value {
    eventually("the client is looked at", Duration::from_secs(20), || {
        let known = daemon.client(client.pid())?;
        let seen = known["pages_unshared"].as_u64()? + known["pages_merged"].as_u64()?;
        let status = daemon.try_status()?;
        let of = |d: &&serde_json::Value| d["clients"].as_array().unwrap().iter().any(|c| c["pid"] == client.pid());
        (seen == PAGES).then(|| status["domains"].as_array().unwrap().iter().find(of).cloned()).flatten()
    })
}

#[test]
fn clients_of_one_user_share_within_a_slice_and_not_across_whatever_they_ask_for() {
    let mut groups = match Groups::new() {
        Ok(groups) => groups,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::start();
    let (a, b) = ("machine.slice/machine-pageonea.slice", "machine.slice/machine-pageoneb.slice");
    let mut first = groups.client(&daemon, &format!("{a}/machine-qemu\\x2d1\\x2dx.scope"), &[]);
    let mut other = groups.client(&daemon, &format!("{b}/machine-qemu\\x2d2\\x2dx.scope"), &[]);
    // One that asks for the tenant's domain, from another tenant and from none.
    let asks = ["--domain", "slice:machine-pageonea.slice"];
    let mut liar = groups.client(&daemon, &format!("{b}/machine-qemu\\x2d3\\x2dx.scope"), &asks);
    let mut nobody = daemon.scenario_with(&asks, &["hold", &PAGES.to_string(), "1", "6"], &[]);
    nobody.expect("ready");
    // A group of that name below its own.
    let mut deep = groups.client(&daemon, &format!("user.slice/pageone.scope/{a}/x.scope"), &[]);

    let uid = rustix::process::geteuid().as_raw();
    let name = |client: &Client| domain(&daemon, client)["name"].as_str().unwrap().to_owned();
    assert_eq!(name(&first), format!("slice:machine-pageonea.slice@{uid}"));
    assert_eq!(name(&other), format!("slice:machine-pageoneb.slice@{uid}"));
    assert_eq!(name(&liar), format!("slice:machine-pageoneb.slice/slice%3Amachine-pageonea.slice@{uid}"));
    assert_eq!(name(&nobody), format!("slice%3Amachine-pageonea.slice@{uid}"));
    assert_eq!(name(&deep), format!("uid-{uid}"));
    assert_eq!(daemon.status()["pages_shared"], 0, "nothing is shared across: {}", daemon.status());
    let known = daemon.client(first.pid()).unwrap();
    assert_eq!((&known["manager"], &known["rule"]), (&"libvirt".into(), &"default: by slice".into()));
    assert!(known["unknown"].as_str().unwrap().contains("/run/libvirt/qemu"), "{known}");
    let text = daemon.pageone(&["status"]).output().unwrap().stdout;
    assert!(String::from_utf8_lossy(&text).contains("libvirt: default: by slice"));

    let mut second = groups.client(&daemon, &format!("{a}/machine-qemu\\x2d4\\x2dx.scope"), &[]);
    daemon.wait_merged(second.pid(), PAGES);
    assert_eq!(name(&second), name(&first));
    for client in [&mut first, &mut other, &mut liar, &mut nobody, &mut deep, &mut second] {
        client.go();
        client.kill();
    }
}

#[test]
fn a_restarted_daemon_keeps_a_guests_domain_and_other_rules_lose_no_byte() {
    let mut groups = match Groups::new() {
        Ok(groups) => groups,
        Err(why) => return skipped(&why),
    };
    let rule =
        |domain: &str| format!("direct_io_seconds = 0\n[[tenants]]\nmanager = \"libvirt\"\ndomain = \"{domain}\"\n");
    let mut daemon = Daemon::with_settings(&["--merge-period", "0.1"], &rule("mine"));
    let guest = |n: u32| format!("machine.slice/machine-qemu\\x2d{n}\\x2dpageone.scope");
    let mut clients = [1, 2].map(|n| groups.client(&daemon, &guest(n), &[]));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    let uid = rustix::process::geteuid().as_raw();
    daemon.kill();
    daemon.restart();
    let back = |daemon: &Daemon, client: &Client| {
        daemon.wait_merged(client.pid(), PAGES);
        domain(daemon, client)["name"].as_str().unwrap().to_owned()
    };
    for client in &clients {
        assert_eq!(back(&daemon, client), format!("tenant:mine@{uid}"));
    }
    assert_eq!(daemon.status()["pages_shared"], PAGES, "the store was taken back");

    // The state file is that of another domain: nothing of it is taken, and nothing is lost.
    daemon.kill();
    std::fs::write(daemon.dir.path().join("config.toml"), rule("other")).unwrap();
    daemon.restart();
    for client in &mut clients {
        let known = eventually("it is a client again", Duration::from_secs(40), || daemon.client(client.pid()));
        assert_eq!(known["rule"], "[[tenants]] 1: manager = \"libvirt\", domain = \"other\"");
        client.go();
    }
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains("made for another domain; not taken"), "{log}");
    clients.iter_mut().for_each(Client::kill);
}

/// What the control socket gives this process, as the guests' user, of a client: each request, and
/// whether it has an answer about it.
fn ask(asked: &str) -> Vec<(&'static str, bool)> {
    let (directory, pid) = asked.split_once(' ').unwrap();
    let (place, pid) = ([PathBuf::from(directory)], pid.parse::<i32>().unwrap());
    give_up_privileges(GUESTS).unwrap();
    fn done<T>(result: Result<T, Error>) -> bool {
        !matches!(result, Err(Error::NoClient(_)))
    }
    let (status, sharing) = (client::status(&place).unwrap(), client::sharing(&place).unwrap());
    let sharers = || sharing.domains.iter().flat_map(|domain| &domain.clients);
    vec![
        ("status", status.domains.iter().flat_map(|domain| &domain.clients).any(|client| client.pid == pid)),
        ("sharing", sharers().any(|client| client.pid == pid)),
        ("contents", sharing.domains.iter().any(|domain| !domain.contents.is_empty())),
        ("map", done(client::map(&place, pid))),
        ("dirty", done(client::dirty(&place, &[pid]))),
        ("dirty of all", client::dirty(&place, &[]).unwrap().iter().any(|client| client.pid == pid)),
        ("pause", done(client::pause(&place, pid))),
        ("resume", done(client::resume(&place, pid))),
        ("freeze", matches!(Freeze::ask(&place, pid, Duration::ZERO), Ok(Some(_)))),
        ("detach", done(client::detach(&place, pid, |_, _| {}))),
    ]
}

#[test]
fn a_process_of_one_tenant_is_told_nothing_of_anothers_clients_and_can_do_nothing_to_them() {
    if let Ok(asked) = std::env::var(ENV_ASKS) {
        return ask(&asked).iter().for_each(|(what, has)| println!("\ntold {what}: {has}"));
    }
    let mut groups = match Groups::new() {
        Ok(groups) => groups,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::start();
    std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let slice = |tenant: &str| format!("machine.slice/machine-pageone{tenant}.slice");
    let guest = |tenant: &str, n: u32| format!("{}/machine-qemu\\x2d{n}\\x2dx.scope", slice(tenant));
    let mut own = [1, 2].map(|n| groups.client_of(&daemon, &guest("a", n), &[], GUESTS));
    own.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    let pid = own[0].pid();
    let mut told = |group: &str| {
        let mut run = Command::new(std::env::current_exe().unwrap());
        let test = "domains::a_process_of_one_tenant_is_told_nothing_of_anothers_clients_and_can_do_nothing_to_them";
        run.args(["--exact", test, "--nocapture"]);
        let mut command = groups.command(group, &run);
        let out = command.env(ENV_ASKS, format!("{} {pid}", daemon.dir.path().display())).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let told = said.lines().filter_map(|line| line.strip_prefix("told ")?.split_once(": "));
        let told: Vec<(String, bool)> = told.map(|(what, has)| (what.into(), has == "true")).collect();
        assert_eq!(told.len(), 10, "{said}{}", String::from_utf8_lossy(&out.stderr));
        told
    };
    for (what, has) in told(&guest("b", 3)) {
        assert!(!has, "{what}: another tenant's process");
    }
    let known = daemon.client(pid).unwrap();
    assert_eq!((&known["state"], &known["pages_merged"]), (&"merging".into(), &PAGES.into()), "nothing was done to it");
    for (what, has) in told(&guest("a", 4)) {
        assert_eq!(has, what != "contents", "{what}: a process of its own tenant");
    }
    own.iter_mut().for_each(|client| {
        client.go();
        client.kill();
    });
}
