//! Guests that are started as Proxmox VE starts them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use e2e::{Daemon, Guest, eventually, program, skipped};

/// The words of `qm showcmd`, for a guest without a disk whose configuration has `kvm: 0` and
/// `args:` with a kernel of ours. Files of `/var/run/qemu-server` are in `run`. `-id 100` is left
/// out: only Proxmox' own QEMU has that option.
fn showcmd(run: &Path, demo: &[String], machine: &str) -> Vec<String> {
    let run = run.display();
    let of = |option: &str| demo[demo.iter().position(|word| word == option).unwrap() + 1].clone();
    let mut words = [
        "-name",
        "web,debug-threads=on",
        "-no-shutdown",
        "-chardev",
        &format!("socket,id=qmp,path={run}/100.qmp,server=on,wait=off"),
        "-mon",
        "chardev=qmp,mode=control",
        "-chardev",
        &format!("socket,id=qmp-event,path={run}/qmeventd.sock,reconnect=5"),
        "-mon",
        "chardev=qmp-event,mode=control",
        "-pidfile",
        &format!("{run}/100.pid"),
        "-daemonize",
        "-smbios",
        "type=1,uuid=8b2cbc1e-3a46-4a05-9d0f-8c05bb6e1c0e",
        "-smp",
        "1,sockets=1,cores=1,maxcpus=1",
        "-nodefaults",
        "-boot",
        "menu=on,strict=on,reboot-timeout=1000",
        "-vnc",
        &format!("unix:{run}/100.vnc,password=on"),
        "-cpu",
        "qemu64,-cx16",
        "-m",
        "256",
        "-device",
        "pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e",
        "-device",
        "vmgenid,guid=54d1c06c-8f5b-440f-b5b2-6eab1380e13d",
        "-device",
        "piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2",
        "-device",
        "usb-tablet,id=tablet,bus=uhci.0,port=1",
        "-chardev",
        &format!("file,id=serial0,path={run}/100.console"),
        "-device",
        "isa-serial,chardev=serial0",
        "-device",
        "virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on",
        "-machine",
        machine,
    ]
    .map(str::to_owned)
    .to_vec();
    for option in ["-kernel", "-initrd", "-append"] {
        words.extend([option.to_owned(), of(option)]);
    }
    words
}

/// A guest that runs; it is killed at the end.
struct Running(i32);

impl Drop for Running {
    fn drop(&mut self) {
        e2e::signal_process(self.0, libc::SIGKILL);
    }
}

/// `qm start`: the wrapper in the place of /usr/bin/kvm. Gives what it said, and the guest.
fn start(daemon: &Daemon, run: &Path, demo: &[String], machine: &str) -> (String, Running) {
    let kvm = run.join("kvm");
    if !kvm.exists() {
        std::os::unix::fs::symlink(program("qemu-system-x86_64-pageone"), &kvm).unwrap();
    }
    let said = run.join("said");
    let mut command = Command::new(&kvm);
    command.args(showcmd(run, demo, machine)).stdin(Stdio::null()).stderr(std::fs::File::create(&said).unwrap());
    command.env("PAGEONE_QEMU", &demo[0]).env("PAGEONE_AGENT", program("libpageone_agent.so"));
    command.env("PAGEONE_SOCKET", daemon.dir.path().join("agent.sock"));
    assert!(command.status().unwrap().success(), "{}", std::fs::read_to_string(&said).unwrap());
    let pid = std::fs::read_to_string(run.join("100.pid")).unwrap();
    (std::fs::read_to_string(said).unwrap(), Running(pid.trim().parse().unwrap()))
}

/// Waits until the guest has checked all of its files twice, and found them right.
fn works(run: &Path) {
    eventually("the guest's rounds", Duration::from_secs(240), || {
        let console = std::fs::read(run.join("100.console")).ok()?;
        let console = String::from_utf8_lossy(&console);
        assert!(!console.contains("CORRUPT"), "{console}");
        (console.lines().filter(|line| line.contains("PAGEONE-ROUND") && line.contains("PASS")).count() >= 2)
            .then_some(())
    });
}

#[test]
fn a_guest_that_proxmox_starts_is_merged_unless_ksm_is_not_allowed() {
    let demo = match Guest::words(256) {
        Ok(demo) => demo,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::start();
    let run = tempfile::tempdir().unwrap();
    let (said, guest) = start(&daemon, run.path(), &demo, "accel=tcg,type=pc");
    assert_eq!(said, "", "nothing is to be said");
    eventually("pages of it are merged", Duration::from_secs(120), || {
        (daemon.client(guest.0)?["pages_merged"].as_u64()? + daemon.client(guest.0)?["pages_zero"].as_u64()? > 5000)
            .then_some(())
    });
    works(run.path());
    drop(guest);

    // `allow-ksm: 0`
    let run = tempfile::tempdir().unwrap();
    let (said, guest) = start(&daemon, run.path(), &demo, "accel=tcg,mem-merge=off,type=pc");
    assert!(said.contains("this guest is not merged: mem-merge=off"), "{said}");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.0)).unwrap();
    assert!(!maps.contains("libpageone_agent"), "{maps}");
    works(run.path());
}
