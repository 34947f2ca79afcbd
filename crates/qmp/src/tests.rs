use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// The status that QEMU gives.
fn status(socket: &UnixStream, limit: Duration, goes_on: &(dyn Fn() -> bool + Sync)) -> Result<Value, QmpError> {
    Qmp::open(socket, limit, goes_on)?.execute("query-status", json!({}))
}

#[test]
fn a_session_skips_what_is_not_its_answer() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        let say = |line: Value| writeln!(&theirs, "{line}").unwrap();
        say(json!({ "QMP": {} }));
        while let Some(Ok(line)) = lines.next() {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let id = &asked["id"];
            // To somebody who has asked before, by no id and by one.
            say(json!({ "return": { "status": "running" } }));
            say(json!({ "return": { "status": "running" }, "id": "pageone-1-1" }));
            say(json!({ "event": "STOP" }));
            say(match asked["execute"].as_str().unwrap() {
                "qmp_capabilities" => json!({ "error": { "desc": "already complete" }, "id": id }),
                "query-status" => json!({ "return": { "status": "paused" }, "id": id }),
                _ => json!({ "error": { "desc": "no such thing" }, "id": id }),
            });
        }
    });
    assert_eq!(status(&ours, Duration::from_secs(20), &|| true).unwrap()["status"], "paused");
    let mut qmp = Qmp::open(ours, Duration::from_secs(20), &|| true).unwrap();
    let error = qmp.execute("other", json!({})).unwrap_err().to_string();
    assert_eq!(error, "QEMU refuses other: no such thing");
    drop(qmp);
    qemu.join().unwrap();
}

#[test]
fn an_answer_is_as_deep_as_a_chain_of_images_and_no_deeper_than_the_stack() {
    let deep = |depth| format!("{}\"[{{\\\"[\"{}", "[".repeat(depth), "]".repeat(depth));
    assert!(parse(&deep(MAX_DEPTH)).is_ok());
    let error = parse(&deep(MAX_DEPTH + 1)).unwrap_err().to_string();
    assert!(error.ends_with("nested more than 1000 deep, or of more than 1048576 values"), "{error}");
    let long = |values| format!("[{}0]", "0,".repeat(values));
    assert!(parse(&long(MAX_VALUES)).is_ok() && parse(&long(MAX_VALUES + 1)).is_err());
    assert!(parse(&"[".repeat(1 << 20)).is_err() && parse("[1] 2").is_err());
}

#[test]
fn a_descriptor_goes_with_its_command() {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, recvmsg};
    let (ours, theirs) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut got = 0;
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut bytes = [0; 4096];
            let mut into = [io::IoSliceMut::new(&mut bytes)];
            let len = recvmsg(&theirs, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap().bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    got += fds.count();
                }
            }
            if len == 0 {
                return got;
            }
            let asked: Value = serde_json::from_slice(&bytes[..len]).unwrap();
            writeln!(&theirs, "{}", json!({ "return": {}, "id": asked["id"] })).unwrap();
        }
    });
    let mut qmp = Qmp::open(ours, Duration::from_secs(20), &|| true).unwrap();
    qmp.give("null", std::fs::File::open("/dev/null").unwrap()).unwrap();
    drop(qmp);
    assert_eq!(qemu.join().unwrap(), 1);
}

#[test]
fn a_socket_without_an_answer_is_an_error_in_time() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let begin = Instant::now();
    let error = status(&ours, Duration::from_millis(50), &|| true).unwrap_err();
    assert!(error.to_string().starts_with("QEMU's monitor does not answer: "), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(60));
    drop(theirs);
}

#[test]
fn what_is_no_monitor_is_not_understood() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"220 mail.example ready\n").unwrap();
    let error = status(&ours, Duration::from_secs(20), &|| true).unwrap_err();
    assert!(matches!(error, QmpError::Malformed(_)), "{error}");
    assert!(error.to_string().starts_with("QEMU's monitor: not understood: "), "{error}");
}

#[test]
fn an_answer_without_an_end_is_not_read_to_it() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let flood = std::thread::spawn(move || while theirs.write_all(&[b' '; 4096]).is_ok() {});
    let error = status(&ours, Duration::from_secs(20), &|| true).unwrap_err().to_string();
    assert_eq!(error, "QEMU's monitor: not understood: an answer of more than 67108864 bytes");
    drop(ours);
    flood.join().unwrap();
}

#[test]
fn an_answer_that_comes_byte_by_byte_ends_with_the_time_or_with_the_client() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // The client has our end, too, and changes its settings.
    ours.set_read_timeout(None).unwrap();
    let trickle = std::thread::spawn(move || {
        while theirs.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let begin = Instant::now();
    assert!(status(&ours, Duration::from_millis(100), &|| true).is_err());
    let asked = AtomicU32::new(0);
    let goes_on = || asked.fetch_add(1, Ordering::Relaxed) < 10;
    assert!(status(&ours, Duration::from_secs(600), &goes_on).is_err());
    assert!(begin.elapsed() < Duration::from_secs(60));
    drop(ours);
    trickle.join().unwrap();
}

#[test]
fn events_that_nobody_waits_for_are_thrown_away() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    for _ in 0..100 {
        drain(&ours);
        theirs.write_all(&[b' '; 8192]).unwrap();
    }
}

#[test]
fn addresses_are_read_and_nothing_else() {
    let text = "Host virtual address for 0x100000 (pc.ram) is 0x7f0bbbf00000\r\n";
    assert_eq!(parse_gpa2hva(text), Some(0x7f0b_bbf0_0000));
    assert_eq!(parse_gpa2hva("No memory is mapped at address 0x100000000\r\n"), None);
}
