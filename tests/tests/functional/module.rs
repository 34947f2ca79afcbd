//! Guests whose RAM lies in a mount of `pageonefs`: no agent, and memory that others may map.
//! `make test-module` runs these in a host that has the module.

mod alone;
mod both;

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use e2e::{Daemon, Guest, eventually, recycler_guests, recycler_words, skipped};
use kmem::pageonefs::MountInfo;
use serde_json::Value;

use crate::recycling::finish;

const MEMORY: u32 = 192;

/// The mount to test in, and a guest's words.
fn here() -> Option<(MountInfo, Vec<String>)> {
    let Some(mount) = kmem::pageonefs::mounts().unwrap().into_iter().next() else {
        skipped("pageonefs is not mounted: `make test-module` boots a host with it");
        return None;
    };
    let words = Guest::words(MEMORY).inspect_err(|why| skipped(why)).ok()?;
    Some((mount, words))
}

fn start(daemon: &Daemon, words: &[String]) -> Guest {
    let mut command = daemon.run(&["--backend", "module"]);
    command.args(words);
    Guest::start(command)
}

/// The domain of the mount, as the daemon tells.
fn domain(daemon: &Daemon, mount: &MountInfo) -> Option<Value> {
    let status = daemon.try_status()?;
    let name = if mount.domain.is_empty() { mount.path.display().to_string() } else { mount.domain.clone() };
    let name = format!("pageonefs:{name}");
    status["domains"].as_array()?.iter().find(|domain| domain["name"] == name.as_str()).cloned()
}

fn merged(daemon: &Daemon, pid: i32) -> u64 {
    daemon.client(pid).and_then(|client| client["pages_merged"].as_u64()).unwrap_or(0)
}

/// What `doctor` says of the module, of the mount and of a guest in it.
fn doctor(daemon: &Daemon, mount: &MountInfo, pid: i32) {
    let output = daemon.pageone(&["doctor", "--json", &pid.to_string()]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let check = |of: &Value, name: &str| {
        let found = of.as_array().unwrap().iter().find(|check| check["check"] == name);
        found.unwrap_or_else(|| panic!("no {name}: {report}")).clone()
    };
    let module = check(&report["host"], "module");
    assert!(module["found"].as_str().unwrap().contains("is loaded, and taints the kernel (O"), "{module}");
    let of_mount = check(&report["host"], "module: mount");
    let begin = format!("{}: {}, ", mount.path.display(), mount.domain);
    assert!(of_mount["verdict"] == "ok" && of_mount["found"].as_str().unwrap().starts_with(&begin), "{of_mount}");
    assert_eq!(check(&report["host"], "module: daemon")["verdict"], "ok", "{report}");
    let guest = &report["guests"][0]["checks"];
    let memory = check(guest, "memory");
    assert!(memory["found"].as_str().unwrap().ends_with("whose pages merge"), "{memory}");
    assert!(guest.as_array().unwrap().iter().all(|check| check["verdict"] != "blocks"), "{guest}");
    println!("{module}, {of_mount}, {guest}");
}

#[test]
fn guests_are_merged_below_their_mappings_and_keep_every_byte() {
    let Some((mount, words)) = here() else { return };
    let mut daemon = Daemon::with(&["--merge-period", "1"]);
    let mut guests: Vec<Guest> = (0..3).map(|_| start(&daemon, &words)).collect();
    for guest in &mut guests {
        guest.pass_rounds(1);
    }
    let before = eventually("three quarters of the guests' memory is merged", Duration::from_secs(180), || {
        guests.iter().all(|guest| merged(&daemon, guest.pid()) > 15_000).then(|| domain(&daemon, &mount))?
    });
    println!("{before}");
    assert!(before["pages_sharing"].as_u64() > Some(25_000), "{before}");
    assert!(before["general_profit"].as_i64() > Some(0), "{before}");
    for client in before["clients"].as_array().unwrap() {
        assert_eq!((client["state"].as_str(), client["mappings"].as_u64()), (Some("merging"), Some(0)), "{client}");
    }
    for guest in &mut guests {
        guest.pass_rounds(1);
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
        let pieces = maps.lines().filter(|line| line.contains(&mount.path.display().to_string())).count();
        assert_eq!(pieces, 1, "its RAM is one mapping still");
        assert!(!maps.contains("libpageone"), "there is no agent in it");
    }
    doctor(&daemon, &mount, guests[0].pid());
    // A daemon that was killed: the next one finds what is merged, and goes on.
    daemon.kill();
    guests[0].pass_rounds(1);
    daemon.restart();
    let mut new = start(&daemon, &words);
    new.pass_rounds(1);
    eventually("the new guest is merged with the old ones", Duration::from_secs(180), || {
        (merged(&daemon, new.pid()) > 15_000 && merged(&daemon, guests[0].pid()) > 15_000).then_some(())
    });
    let after = domain(&daemon, &mount).unwrap();
    let frames = |domain: &Value| domain["pages_shared"].as_u64().unwrap();
    assert!(frames(&after) < frames(&before) + 8_000, "its contents were known: {before} {after}");
    new.pass_rounds(1);
    // What ends takes nothing with it.
    guests.remove(0).kill();
    guests[0].pass_rounds(1);
    new.pass_rounds(1);
    eventually("the guest that ended is gone", Duration::from_secs(60), || {
        (domain(&daemon, &mount)?["clients"].as_array()?.len() == 3).then_some(())
    });
    drop((guests, new));
    eventually("nothing is left", Duration::from_secs(60), || {
        let domain = domain(&daemon, &mount)?;
        (domain["pages_shared"] == 0 && domain["known_contents"] == 0).then_some(())
    });
}

#[test]
fn a_guest_with_an_agent_and_one_in_a_file_have_the_same_memory() {
    let Some((_, words)) = here() else { return };
    if let Some(release) = kmem::pagemap::too_old() {
        return skipped(&format!("there are no agents on Linux {release}"));
    }
    let mounted = both::Mounted::new("uid-0");
    let mut daemon = Daemon::with(&["--merge-period", "1"]);
    let start = |daemon: &Daemon, options: &[&str]| {
        let mut command = daemon.run(options);
        command.args(&words);
        Guest::start(command)
    };
    let mut guests =
        [start(&daemon, &["--backend", "module", "--domain", "uid-0"]), start(&daemon, &[]), start(&daemon, &[])];
    guests.iter_mut().for_each(|guest| guest.pass_rounds(1));
    let path = mounted.path().display().to_string();
    let shared = eventually("half of a guest's memory is in all three", Duration::from_secs(180), || {
        let of_file = both::memory_of(guests[0].pid(), &path);
        let of_agents = [&guests[1], &guests[2]].map(|guest| both::memory_of(guest.pid(), both::STORE));
        let found = of_file.iter().filter(|page| of_agents.iter().all(|of| of.contains(page))).count();
        (found > 10_000).then_some(found)
    });
    println!("{shared} pages of memory are in a guest in a file and in two with an agent");
    guests.iter_mut().for_each(|guest| guest.pass_rounds(1));
    // Each goes on without the others, and without the daemon.
    daemon.kill();
    guests[1].kill();
    guests[0].pass_rounds(1);
    guests[2].pass_rounds(1);
    daemon.restart();
    guests[2].kill();
    guests[0].pass_rounds(1);
    guests[0].kill();
}

#[test]
fn a_mount_can_be_unmounted_while_the_daemon_runs_and_a_plain_file_is_told() {
    let Some((_, words)) = here() else { return };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let directory = tempfile::tempdir().unwrap();
    let run = |program: &str, words: &[&str]| {
        let status = std::process::Command::new(program).args(words).status().unwrap();
        assert!(status.success(), "{program} {words:?}");
    };
    let path = directory.path().to_str().unwrap();
    run("mount", &["-t", "pageonefs", "-o", "domain=other,size=1G", "none", path]);
    let file = std::fs::File::create(directory.path().join("ram")).unwrap();
    file.set_len(64 << 20).unwrap();
    let inode = file.metadata().unwrap().ino();
    let told = |daemon: &Daemon| {
        let status = daemon.try_status()?;
        let domain = status["domains"].as_array()?.iter().find(|domain| domain["name"] == "pageonefs:other")?.clone();
        let clients = domain["clients"].as_array()?;
        clients
            .iter()
            .find(|client| client["name"].as_str().is_some_and(|name| name.contains(&format!("{inode}"))))
            .cloned()
    };
    let client = eventually("the file is told, and whose it is", Duration::from_secs(30), || {
        told(&daemon).filter(|client| client["pid"] == std::process::id())
    });
    assert_eq!(client["region_bytes"], 64 << 20, "{client}");
    let of_mount = kmem::pageonefs::Mount::open(directory.path()).unwrap();
    let id = of_mount.files().unwrap()[0].id;
    while of_mount.make_plain(id) == Err(rustix::io::Errno::INTR) {}
    let why = eventually("why it is not merged", Duration::from_secs(30), || {
        told(&daemon)?["refused"].as_str().map(String::from)
    });
    assert!(why.contains("made plain"), "{why}");
    drop((of_mount, file));
    run("umount", &[path]);
    eventually("its domain is gone", Duration::from_secs(30), || {
        let status = daemon.try_status()?;
        status["domains"].as_array()?.iter().all(|domain| domain["name"] != "pageonefs:other").then_some(())
    });
    // A domain that no mount has.
    let mut command = daemon.run(&["--backend", "module", "--domain", "nowhere"]);
    let output = command.args(&words[..1]).arg("--version").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no mount of pageonefs has domain \"nowhere\""), "{said}");
}

/// Pages of the mount's files that are in memory and private, as the kernel counts them.
fn private_pages(mount: &MountInfo) -> u64 {
    let files = kmem::pageonefs::Mount::open(&mount.path).unwrap().files().unwrap();
    files.iter().map(|file| file.private_pages).sum()
}

#[test]
fn what_guests_free_is_punched_and_no_byte_is_lost_while_daemons_are_killed() {
    let Some((mount, _)) = here() else { return };
    let kernels = match recycler_guests() {
        Ok(kernels) => kernels,
        Err(why) => return skipped(&why),
    };
    let mut daemon = Daemon::with(&["--merge-period", "1", "--reclaim-period", "0.2"]);
    let guest = |daemon: &Daemon, work: &str| {
        let mut command = daemon.run(&["--backend", "module", "--ppr"]);
        command.args(recycler_words(&kernels[0], 256, &format!("STAY=1 PPR=1 PPR_ARGS=check=1 {work}")));
        Guest::start(command)
    };
    let mut guests: Vec<Guest> = (0..2).map(|_| guest(&daemon, "WORK=hungry_45")).collect();
    let idle = guest(&daemon, "WORK=none");
    let recycling = |daemon: &Daemon, pid| daemon.client(pid).map(|client| client["recycling"].clone());
    let total = |daemon: &Daemon, pid| recycling(daemon, pid)?["pages_recycled_total"].as_u64();
    eventually("what the idle guest does not need is punched", Duration::from_secs(180), || {
        let client = daemon.client(idle.pid())?;
        (client["pages_recycled"].as_u64()? > 20_000).then_some(())
    });
    println!("{}", daemon.client(idle.pid()).unwrap());
    // Daemons that are killed while pages are claimed: the next one releases them.
    for _ in 0..4 {
        eventually("the guests are recycled", Duration::from_secs(120), || {
            guests.iter().all(|guest| total(&daemon, guest.pid()) > Some(2000)).then_some(())
        });
        daemon.kill();
        daemon.restart();
    }
    for guest in &mut guests {
        let stat = finish(guest, 45);
        println!("{}: {}", guest.pid(), daemon.client(guest.pid()).unwrap());
        println!("waits {} of {} leaves, longest {} us", stat("waits"), stat("leaves"), stat("wait_longest_ns") / 1000);
        assert_eq!(stat("missed"), 0, "an allocation was not seen");
    }
    // The idle guest's kernel takes 256 MiB for its own, and holds less than a quarter.
    drop(guests);
    eventually("the idle guest's file is small", Duration::from_secs(60), || {
        (private_pages(&mount) < 16_384).then_some(())
    });
    let text = daemon.pageone(&["status"]).output().unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("free pages: "), "{text}");
    drop(idle);
    eventually("nothing is left", Duration::from_secs(60), || (private_pages(&mount) == 0).then_some(()));
}

#[test]
fn a_guest_in_a_file_is_saved_loaded_and_migrated_while_recycling_is_paused() {
    if here().is_some() {
        crate::pausing::save_load_and_migrate("module");
    }
}
