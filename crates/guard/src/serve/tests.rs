//! The guard's process, without one.

use super::*;

#[test]
fn a_guard_that_could_empty_no_pipe_is_none() {
    let (command, link) = Conn::pair().unwrap();
    let guard = std::thread::spawn(move || {
        // The kernel refuses it threads.
        kmem::testing::refuse(libc::SYS_clone3, None, libc::EAGAIN);
        serve(&link, &|_, _| true)
    });
    drop(command);
    assert_eq!(guard.join().unwrap().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}
