//! Real guests under QEMU: they checksum their own files while their memory is merged.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use e2e::{Daemon, Guest, Qmp, eventually, program, skipped};
use serde_json::{Value, json};

const MEMORY: u32 = 192;

fn words() -> Option<Vec<String>> {
    Guest::words(MEMORY).inspect_err(|why| skipped(why)).ok()
}

/// As libvirt starts QEMU.
const SANDBOX: [&str; 2] = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

#[test]
fn guests_of_every_shape_merge_and_keep_every_byte() {
    let Some(words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "1"]);
    let mut plain = daemon.run(&[]);
    plain.args(&words);
    let mut sandboxed = daemon.run(&[]);
    sandboxed.args(&words).args(SANDBOX);
    // Two vCPUs, two memory backends, and the options in another order: -m last.
    let mut numa = daemon.run(&[]);
    let at = words.iter().position(|w| w == "-m").unwrap();
    numa.args(&words[..at]).args(&words[at + 2..]);
    numa.args([
        "-smp",
        "2",
        "-object",
        "memory-backend-ram,id=a,size=96M",
        "-object",
        "memory-backend-ram,id=b,size=96M",
    ]);
    numa.args(["-numa", "node,memdev=a,cpus=0", "-numa", "node,memdev=b,cpus=1", "-m", "192"]);
    // A shell script that starts QEMU.
    let mut shell = daemon.run(&[]);
    shell.args(["sh", "-c", "\"$@\"; exit $?", "sh"]).args(&words);
    let mut guests: Vec<Guest> = [plain, sandboxed, numa, shell].into_iter().map(Guest::start).collect();
    for guest in &mut guests {
        guest.pass_rounds(1);
    }
    let status = eventually("three quarters of the guests' memory is merged", Duration::from_secs(120), || {
        let status = daemon.status();
        let of =
            |client: &Value| client["pages_merged"].as_u64().unwrap_or(0) + client["pages_zero"].as_u64().unwrap_or(0);
        let clients = status["domains"][0]["clients"].as_array()?.clone();
        let sharing = status["pages_sharing"].as_u64();
        (clients.len() == 4 && clients.iter().all(|c| of(c) > 15_000) && sharing > Some(30_000)).then_some(status)
    });
    println!("{status}");
    for guest in &mut guests {
        guest.pass_rounds(2);
    }
}

/// An archive with the modules that a virtio device needs; the guest's init loads what it finds
/// there. The last of `names` is the device's own, which must be there.
fn device_initrd(words: &[String], directory: &Path, names: &[&str]) -> Result<String, String> {
    let after = |option: &str| words.iter().position(|w| w == option).map(|at| words[at + 1].clone());
    let (kernel, initrd) = (after("-kernel").unwrap(), after("-initrd").unwrap());
    let modules = Path::new(&kernel).parent().unwrap().join("modules");
    let root = directory.join("root");
    std::fs::create_dir_all(root.join("modules")).unwrap();
    let mut list = "modules\n".to_string();
    let bus = ["virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci"];
    for name in bus.iter().chain(names) {
        let module = modules.join(format!("{name}.ko"));
        if module.exists() {
            std::fs::copy(&module, root.join("modules").join(format!("{name}.ko"))).unwrap();
            list += &format!("modules/{name}.ko\n");
        } else if Some(name) == names.last() {
            return Err(format!("{} is missing; `scripts/deps.sh demo` fetches it", module.display()));
        }
    }
    let both = directory.join("initrd");
    std::fs::copy(initrd, &both).unwrap();
    let mut cpio = Command::new("busybox");
    cpio.args(["cpio", "-o", "-H", "newc"]).current_dir(&root);
    let archive = std::fs::OpenOptions::new().append(true).open(&both).unwrap();
    let mut cpio =
        cpio.stdin(std::process::Stdio::piped()).stdout(archive).stderr(std::process::Stdio::null()).spawn().unwrap();
    cpio.stdin.take().unwrap().write_all(list.as_bytes()).unwrap();
    assert!(cpio.wait().unwrap().success());
    Ok(both.display().to_string())
}

#[test]
fn a_balloon_inflates_and_deflates_over_merged_pages() {
    let Some(mut words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let directory = tempfile::tempdir().unwrap();
    let initrd = match device_initrd(&words, directory.path(), &["virtio_balloon"]) {
        Ok(initrd) => initrd,
        Err(why) => return skipped(&why),
    };
    let at = words.iter().position(|w| w == "-initrd").unwrap();
    words[at + 1] = initrd;
    let socket = directory.path().join("qmp");
    let start = |qmp: bool| {
        let mut command = daemon.run(&[]);
        command.args(&words).args(["-device", "virtio-balloon-pci"]);
        if qmp {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
        }
        Guest::start(command)
    };
    let (mut guest, mut other) = (start(true), start(false));
    guest.pass_rounds(1);
    other.pass_rounds(1);
    let merged = |pid| {
        let of = |c: &Value| c["pages_merged"].as_u64().unwrap_or(0) + c["pages_zero"].as_u64().unwrap_or(0);
        daemon.client(pid).as_ref().map_or(0, of)
    };
    let mut qmp = Qmp::connect(&socket);
    let actual = |qmp: &mut Qmp| qmp.execute("query-balloon", json!({}))["actual"].as_u64().unwrap() >> 20;
    assert_eq!(actual(&mut qmp), u64::from(MEMORY));
    for _ in 0..3 {
        eventually("the guest is merged", Duration::from_secs(120), || (merged(guest.pid()) > 15_000).then_some(()));
        qmp.execute("balloon", json!({ "value": 150u64 << 20 }));
        eventually("the balloon is inflated", Duration::from_secs(120), || (actual(&mut qmp) <= 155).then_some(()));
        guest.pass_rounds(1);
        qmp.execute("balloon", json!({ "value": u64::from(MEMORY) << 20 }));
        eventually("the balloon is deflated", Duration::from_secs(120), || {
            (actual(&mut qmp) >= u64::from(MEMORY)).then_some(())
        });
        guest.pass_rounds(2);
    }
    other.pass_rounds(1);
}

/// The kernel's own thread, and not QEMU, writes what arrives into the guest's memory.
#[test]
fn what_vhost_net_writes_into_merged_memory_arrives() {
    let Some(mut words) = words() else { return };
    for device in ["/dev/vhost-net", "/dev/net/tun"] {
        if let Err(why) = std::fs::OpenOptions::new().read(true).write(true).open(device) {
            return skipped(&format!("{device} cannot be opened ({why}): load vhost_net and tun, as root"));
        }
    }
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let directory = tempfile::tempdir().unwrap();
    let initrd = match device_initrd(&words, directory.path(), &["failover", "net_failover", "virtio_net"]) {
        Ok(initrd) => initrd,
        Err(why) => return skipped(&why),
    };
    let at = words.iter().position(|w| w == "-initrd").unwrap();
    words[at + 1] = initrd;
    // A network of the guest's own, so that the host's stays as it is.
    let mut command = daemon.run(&[]);
    command.args(["unshare", "--net", "--"]).args(&words);
    command.args(["-netdev", "tap,id=n,ifname=tap0,script=no,downscript=no,vhost=on"]);
    command.args(["-device", "virtio-net-pci,netdev=n"]);
    let mut guest = Guest::start(command);
    guest.pass_rounds(1);
    let network = format!("--net=/proc/{}/ns/net", guest.pid());
    let there = |words: &[&str]| {
        let mut command = Command::new("nsenter");
        command.args([&network, "--"]).args(words);
        command
    };
    for words in [["ip", "addr", "add", "10.7.0.1/24", "dev", "tap0"].as_slice(), &["ip", "link", "set", "tap0", "up"]]
    {
        assert!(there(words).status().unwrap().success(), "{words:?}");
    }
    for round in 0..5u8 {
        daemon.wait_merged(guest.pid(), 10_000);
        let bytes: Vec<u8> = (0..8u32 << 20).map(|i| (i / 4093) as u8 ^ i as u8 ^ round).collect();
        let file = directory.path().join("sent");
        std::fs::write(&file, &bytes).unwrap();
        let sum = Command::new("md5sum").arg(&file).output().unwrap().stdout;
        let heard = format!("PAGEONE-HEARD {}", String::from_utf8_lossy(&sum[..32]));
        eventually("the guest takes the bytes", Duration::from_secs(60), || {
            let mut send = there(&["bash", "-c", "exec cat > /dev/tcp/10.7.0.2/7"]);
            send.stdin(std::fs::File::open(&file).unwrap()).status().unwrap().success().then_some(())
        });
        eventually("they arrive", Duration::from_secs(60), || {
            guest.console().iter().any(|line| line.contains(&heard)).then_some(())
        });
        guest.pass_rounds(1);
    }
}

#[test]
fn a_detached_guest_goes_on() {
    let Some(words) = words() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let mut guests: Vec<Guest> = (0..2)
        .map(|_| {
            let mut command = daemon.run(&[]);
            command.args(&words);
            Guest::start(command)
        })
        .collect();
    guests.iter_mut().for_each(|g| g.pass_rounds(1));
    daemon.wait_merged(guests[0].pid(), 10_000);
    let out = daemon.pageone(&["detach", &guests[0].pid().to_string()]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // The page that it shared with the daemon goes when the connection has ended.
    eventually("nothing of the daemon's is mapped", Duration::from_secs(60), || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", guests[0].pid())).unwrap();
        (!maps.contains("memfd:pageone")).then_some(())
    });
    guests.iter_mut().for_each(|g| g.pass_rounds(2));
}

#[test]
fn the_demo_succeeds_and_its_summary_adds_up() {
    if words().is_none() {
        return;
    }
    let mut command = Command::new(program("pageone"));
    command.args(["demo", "--guests", "2", "--memory", "256", "--seconds", "25", "--merge-period", "1", "--json"]);
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    println!("{summary}");
    assert_eq!(summary["guests"], 2);
    assert_eq!(summary["integrity_failures"], 0);
    assert!(summary["integrity_checks"].as_u64() > Some(0));
    assert!(summary["pages_sharing"].as_u64() > Some(0));
    let (before, after) = (summary["used_before_mib"].as_f64().unwrap(), summary["used_after_mib"].as_f64().unwrap());
    assert!((summary["saved_fraction"].as_f64().unwrap() - (1.0 - after / before)).abs() < 0.01);
}
