#![allow(unsafe_code)] // Starts a process.

use super::*;

fn process() -> std::process::Child {
    std::process::Command::new("sleep").arg("60").spawn().unwrap()
}

/// Starts a process that shares the memory until `end` is true.
fn sharer(end: &'static AtomicBool) -> i32 {
    extern "C" fn body(end: *mut libc::c_void) -> i32 {
        // SAFETY: the caller's static.
        let end = unsafe { &*end.cast::<AtomicBool>() };
        while !end.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        0
    }
    let stack = Box::leak(vec![0u8; 1 << 16].into_boxed_slice());
    let argument = std::ptr::from_ref(end).cast_mut().cast();
    // SAFETY: the stack is never freed, and what the process is given is a static.
    unsafe { libc::clone(body, stack.as_mut_ptr_range().end.cast(), libc::CLONE_VM | libc::SIGCHLD, argument) }
}

#[test]
fn there_is_one_while_it_is_made_and_until_it_has_ended() {
    let sharers = Sharers::new();
    assert!(!sharers.any());
    sharers.making();
    assert!(sharers.any());
    sharers.made(-1);
    assert!(!sharers.any(), "there is none");
    static END: AtomicBool = AtomicBool::new(false);
    sharers.making();
    let number = sharer(&END);
    sharers.made(number);
    assert!(sharers.any() && is_alive(number));
    END.store(true, Ordering::SeqCst);
    while sharers.any() || is_alive(number) {
        std::thread::yield_now();
    }
    let pid = Pid::from_raw(number);
    assert!(rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap().is_some());
    assert!(!is_alive(number), "it is waited for");
}

#[test]
fn a_process_with_another_program_shares_nothing() {
    let mut child = process();
    assert!(is_alive(child.id() as i32));
    if kcmp_memory(getpid().as_raw_pid(), child.id() as i32) != Err(Errno::NOSYS) {
        assert!(!shares(child.id() as i32));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn with_too_many_there_is_one_for_ever() {
    let sharers = Sharers::new();
    for number in (0..=COUNT).map(|n| i32::MAX - n as i32) {
        sharers.making();
        sharers.made(number);
    }
    assert!(sharers.any());
}
