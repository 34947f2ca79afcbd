//! A monitor of a guest's QEMU that belongs to the test, as a user's would: a socket of its own.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::eventually;

/// The monitor.
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// Words of QEMU's command that make the socket.
    pub fn words(socket: &Path) -> [String; 2] {
        ["-qmp".into(), format!("unix:{},server=on,wait=off", socket.display())]
    }

    /// Connects to it.
    pub fn connect(socket: &Path) -> Self {
        let limit = Duration::from_secs(60);
        let stream = eventually("QEMU's monitor", limit, || UnixStream::connect(socket).ok());
        stream.set_read_timeout(Some(limit * 4)).unwrap();
        let mut qmp = Self(BufReader::new(stream));
        qmp.execute("qmp_capabilities", json!({}));
        qmp
    }

    /// What QEMU answers: an object with `return` or `error`. `None`: QEMU has ended.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Option<Value> {
        let line = json!({ "execute": command, "arguments": arguments, "id": "test" });
        writeln!(self.0.get_mut(), "{line}").ok()?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap_or(0) == 0 {
                return None;
            }
            let answer = qmp::parse(&line).unwrap();
            if answer["id"] == "test" {
                return Some(answer);
            }
        }
    }

    /// Executes a command; gives what it returns, or QEMU's reason against it.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let answer = self.ask(command, arguments).unwrap_or_else(|| panic!("{command}: QEMU has ended"));
        let error = answer["error"]["desc"].as_str();
        error.map_or_else(|| Ok(answer["return"].clone()), |error| Err(error.to_owned()))
    }

    /// What a command returns. It must succeed.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        self.try_execute(command, arguments).unwrap_or_else(|why| panic!("{command}: {why}"))
    }

    /// Waits until QEMU tells of such an event; gives its data.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "QEMU has ended before {name}");
            let said = qmp::parse(&line).unwrap();
            if said["event"] == name {
                return said["data"].clone();
            }
        }
    }

    /// A command of the human monitor; gives what it prints.
    pub fn monitor(&mut self, line: &str) -> String {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }));
        answer.as_str().unwrap().trim().to_owned()
    }

    /// Migrates, and waits for the end.
    pub fn migrate(&mut self, to: &str) -> Result<(), String> {
        self.try_execute("migrate", json!({ "uri": to }))?;
        eventually("the migration's end", Duration::from_secs(120), || {
            let status = self.execute("query-migrate", json!({}))["status"].as_str()?.to_owned();
            assert_ne!(status, "failed");
            (status == "completed").then_some(())
        });
        Ok(())
    }
}

/// Makes an empty disk that can hold snapshots: a qcow2 file of 1 GiB.
pub fn make_disk(path: &Path) {
    snapshot::qcow2::create(path, 1 << 30, None, 0o644).unwrap();
}
