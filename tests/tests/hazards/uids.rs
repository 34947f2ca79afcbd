//! Users with more than one uid, and very many users.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use e2e::assault::status_as;
use e2e::user::{ENV_UID, FIRST_SUBORDINATE as FIRST, as_user};
use e2e::{Daemon, eventually, skipped};
use kmem::seqpacket::Conn;
use serde_json::Value;

const USER: u32 = 65_500;
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that any user may connect to, for which [`USER`] has subordinate uids.
fn daemon(lines: &str) -> Option<Daemon> {
    let mut daemon = Daemon::with_config(&["--merge-period", "0.1"], lines);
    if !rustix::process::geteuid().is_root() || !daemon.restart_with_subuid(USER) {
        skipped("not root, or there is no /etc/subuid: others need their uids");
        return None;
    }
    Some(daemon)
}

/// Connections of agents that are refused, one of each of these uids.
fn refused(daemon: &Daemon, uids: impl Iterator<Item = u32>) {
    let socket = daemon.dir.path().join("agent.sock");
    for uid in uids {
        let connect = || Conn::connect(&socket).ok();
        let conn = as_user(uid, || eventually("a connection", LIMIT, connect));
        conn.send(&wire::encode(&wire::ToDaemon::Ready), &[]).unwrap();
    }
}

fn times(status: &Value) -> u64 {
    status["refused"].as_array().unwrap().iter().map(|row| row["times"].as_u64().unwrap()).sum()
}

fn lines(daemon: &Daemon, part: &str) -> usize {
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    log.lines().filter(|line| line.contains(part)).count()
}

#[test]
fn a_user_with_many_uids_has_the_bounds_of_one_and_root_its_answer() {
    let Some(daemon) = daemon("") else { return };
    let socket = daemon.dir.path().join("control.sock");
    let connect = |n| as_user(FIRST + n / 16, || UnixStream::connect(&socket).unwrap());
    let mut silent: Vec<UnixStream> = (0..160u32).map(connect).collect();
    assert!(daemon.try_status().is_some(), "root gets no answer");
    silent.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    eventually("all but 16 are told that there are too many", LIMIT, || {
        silent.retain_mut(|stream| !matches!(stream.read(&mut [0]), Ok(1)));
        (silent.len() == 16).then_some(())
    });
    refused(&daemon, FIRST..FIRST + 300);
    let status = eventually("all are refused", LIMIT, || daemon.try_status().filter(|status| times(status) == 300));
    assert_eq!(status["refused"].as_array().unwrap().len(), 1, "{status}");
    assert_eq!(lines(&daemon, "before it said hello"), 1);
}

#[test]
fn root_is_answered_though_no_descriptor_is_left() {
    if !rustix::process::geteuid().is_root() {
        return skipped("not root: others need their uids");
    }
    let mut daemon = Daemon::start();
    daemon.restart_after("ulimit -n 64");
    let socket = daemon.dir.path().join("control.sock");
    let connect = |n| as_user(300_000 + n / 16, || UnixStream::connect(&socket).unwrap());
    let _silent: Vec<UnixStream> = (0..200u32).map(connect).collect();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).map_or(0, Iterator::count);
    eventually("all descriptors are taken", LIMIT, || (open() >= 63).then_some(()));
    assert!(daemon.try_status().is_some(), "others have taken all descriptors");
}

#[test]
fn many_users_fill_neither_the_log_nor_the_status_and_root_has_its_lines() {
    let Some(daemon) = daemon("") else { return };
    refused(&daemon, 300_000..300_400);
    let all = |status: &Value| times(status) + status["refused_left_out"].as_u64().unwrap() == 400;
    let status = eventually("all are refused", LIMIT, || daemon.try_status().filter(all));
    assert_eq!(status["refused_left_out"], 400 - 256, "{status}");
    let text = String::from_utf8(daemon.pageone(&["status"]).output().unwrap().stdout).unwrap();
    assert!(text.lines().count() < 300 && text.contains("and 144 more"), "{text}");
    let written = lines(&daemon, "before it said hello");
    assert!(written <= 240, "{written} lines");
    refused(&daemon, std::iter::once(0));
    eventually("root has its lines", LIMIT, || (lines(&daemon, "uid=0") == 1).then_some(()));
}

#[test]
fn a_subordinate_uid_counts_for_its_user_who_sees_nothing_of_it() {
    let Some(daemon) = daemon("user_domains = 2") else { return };
    let words = ["hold", "4096", "4", "1"];
    let mut clients = Vec::new();
    for uid in [FIRST, FIRST + 1] {
        let mut client = daemon.scenario_with(&[], &words, &[(ENV_UID, &uid.to_string())]);
        client.expect("ready");
        eventually("it is a client", LIMIT, || daemon.client(client.pid()));
        clients.push(client);
    }
    let seen = |uid| {
        let status = status_as(&daemon, uid, LIMIT).unwrap();
        let domains = status["status"]["domains"].as_array().unwrap().clone();
        domains.iter().map(|domain| domain["name"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(seen(FIRST), ["uid-200000"]);
    assert_eq!(seen(FIRST + 1), ["uid-200001"], "they do not share");
    assert!(seen(USER).is_empty(), "they may be another tenant's");
    let third = FIRST + 2;
    let _third = daemon.scenario_with(&[], &words, &[(ENV_UID, &third.to_string())]);
    eventually("a third domain is one too many", LIMIT, || {
        let refused = daemon.try_status()?["refused"].as_array()?.clone();
        let why = format!("uid {USER} has made 2 domains");
        refused.iter().any(|row| row["uid"] == third && row["reason"].as_str().unwrap().contains(&why)).then_some(())
    });
}
