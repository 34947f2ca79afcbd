#![allow(unsafe_code)] // setrlimit(2) and what tests do with processes.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::memfd;
use crate::peer::{self, Peer};
use crate::testing::{Child, forking, pause_for_ever};

fn received(conn: &Conn, room: usize) -> io::Result<(Option<Vec<u8>>, Vec<OwnedFd>)> {
    let (mut buffer, mut fds) = (vec![0; room], Vec::new());
    let len = conn.recv(&mut buffer, &mut fds)?;
    Ok((len.map(|len| buffer[..len].to_vec()), fds))
}

#[test]
fn messages_stay_whole_and_carry_descriptors() {
    let _forking = forking(); // A forked child would hold the other end open.
    let (a, b) = Conn::pair().unwrap();
    assert_eq!(received(&b, 9).unwrap().0, None);
    let (store, map) = memfd::create_sealed("kmem-test", 4096).unwrap();
    map.atomic_u64(0).store(42, std::sync::atomic::Ordering::Relaxed);
    a.send(b"one", &[store.as_fd(), store.as_fd()]).unwrap();
    a.send(b"two", &[]).unwrap();
    let (message, fds) = received(&b, 9).unwrap();
    assert_eq!((message.as_deref(), fds.len()), (Some(&b"one"[..]), 2));
    assert_eq!(memfd::identity(&fds[1]).unwrap(), memfd::identity(&store).unwrap());
    assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert_eq!(memfd::map_readonly(&fds[0], 4096).unwrap().load_u64(0), 42);
    let (message, fds) = received(&b, 3).unwrap();
    assert_eq!((message.as_deref(), fds.len()), (Some(&b"two"[..]), 0));

    let many = vec![store.as_fd(); MAX_FDS];
    a.send(b"many", &many).unwrap();
    assert_eq!(received(&b, 9).unwrap().1.len(), MAX_FDS);
    let many = vec![store.as_fd(); MAX_FDS + 1];
    assert_eq!(a.send(b"many", &many).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(a.send(b"", &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);

    drop(a);
    assert_eq!(received(&b, 9).unwrap().0, Some(vec![]), "closed");
    assert_eq!(b.send(b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_message_that_does_not_fit_is_an_error_and_leaks_nothing() {
    let _forking = forking(); // A forked child would hold the other end open.
    let (a, b) = Conn::pair().unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    a.send(b"too long", &[writer.as_fd()]).unwrap();
    drop(writer);
    assert_eq!(received(&b, 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
    // Its descriptor was closed: the pipe has no writer left.
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
    a.send(b"next", &[]).unwrap();
    assert_eq!(received(&b, 4).unwrap().0.as_deref(), Some(&b"next"[..]));
}

#[test]
fn descriptors_beyond_the_limit_are_an_error() {
    let _forking = forking();
    let (a, b) = Conn::pair().unwrap();
    a.send(b"one", &[a.as_fd()]).unwrap();
    let child = Child::fork(|| {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: sets a limit of this child alone.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) } != 0 {
            return 10;
        }
        match b.recv(&mut [0; 16], &mut Vec::new()) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => 1,
            _ => 11,
        }
    });
    assert_eq!(child.code(), 1);
}

#[test]
fn a_full_queue_does_not_wait() {
    let (a, b) = Conn::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&a, 16 << 10).unwrap();
    let message = [7; 4096];
    let mut sent = 0;
    let error = loop {
        match a.send(&message, &[]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1000);
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(sent >= 1);
    for _ in 0..sent {
        assert_eq!(received(&b, 4096).unwrap().0.unwrap(), message);
    }
    assert_eq!(received(&b, 4096).unwrap().0, None, "the refused one was not sent in part");
    a.send(&message, &[]).unwrap();
    let error = a.send(&[0; 1 << 20], &[]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
}

#[test]
fn clients_connect_and_are_known() {
    let _forking = forking(); // A forked child would hold the other end open.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    assert_eq!(Conn::connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    let listener = Listener::bind(&path, 0o660).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    assert_eq!(Listener::bind(&path, 0o660).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    assert!(listener.accept().unwrap().is_none());

    let client = Conn::connect(&path).unwrap();
    let server = listener.accept().unwrap().unwrap();
    client.send(b"hello", &[]).unwrap();
    assert_eq!(received(&server, 9).unwrap().0.as_deref(), Some(&b"hello"[..]));
    assert_eq!(received(&server, 9).unwrap().0, None, "accepted connections do not wait either");
    let us = Peer {
        pid: std::process::id() as i32,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    assert_eq!(Peer::of(&server).unwrap(), us);
    assert_eq!(Peer::of(&client).unwrap(), us);

    drop(listener);
    assert_eq!(Conn::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    let long = directory.path().join("x".repeat(200));
    assert!(Listener::bind(&long, 0o600).is_err());
}

#[test]
fn the_peers_process_is_the_one_that_connected() {
    let _forking = forking();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let child = Child::fork(|| {
        let Ok(_conn) = Conn::connect(&path) else {
            return 1;
        };
        pause_for_ever()
    });
    let server = loop {
        if let Some(server) = listener.accept().unwrap() {
            break server;
        }
        std::thread::yield_now();
    };
    assert_eq!(Peer::of(&server).unwrap().pid, child.0);
    let process = peer::pidfd(&server).unwrap();
    assert!(!process.has_exited());
    drop(child);
    assert!(process.has_exited());
}

#[test]
fn a_full_backlog_does_not_wait() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let mut clients = Vec::new();
    let error = loop {
        match Conn::connect(&path) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() <= 2 * BACKLOG as usize);
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(listener.accept().unwrap().is_some());
    Conn::connect(&path).unwrap();
}
