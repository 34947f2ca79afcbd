//! Guests are called by their names wherever they are shown, and chosen by them.

use std::time::Duration;

use e2e::{Daemon, Guest, eventually, skipped};
use serde_json::Value;

const GUESTS: [(&str, &str); 2] =
    [("web-1", "11111111-2222-3333-4444-555555555551"), ("db\x1b[31m-2", "11111111-2222-3333-4444-555555555552")];

#[test]
fn two_guests_are_told_apart_by_name_and_uuid_on_every_screen() {
    let words = match Guest::words(192) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let daemon = Daemon::with(&["--merge-period", "0.5"]);
    let guests = GUESTS.map(|(name, uuid)| {
        let mut command = daemon.run(&[]);
        command.args(&words).args(["-name", &format!("guest={name},debug-threads=on"), "-uuid", uuid]);
        Guest::start(command)
    });
    let pids = guests.each_ref().map(Guest::pid);
    let status = eventually("both guests are clients", Duration::from_secs(120), || {
        let all = pids.map(|pid| daemon.client(pid));
        all.iter().all(Option::is_some).then(|| all.map(Option::unwrap))
    });
    for (client, (name, uuid)) in status.iter().zip(GUESTS) {
        assert_eq!((client["own_name"].as_str(), client["own_uuid"].as_str()), (Some(name), Some(uuid)), "{client}");
        assert!(client["name"].as_str().unwrap().starts_with("qemu-system-x86"), "{client}");
    }
    let said = |args: &[&str]| {
        let out = daemon.pageone(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let file = daemon.dir.path().join("day.rec");
    let (path, tables) = (file.to_str().unwrap(), daemon.dir.path().join("tables"));
    said(&["record", "-o", path, "--every", "0.2", "--for", "1"]);
    said(&["report", path, "--csv", tables.to_str().unwrap()]);
    let csv = std::fs::read_to_string(tables.join("guests.csv")).unwrap();
    for (what, text) in [
        ("status", said(&["status"])),
        ("top", said(&["top", "--batch", "--count", "1"])),
        ("dirty", said(&["dirty", "--count", "1", "--interval", "0.5"])),
        ("replay", said(&["replay", path, "--batch"])),
        ("report", csv),
    ] {
        for (pid, name) in pids.iter().zip(["web-1", "-2"]) {
            let is_it = |line: &str| line.contains(name) && line.contains(&pid.to_string());
            assert!(text.lines().any(is_it), "{what} has no {name}:\n{text}");
        }
        assert!(!text.contains('\x1b'), "{what}: a name moves no cursor:\n{text:?}");
    }
    for word in ["web-1", GUESTS[0].1] {
        let report: Value =
            serde_json::from_str(&said(&["dirty", word, "--json", "--count", "1", "--interval", "0.2"])).unwrap();
        let clients = report["clients"].as_array().unwrap();
        assert_eq!((clients.len(), &clients[0]["guest_name"]), (1, &Value::from("web-1")), "{report}");
    }
    assert!(said(&["detach", "web-1"]).lines().count() <= 1);
    eventually("the one that was named is detached", Duration::from_secs(60), || {
        let state = |pid| Some(daemon.client(pid)?["state"].as_str()?.to_owned());
        (state(pids[0]).as_deref() != Some("merging") && state(pids[1]).as_deref() == Some("merging")).then_some(())
    });
}
