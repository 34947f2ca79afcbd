//! The guest's agent, and one that says anything.

use std::os::unix::net::UnixListener;

use super::*;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

#[test]
fn the_port_is_known_by_its_name() {
    let device = "-device virtio-serial -device virtserialport,chardev=q,name=org.qemu.guest_agent.0";
    let port = |chardev: &str| Port::find(&words(&format!("-m 1 -chardev {chardev} {device}")));
    let socket = Some(Port { label: "q".into(), socket: "/s".into() });
    assert_eq!(port("socket,path=/s,server=on,wait=off,id=q"), socket);
    assert_eq!(port("socket,path=/s,server,nowait,id=q"), socket);
    for other in ["socket,path=/s,id=q", "socket,path=/s,server=on,id=r", "pty,id=q"] {
        assert_eq!(port(other), None, "{other}");
    }
    assert_eq!(Port::find(&words("-chardev socket,path=/s,server=on,id=q -device virtserialport,chardev=q")), None);
}

/// What an agent answers to each line.
fn agent(answer: impl Fn(&str) -> String + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // What was meant for another.
            let _ = (&stream).write_all(b"{\"return\": 1}\n\xff{\"return\": 2}\n");
            for line in BufReader::new(&stream).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                let id = line.split("\"id\":").nth(1).map(|rest| rest.split('}').next().unwrap().to_owned());
                let said = id.map_or_else(
                    || answer(&line).into_bytes(),
                    |id| [b"\xff".to_vec(), format!("{{\"return\": {id}}}\n").into_bytes()].concat(),
                );
                if said.is_empty() {
                    break;
                }
                let _ = (&stream).write_all(&said);
            }
        }
    });
    (dir, path)
}

#[test]
fn an_agent_is_asked_and_its_refusal_is_said() {
    let (_dir, path) = agent(|line| match line {
        _ if line.contains("guest-ping") => "{\"return\": {}}\n".into(),
        _ => "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no hwclock\"}}\n".into(),
    });
    let mut session = Agent::connect(&path, std::process::id()).unwrap();
    session.ping().unwrap();
    session.ping().unwrap();
    assert!(!session.knows_vmgenid().unwrap());
    let (_new, new) = agent(|line| match line {
        _ if line.contains("/platform/") => "{\"return\": 7}\n".into(),
        _ if line.contains("guest-file-close") && line.contains("7") => "{\"return\": {}}\n".into(),
        _ => "{\"error\": {\"desc\": \"no such file\"}}\n".into(),
    });
    assert!(Agent::connect(&new, std::process::id()).unwrap().knows_vmgenid().unwrap());
    let error = session.set_time().unwrap_err();
    assert!(matches!(error, AgentError::Refused { .. }), "{error}");
    assert_eq!(error.to_string(), "the guest's agent refuses guest-set-time: no hwclock");
}

#[test]
fn an_agent_that_is_gone_or_speaks_something_else_is_an_error() {
    let (_dir, path) = agent(|_| String::new());
    let error = Agent::connect(&path, std::process::id()).unwrap().ping().unwrap_err();
    assert!(matches!(error, AgentError::Io(_)), "{error}");
    assert!(error.to_string().starts_with("the guest's agent does not answer: "), "{error}");
    let (_dir, path) = agent(|_| "no JSON\n".into());
    assert!(Agent::connect(&path, std::process::id()).unwrap().ping().is_err());
    let (_dir, path) = agent(|_| "x".repeat(LONGEST + 2));
    let error = Agent::connect(&path, std::process::id()).unwrap().ping().unwrap_err().to_string();
    assert!(error.ends_with("its answer is too long"), "{error}");
    let error = Agent::connect(&path, 1).map(drop).unwrap_err().to_string();
    assert!(error.ends_with("another process listens in its place"), "{error}");
    assert!(Agent::connect(Path::new("/nonexistent/agent"), 1).is_err());
}

/// QEMU takes one client, and has others wait.
#[test]
fn an_agent_that_serves_another_program_or_speaks_for_ever_is_not_waited_for_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("busy");
    let _listener = UnixListener::bind(&path).unwrap();
    let address = SocketAddr::from_pathname(&path).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match connect_within(&address, PAUSE) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 10_000, "none was refused");
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    let error = Agent::connect(&path, std::process::id()).map(drop).unwrap_err();
    assert!(matches!(&error, AgentError::Io(error) if error.kind() == io::ErrorKind::WouldBlock), "{error}");
    // The guest, which has the agent, says something of another session again and again.
    let path = dir.path().join("endless");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        while (&stream).write_all(b"\xff{\"return\": 0}\n").is_ok() {}
    });
    let error = Agent::connect(&path, std::process::id()).map(drop).unwrap_err();
    assert!(matches!(&error, AgentError::Io(error) if error.kind() == io::ErrorKind::TimedOut), "{error}");
}
