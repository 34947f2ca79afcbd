//! Tests that change their whole process.

use std::process::Command;

/// Runs the body of the calling test in a process of its own, which it may leave in any state.
pub(crate) fn alone(body: impl FnOnce()) {
    alone_after(":", body);
}

/// The same in a process that is prepared by a line of the shell.
pub(crate) fn alone_after(line: &str, body: impl FnOnce()) {
    const KEY: &str = "PAGEONE_ALONE";
    let thread = std::thread::current();
    let name = thread.name().unwrap();
    if std::env::var(KEY).is_ok_and(|alone| alone == name) {
        return body();
    }
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &format!("{line} && exec \"$@\"")]).arg("sh").arg(std::env::current_exe().unwrap());
    let out = command.args(["--exact", name, "--nocapture"]).env(KEY, name).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("1 passed"), "{said}{errors}");
}
