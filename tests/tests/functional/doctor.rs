//! `pageone doctor` on guests that run.

use std::process::Command;
use std::time::Duration;

use e2e::{Daemon, Guest, eventually, skipped};
use serde_json::Value;

const MEMORY: u32 = 192;

/// A guest of a command; only its QEMU matters, it need not boot.
fn start(mut command: Command, words: &[String]) -> Guest {
    command.args(words);
    Guest::start(command)
}

/// Exit code, and what `doctor --json` says of these processes; of all guests without any.
fn doctor(daemon: &Daemon, pids: &[i32]) -> (Option<i32>, Value) {
    let mut command = daemon.pageone(&["doctor", "--json"]);
    let out = command.args(pids.iter().map(i32::to_string)).output().unwrap();
    let report = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    (out.status.code(), report)
}

fn guest(report: &Value, pid: i32) -> &Value {
    let guests = report["guests"].as_array().unwrap();
    guests.iter().find(|guest| guest["pid"] == pid).unwrap_or_else(|| panic!("no {pid} in {report}"))
}

fn check<'r>(guest: &'r Value, name: &str) -> &'r Value {
    let checks = guest["checks"].as_array().unwrap();
    checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name} in {guest}"))
}

fn text<'r>(check: &'r Value, part: &str) -> &'r str {
    check[part].as_str().unwrap_or_else(|| panic!("no {part} in {check}"))
}

#[test]
fn doctor_says_what_keeps_each_guest_from_merging() {
    let words = match Guest::words(MEMORY) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let bare = |words: &[String]| {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        Guest::start(command)
    };
    let sandbox = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];
    let backend = format!("memory-backend-memfd,id=ram,share=on,size={MEMORY}M");
    let shared = ["-object", &backend, "-machine", "memory-backend=ram"];
    let with = |more: &[&str]| words.iter().cloned().chain(more.iter().map(|w| w.to_string())).collect::<Vec<_>>();

    let daemon = Daemon::start();
    let merged = start(daemon.run(&[]), &with(&sandbox));
    let second = start(daemon.run(&[]), &with(&["-name", "guest=second"]));
    let of_shared_memory = start(daemon.run(&[]), &with(&shared));
    let without_agent = bare(&words);
    let opted_out = bare(&with(&["-machine", "mem-merge=off"]));
    for pid in [merged.pid(), second.pid()] {
        daemon.wait_merged(pid, 1);
    }
    let has_memory = |pid: i32| {
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        smaps.contains("memory-backend-memfd")
            || smaps.lines().any(|line| line.ends_with(" mg") || line.ends_with(" mg "))
    };
    for guest in [&of_shared_memory, &without_agent] {
        eventually("QEMU has its memory", Duration::from_secs(20), || has_memory(guest.pid()).then_some(()));
    }

    let (code, report) = doctor(&daemon, &[merged.pid(), second.pid()]);
    assert_eq!(code, Some(0), "{report}");
    let found = guest(&report, merged.pid());
    assert!(found["checks"].as_array().unwrap().iter().all(|check| check["verdict"] != "blocks"), "{found}");
    assert!(text(check(found, "merging"), "found").starts_with("merging: "), "{found}");
    let domain = text(check(found, "domain"), "found");
    assert!(domain.contains(&format!("second ({})", second.pid())), "{domain}");
    assert!(text(check(found, "sandbox"), "found").contains("let the agent work"), "{found}");
    assert!(text(check(found, "memory"), "found").ends_with(" MiB private"), "{found}");
    assert_eq!(guest(&report, second.pid())["name"], "second");

    let (code, report) = doctor(&daemon, &[of_shared_memory.pid()]);
    assert_eq!(code, Some(1), "{report}");
    let memory = check(guest(&report, of_shared_memory.pid()), "memory");
    assert_eq!(memory["verdict"], "blocks", "{memory}");
    assert!(text(memory, "found").contains(&format!("{MEMORY} MiB shared (/memfd:memory-backend-memfd)")), "{memory}");
    assert!(text(memory, "remedy").contains("memory-backend-ram"), "{memory}");

    // All guests of the host: those of others may be among them.
    let (code, report) = doctor(&daemon, &[]);
    assert_eq!(code, Some(1), "{report}");
    let found = guest(&report, without_agent.pid());
    assert!(text(found, "by").contains("qemu-system-x86_64"), "{found}");
    let merging = check(found, "merging");
    assert_eq!((&merging["verdict"], text(merging, "found")), (&Value::from("blocks"), "the agent is not in it"));
    assert!(text(merging, "remedy").contains("pageone run"), "{merging}");
    assert_eq!(check(guest(&report, opted_out.pid()), "merging")["verdict"], "note", "{report}");

    let out = daemon.pageone(&["doctor", "--json", "second"]).output().unwrap();
    let report: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    assert_eq!(guest(&report, second.pid())["name"], "second");

    let out = daemon.pageone(&["doctor", &without_agent.pid().to_string()]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("\n  BLOCKS  merging            the agent is not in it → start it again"), "{text}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("1 of 1 guest cannot"), "{out:?}");
}
