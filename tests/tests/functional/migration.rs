//! Live migration of merged guests, from one QEMU to another on this host.

use std::path::Path;
use std::time::Duration;

use e2e::{Daemon, Guest, Qmp, eventually, skipped};
use serde_json::{Value, json};

const MEMORY: u32 = 192;

/// A guest under `pageone run` with a monitor.
struct Machine {
    guest: Guest,
    qmp: Qmp,
}

impl Machine {
    /// `more`: further options of QEMU.
    fn start(daemon: &Daemon, words: &[String], socket: &Path, more: &[&str]) -> Self {
        let mut command = daemon.run(&[]);
        command.args(words).args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]).args(more);
        let guest = Guest::start(command);
        Self { qmp: Qmp::connect(socket), guest }
    }

    fn set(&mut self, capability: &str) {
        let on = json!({ "capabilities": [{ "capability": capability, "state": true }] });
        self.qmp.execute("migrate-set-capabilities", on);
    }

    /// The state of its migration, as QEMU calls it.
    fn migration(&mut self) -> Option<String> {
        let answer = self.qmp.ask("query-migrate", json!({}))?;
        Some(answer["return"]["status"].as_str().unwrap_or("none").to_string())
    }

    fn runs(&mut self) -> bool {
        let status = self.qmp.ask("query-status", json!({}));
        status.is_some_and(|answer| answer["return"]["running"] == true)
    }

    /// The bytes of its memory.
    fn memory(&mut self, file: &Path) -> Vec<u8> {
        self.qmp.execute("pmemsave", json!({ "val": 0, "size": MEMORY << 20, "filename": file }));
        std::fs::read(file).unwrap()
    }
}

/// A merged guest that works, and another QEMU with the agent that waits for it.
struct Pair {
    source: Machine,
    target: Machine,
    /// Where the target waits.
    uri: String,
    dir: tempfile::TempDir,
}

impl Pair {
    fn start(daemon: &Daemon, words: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut source = Machine::start(daemon, words, &dir.path().join("source"), &[]);
        source.guest.pass_rounds(1);
        daemon.wait_merged(source.guest.pid(), 10_000);
        // -S: the guest stays as it arrived until it is told to go on.
        let target = Machine::start(daemon, words, &dir.path().join("target"), &["-S", "-incoming", "defer"]);
        let uri = format!("unix:{}", dir.path().join("stream").display());
        Self { source, target, uri, dir }
    }

    fn migrate(&mut self) {
        self.target.qmp.execute("migrate-incoming", json!({ "uri": self.uri }));
        self.source.qmp.execute("migrate", json!({ "uri": self.uri }));
    }

    fn wait(&mut self, state: &str) {
        eventually(&format!("migration is {state}"), Duration::from_secs(120), || {
            let now = self.source.migration()?;
            assert!(now == state || !["failed", "cancelled"].contains(&now.as_str()), "{now}");
            (now == state).then_some(())
        });
    }

    /// Pages that differ between the two.
    fn differing_pages(&mut self) -> usize {
        let left = self.source.memory(&self.dir.path().join("left"));
        let right = self.target.memory(&self.dir.path().join("right"));
        assert_eq!(left.len(), (MEMORY as usize) << 20);
        left.chunks(4096).zip(right.chunks(4096)).filter(|(left, right)| left != right).count()
    }
}

fn words() -> Option<Vec<String>> {
    Guest::words(MEMORY).inspect_err(|why| skipped(why)).ok()
}

fn merged(daemon: &Daemon, pid: i32) -> u64 {
    let of = |client: &Value| client["pages_merged"].as_u64().unwrap_or(0) + client["pages_zero"].as_u64().unwrap_or(0);
    daemon.client(pid).as_ref().map_or(0, of)
}

#[test]
fn a_merged_guest_migrates_under_load_and_merges_again_where_it_arrives() {
    let Some(words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let mut pair = Pair::start(&daemon, &words);
    pair.migrate();
    pair.wait("completed");
    assert_eq!(pair.differing_pages(), 0);
    pair.target.qmp.execute("cont", json!({}));
    pair.target.guest.pass_rounds(2);
    assert!(!pair.source.runs());
    // The daemon has both until the source ends.
    pair.source.guest.kill();
    eventually("it is merged again", Duration::from_secs(120), || {
        (merged(&daemon, pair.target.guest.pid()) > 15_000).then_some(())
    });
    pair.target.guest.pass_rounds(2);
}

/// Postcopy needs userfaultfd for the memory of the QEMU that the guest arrives in.
fn postcopy(pair: &mut Pair) {
    pair.source.set("postcopy-ram");
    pair.target.set("postcopy-ram");
    // Slow enough that most of it comes afterwards.
    pair.source.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 4 << 20 }));
    pair.migrate();
    pair.wait("active");
    pair.source.qmp.execute("migrate-start-postcopy", json!({}));
}

#[test]
fn a_guest_arrives_by_postcopy_in_a_qemu_that_was_detached() {
    let Some(words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let mut pair = Pair::start(&daemon, &words);
    let target = pair.target.guest.pid();
    eventually("the daemon knows it", Duration::from_secs(60), || daemon.client(target));
    let out = daemon.pageone(&["detach", &target.to_string()]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    postcopy(&mut pair);
    pair.target.qmp.execute("cont", json!({}));
    pair.wait("completed");
    pair.target.guest.pass_rounds(3);
}

/// QEMU registers all of the guest's memory with a userfaultfd of its own, once the guest has
/// stopped here: if that fails, there is a guest nowhere.
#[test]
fn a_guest_arrives_by_postcopy_in_a_qemu_with_the_agent_and_its_memory_leaves_management() {
    let Some(words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let mut pair = Pair::start(&daemon, &words);
    postcopy(&mut pair);
    pair.target.qmp.execute("cont", json!({}));
    pair.wait("completed");
    pair.target.guest.pass_rounds(3);
    assert_eq!(merged(&daemon, pair.target.guest.pid()), 0, "{}", daemon.status());
}
