//! Virtual machine monitors that are linked with the agent's library, and not started in any
//! special way.

#![allow(unsafe_code)] // Asks KVM.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, program, signal_process, skipped};

/// A command that finds the agent's library as an installed one is found.
fn linked(program: &Path, daemon: &Daemon) -> Command {
    let library = e2e::program("libpageone_agent.so");
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library.parent().unwrap()).arg(daemon.dir.path().join("agent.sock"));
    command
}

fn ask(client: &mut Client, command: &str) -> String {
    client.tell(command);
    client.hear()
}

#[test]
fn a_linked_program_registers_memory_takes_it_back_and_stops() {
    const PAGES: u64 = (8 << 20) / 4096;
    let daemon = Daemon::start();
    let mut clients = [0, 1].map(|_| Client::spawn(linked(&program("pageone-linked-client"), &daemon)));
    for client in &mut clients {
        client.expect("ready");
        assert_eq!(ask(client, "stop"), "no agent runs in this process");
        assert_eq!(ask(client, "start"), "ok");
        assert!(ask(client, "small").starts_with("4096 bytes at 0x"));
        assert!(ask(client, "odd").contains("whole pages"));
        assert_eq!(ask(client, "register"), "ok");
        assert_eq!(ask(client, "register"), "ok", "once more is no error");
    }
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));

    let [one, other] = &mut clients;
    assert_eq!(ask(one, "unregister"), "ok");
    eventually("nothing of it is managed", Duration::from_secs(10), || {
        daemon.client(one.pid()).is_none_or(|known| known["regions"].as_array().is_none_or(Vec::is_empty)).then_some(())
    });
    assert_eq!(ask(one, "register"), "ok");
    daemon.wait_merged(one.pid(), PAGES);

    assert_eq!(ask(other, "stop"), "ok");
    eventually("it is no client", Duration::from_secs(10), || daemon.client(other.pid()).is_none().then_some(()));
    assert_eq!(ask(other, "stop"), "no agent runs in this process");
    assert_eq!(ask(other, "register"), "the agent of this process has ended");
    assert_eq!(ask(other, "start"), "the agent of this process has ended");
    // Who has waited for a thread goes on before the kernel has forgotten it.
    eventually("its threads have ended", Duration::from_secs(60), || {
        (std::fs::read_dir(format!("/proc/{}/task", other.pid())).unwrap().count() == 1).then_some(())
    });
    assert_eq!(clients.map(|mut client| client.finish()), [Some(0); 2]);
}

/// Without a daemon, and with one that has gone, a program can stop the agent.
#[test]
fn a_program_stops_the_agent_while_no_daemon_answers() {
    let mut daemon = Daemon::start();
    let mut client = Client::spawn(linked(&program("pageone-linked-client"), &daemon));
    client.expect("ready");
    assert_eq!(ask(&mut client, "start"), "ok");
    assert_eq!(ask(&mut client, "register"), "ok");
    eventually("the daemon knows it", Duration::from_secs(10), || daemon.client(client.pid()));
    daemon.kill();
    // The agent waits until it tries again.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(ask(&mut client, "stop"), "ok");
    assert_eq!(client.finish(), Some(0));
}

/// The example, with the C compiler that rustc links with.
fn example(directory: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let library = program("libpageone_agent.so");
    let built = directory.join("vmm");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-o"]).arg(&built).arg(root.join("examples/vmm.c"));
    cc.arg("-I").arg(root.join("include")).arg("-L").arg(library.parent().unwrap()).arg("-lpageone_agent");
    assert!(cc.status().unwrap().success());
    built
}

/// Whether KVM makes virtual machines here.
fn machine() -> std::io::Result<()> {
    /// Documentation/virt/kvm/api.rst, KVM_CREATE_VM.
    const CREATE_VM: libc::Ioctl = 0xae01;
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: this request takes a number, 0 for the default type, and makes a descriptor.
    match unsafe { libc::ioctl(kvm.as_raw_fd(), CREATE_VM, 0) } {
        -1 => Err(std::io::Error::last_os_error()),
        machine => {
            // SAFETY: the new descriptor, which nobody else has.
            drop(unsafe { OwnedFd::from_raw_fd(machine) });
            Ok(())
        }
    }
}

#[test]
fn the_example_on_kvm_merges_its_guests() {
    const PAGES: u64 = (30 << 20) / 4096;
    if let Err(e) = machine() {
        return skipped(&format!("/dev/kvm makes no virtual machine: {e}"));
    }
    let directory = tempfile::tempdir().unwrap();
    let vmm = example(directory.path());
    let daemon = Daemon::start();
    let mut clients = [0, 1].map(|_| Client::spawn(linked(&vmm, &daemon)));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    for client in &mut clients {
        // What it printed while it was merged, and what comes now.
        (0..20).for_each(|_| client.expect("sum f2840000, right"));
        signal_process(client.pid(), libc::SIGTERM);
        let last = eventually("it ends", Duration::from_secs(30), || {
            let line = client.hear();
            (line != "sum f2840000, right").then_some(line)
        });
        assert_eq!(last, "given back, all bytes right");
    }
    assert_eq!(clients.map(|mut client| client.finish()), [Some(0); 2]);
}
