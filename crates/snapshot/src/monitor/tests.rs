//! Monitors that are not there, are others', or answer nothing.

use std::os::unix::net::UnixListener;

use super::*;
use crate::fake;

#[test]
fn a_monitor_that_is_not_there_is_named() {
    let error = Monitor::connect(Path::new("/nonexistent/guest.qmp"), 1).map(drop).unwrap_err();
    assert!(matches!(error, MonitorError::Connect { .. }), "{error}");
    assert_eq!(error.to_string(), "cannot connect to QEMU's monitor /nonexistent/guest.qmp");
}

#[test]
fn what_does_not_end_or_fails_is_said() {
    let mut qmp = fake::qemu(|_| json!({ "status": "active" }));
    let error = qmp.migrated(Duration::ZERO).unwrap_err();
    assert!(matches!(error, MonitorError::Endless(_)), "{error}");
    assert_eq!(error.to_string(), "QEMU does not end the device stream");
    let mut qmp = fake::qemu(|_| json!({ "status": "failed", "error-desc": "no room" }));
    let error = qmp.migrated(Duration::ZERO).unwrap_err();
    assert!(matches!(error, MonitorError::Stream(_)), "{error}");
    assert_eq!(error.to_string(), "QEMU cannot write or read the device stream: no room");
}

#[test]
fn the_monitor_of_another_process_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let own = std::process::id() as i32;
    let Err(error) = Monitor::connect(&path, own + 1) else { panic!("it was accepted") };
    assert!(error.to_string().contains(&format!("belongs to process {own}")), "{error}");
}
