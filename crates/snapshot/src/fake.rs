//! A QEMU for tests: a thread that answers the commands of a monitor.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::monitor::Monitor;

/// A session with one that answers each command, by its name, with a value.
pub(crate) fn qemu(answer: impl Fn(&str) -> Value + Send + 'static) -> Monitor {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let said = json!({ "return": answer(asked["execute"].as_str().unwrap()), "id": asked["id"] });
            if writeln!(&theirs, "{said}").is_err() {
                return;
            }
        }
    });
    Monitor::begin(ours).unwrap()
}
