use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use claims::Owner;

use super::*;

/// A connection that is not closed within minutes: the other end takes nothing.
pub(crate) fn lingering() -> (OwnedFd, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(300))).unwrap();
    (stream.into(), listener)
}

impl User {
    /// The closer has begun: it takes what came last first.
    pub(crate) fn wait_for_closer(&self) {
        let begin = Instant::now();
        while !self.closing.lock().waiting.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
}

#[test]
fn descriptors_that_cannot_be_closed_hold_up_nobody_and_are_bounded() {
    let user = Arc::new(User::new(Owner::of(7), 0, 0));
    let (fd, other_end) = lingering();
    let begin = Instant::now();
    let mut received = Received::of(&user).unwrap();
    received.fds.push(fd);
    drop(received);
    while user.closing.lock().waiting.len() == 1 {
        std::thread::yield_now();
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "this thread closes it");
    while let Some(mut received) = Received::of(&user) {
        received.fds.push(std::fs::File::open("/dev/null").unwrap().into());
    }
    assert_eq!(user.closing.lock().count, CLOSING_OF_USER);
    drop(other_end);
    while user.closing.lock().count > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(Received::of(&user).is_some(), "when it answers all is closed");
}

#[test]
fn a_connection_with_unread_descriptors_is_closed_elsewhere() {
    let user = Arc::new(User::new(Owner::of(7), 0, 0));
    let (fd, other_end) = lingering();
    let (ours, theirs) = Conn::pair().unwrap();
    theirs.send(&[1], &[fd.as_fd()]).unwrap();
    drop((fd, theirs));
    let begin = Instant::now();
    drop(Connection::new(ours, user.clone()));
    assert!(begin.elapsed() < Duration::from_secs(60), "this thread closes it");
    drop(other_end);
    while user.closing.lock().runs {
        std::thread::sleep(Duration::from_millis(1));
    }
}
