//! What commands answer programs (`--json`) and terminals of any width (`--wide`).

use std::process::{Command, Output};

use e2e::{Client, Daemon, program, skipped};
use serde_json::{Value, json};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The answer of a command; it must be one line.
fn line(out: &Output) -> Value {
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout).lines().count(), 1, "{}", text(&out.stdout));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn what_was_attached_restored_and_detached_is_answered_in_json() {
    let (daemon, scratch) = (Daemon::start(), tempfile::tempdir().unwrap());
    let dir = scratch.path();
    let run = |args: &[&str]| {
        let mut command = daemon.pageone(args);
        command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).output().unwrap()
    };
    let mut command = Command::new(program("pageone-test-client"));
    command.args(["events", "1024", "1"]);
    let mut client = Client::spawn(command);
    client.expect("ready");
    let (number, pid) = (client.pid(), client.pid().to_string());
    let socket = daemon.dir.path().join("agent.sock").display().to_string();
    let attach = ["attach", "--json", &pid];
    assert_eq!(line(&run(&attach)), json!({ "pid": number, "loaded": true, "client": true }));
    assert_eq!(line(&run(&attach)), json!({ "pid": number, "loaded": false, "client": true }));
    let named = [&attach[..], &["--socket", &socket]].concat();
    assert_eq!(line(&run(&named)), json!({ "pid": number, "loaded": false, "client": null }));

    run(&["pool", "create", "store", "--capacity", "./pool"]);
    let stored = line(&run(&["checkpoint", "--json", "--to", "store", "--name", "one", "--stop", &pid]));
    let restored = line(&run(&["restore", "store", "one", "--to", "memory", "--json"]));
    let regions = restored["regions"].as_array().unwrap();
    let mut behind = 0;
    for region in regions {
        assert_eq!(region["offset"], behind);
        assert!(region["address"].as_u64().unwrap() > 0);
        behind += region["bytes"].as_u64().unwrap();
    }
    assert_eq!((&restored["name"], &restored["memory_bytes"]), (&json!("one"), &stored["memory_bytes"]));
    assert_eq!(
        (std::fs::metadata(dir.join("memory")).unwrap().len(), &json!(behind)),
        (behind, &stored["memory_bytes"])
    );
    // Standard output has the memory, and nothing else.
    let out = run(&["restore", "store", "one", "--to", "/dev/stdout", "--json"]);
    assert_eq!(out.stdout.len() as u64, behind);
    assert_eq!(serde_json::from_slice::<Value>(&out.stderr).unwrap(), restored);

    assert_eq!(line(&run(&["detach", "--json", &pid])), json!({ "pid": number, "pages_retained": 0 }));
}

#[test]
fn what_is_wrong_with_a_configuration_is_answered_in_json_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pageone.toml");
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let out = Command::new(program("pageone")).args(["config", "check", "--json"]).arg(&file).output().unwrap();
        (out.status.code(), serde_json::from_slice::<Value>(&out.stdout).unwrap())
    };
    let (code, right) = check("threads = 1\nmerge_period = 5\n");
    assert_eq!((code, &right["settings_set"], &right["problems"]), (Some(0), &json!(2), &json!([])));
    assert_eq!(right["file"], file.to_str().unwrap());
    assert!(right["settings"].as_u64().unwrap() > 2);
    let (code, wrong) = check("threads = 1\nmerge_perod = 5\n");
    assert_eq!((code, &wrong["settings_set"]), (Some(5), &Value::Null));
    let problem = &wrong["problems"][0];
    assert_eq!((&problem["line"], &problem["key"]), (&json!(2), &json!("merge_perod")));
    assert!(problem["text"].as_str().unwrap().contains("did you mean merge_period?"), "{problem}");
}

#[test]
fn every_table_fits_a_terminal_and_is_whole_with_wide() {
    let (daemon, scratch) = (Daemon::start(), tempfile::tempdir().unwrap());
    let dir = scratch.path();
    let mut client = daemon.scenario(&["hold", "1024", "1", "3"]);
    client.expect("ready");
    let pid = client.pid().to_string();
    std::fs::write(dir.join("memory"), vec![7; 1 << 20]).unwrap();
    let own = |command: &mut Command| command.current_dir(dir).env("PAGEONE_POOLS", dir.join("names")).output();
    for args in [
        &["pool", "create", "store", "--capacity", "./a-directory-for-the-capacity-class"][..],
        &["checkpoint", "--to", "store", "--name", "a-checkpoint-with-a-name", &pid],
    ] {
        let out = own(&mut daemon.pageone(args)).unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    }
    // Progress goes to standard error.
    let longest = |words: &str| {
        let line =
            format!("stty cols 45; {} --dir {} {words}", program("pageone").display(), daemon.dir.path().display());
        let out = own(Command::new("script").args(["-qec", &line, "/dev/null"])).ok()?;
        println!("{}", text(&out.stdout));
        text(&out.stdout).lines().map(|line| line.trim_end().chars().count()).max()
    };
    if longest("status").is_none() {
        return skipped("no script (util-linux)");
    }
    let tables = ["status", "pool list", "pool ls store", "pool du store", "snapshot ls store"];
    for table in tables {
        assert!(longest(table) <= Some(45), "{table}");
        assert!(longest(&format!("{table} --wide")) > Some(45), "{table}");
    }
}
