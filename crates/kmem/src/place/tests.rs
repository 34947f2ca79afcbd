use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use super::*;
use crate::account::Account;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: only root starts programs in others' places");
    }
    is_root
}

#[test]
fn what_a_program_has_started_ends_with_it() {
    if !is_root() {
        return;
    }
    let mut command = Command::new("sh");
    command.args(["-c", "setsid sleep 61.4711 & echo started; wait"]).stdout(Stdio::piped());
    let mut child = spawn_alone(&mut command).unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let sleeps = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let words = all.filter_map(|entry| read_to_string(entry.path().join("cmdline")).ok());
        words.filter(|words| words == "sleep\x0061.4711\0").count()
    };
    while sleeps() == 0 {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(sleeps(), 0);
    // This thread is as it was.
    std::thread::spawn(|| ()).join().unwrap();
}

#[test]
fn a_program_is_in_the_groups_of_another_and_ended_before_it() {
    if !is_root() {
        return;
    }
    let top = read_to_string("/proc/self/mountinfo").unwrap();
    let top = top.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
    let Some(top) = top else { return println!("SKIPPED: no control groups of version 2") };
    let group = Path::new(top).join(format!("pageone-test-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir(&group) {
        return println!("SKIPPED: no control group can be made: {error}");
    }
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    std::fs::write(group.join("cgroup.procs"), other.id().to_string()).unwrap();
    let mut command = Command::new("cat");
    Place::of(other.id()).unwrap().start(command.args(["/proc/self/cgroup", "/proc/self/oom_score_adj"]));
    Account { uid: 65534, gid: 65534, groups: Vec::new(), capabilities: 0 }.start(&mut command);
    let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    std::fs::remove_dir(&group).unwrap();
    let name = group.file_name().unwrap().to_str().unwrap();
    assert!(said.contains(&format!("/{name}\n")) && said.ends_with("\n1000\n"), "{said}");
}

#[test]
fn a_process_with_mounts_or_networks_of_its_own_is_elsewhere() {
    ["-m", "-n"].into_iter().for_each(is_elsewhere_with);
}

fn is_elsewhere_with(option: &str) {
    let mut other = Command::new("unshare");
    other.args([option, "sh", "-c", "echo started; read line"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut other = other.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let found = is_elsewhere(other.id());
    drop(other.stdin.take());
    if !other.wait().unwrap().success() && line.is_empty() {
        return println!("SKIPPED: no mounts or networks of one's own here");
    }
    assert!(found.unwrap() && !is_elsewhere(std::process::id()).unwrap());
}

#[test]
fn a_label_is_asked_for_without_its_mode() {
    assert_eq!(without_mode("libvirt-1-2 (enforce)\n"), "libvirt-1-2");
    assert_eq!(without_mode("system_u:system_r:svirt_t:s0:c1,c2\0"), "system_u:system_r:svirt_t:s0:c1,c2");
}
