//! File systems without room: programs and guests run on, merged where they can be, and one
//! sentence says what could not be written.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use e2e::{Client, Daemon, eventually, program, skipped};

/// A file system of its own, 256 KiB in memory.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=256k", "pageone-test"]).arg(dir.path());
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        if !mounted {
            skipped("only root can mount a file system");
        }
        mounted.then_some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn rest(&self) -> PathBuf {
        self.path().join("rest")
    }

    /// Writes until nothing more can be.
    fn fill(&self) {
        let mut file = File::create(self.rest()).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        assert!(File::create(self.path().join("more")).unwrap().write_all(&[1]).is_err(), "it is full");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn a_daemon_whose_directory_is_full_merges_says_so_once_and_writes_its_state_when_it_can() {
    let Some(small) = Small::mount() else { return };
    let dir = tempfile::tempdir_in(small.path()).unwrap();
    let mut daemon = Daemon::within(dir, &["--merge-period", "0.1"], "direct_io_seconds = 0\n");
    // The last page of the log has room.
    small.fill();
    let mut clients = [(); 2].map(|()| daemon.scenario(&["hold", "4096", "2", "5"]));
    for client in &mut clients {
        client.expect("ready");
        daemon.wait_merged(client.pid(), 4000);
    }
    let state = daemon.dir.path().join("segments");
    let sentence = format!("cannot write {}: No space left on device", state.display());
    let log = daemon.dir.path().join("log");
    let told = || std::fs::read_to_string(&log).unwrap().matches(&sentence).count();
    eventually("it says so", Duration::from_secs(20), || (told() > 0).then_some(()));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(told(), 1, "once");
    clients.iter_mut().for_each(Client::go);

    std::fs::remove_file(small.rest()).unwrap();
    eventually("the state is written", Duration::from_secs(20), || {
        std::fs::read_to_string(&state).is_ok_and(|text| !text.is_empty()).then_some(())
    });
    daemon.kill();
    daemon.restart();
    for client in &mut clients {
        daemon.wait_merged(client.pid(), 4000);
        client.go();
    }
}

/// As with QEMU, whose standard error libvirt writes to a file.
#[test]
fn a_program_whose_log_is_full_is_merged() {
    let Some(small) = Small::mount() else { return };
    small.fill();
    let daemon = Daemon::start();
    let mut command = daemon.run(&[]);
    command.arg(program("pageone-test-client")).args(["hold", "4096", "2", "5"]).env("PAGEONE_LOG", "1");
    command.stderr(File::create(small.path().join("log")).unwrap());
    let mut client = Client::spawn(command);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4000);
    client.go();
    assert_eq!(client.finish(), Some(0));
}

#[test]
fn a_guest_runs_when_neither_the_wrappers_nor_runs_reason_can_be_written() {
    let Some(small) = Small::mount() else { return };
    small.fill();
    let full = || File::create(small.path().join("log")).unwrap();
    let nowhere = "/nonexistent/agent.sock";
    let mut command = Command::new(program("qemu-system-x86_64-pageone"));
    command.args(["-name", "guest=a", "-m", "64"]).env("PAGEONE_QEMU", "/bin/echo").env("PAGEONE_SOCKET", nowhere);
    let out = command.env("PAGEONE_AGENT", program("libpageone_agent.so")).stderr(full()).output().unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(0), &b"-name guest=a -m 64\n"[..]));
    let mut command = Command::new(program("pageone"));
    command.args(["--dir", "/nonexistent", "run", "--no-start", "--", "sh", "-c", "echo hello; exit 3"]);
    let out = command.stderr(full()).output().unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(3), &b"hello\n"[..]));
}

/// A command in a mount namespace where nothing can be created in `/run` and `/dev/shm`.
fn without_room(words: &[&str]) -> Command {
    let mounts = "for dir in /run /dev/shm; do mount -t tmpfs -o size=4k,nr_inodes=1 pageone-test $dir || exit 99; done; exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", mounts, "sh"]).arg(program("pageone")).args(words);
    command
}

#[test]
fn without_room_in_run_and_dev_shm_programs_run_and_are_told_why_they_are_not_merged() {
    let out = without_room(&["daemon"]).output().unwrap();
    if out.status.code() == Some(99) || text(&out).contains("unshare") {
        return skipped("only root can mount a file system");
    }
    assert!(!out.status.success());
    assert!(text(&out).contains("/run/pageone") && text(&out).contains("No space left on device"), "{}", text(&out));
    let out = without_room(&["run", "--", "sh", "-c", "echo hello; exit 3"]).output().unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(3), &b"hello\n"[..]), "{}", text(&out));
    println!("{}", text(&out));
    let said = text(&out);
    assert!(said.contains("runs without merging") && said.contains("No space left on device"), "{said}");
    // A daemon that runs, and a client to which there is no room: it needs none.
    let daemon = Daemon::start();
    let (dir, client) = (daemon.dir.path().display().to_string(), program("pageone-test-client").display().to_string());
    let words = ["--dir", &dir, "run", "--no-start", "--", &client, "hold", "4096", "2", "5"];
    let mut client = Client::spawn(without_room(&words));
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4000);
    client.go();
}
