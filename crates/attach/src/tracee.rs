//! ptrace(2) on one thread: stopped, looked at, changed, and let go.
//!
//! The thread is *seized*: it gets no signal for that, and should this process die, the kernel lets
//! it go. It knows this process as its tracer only as long as a [`Tracee`] lives.

#![allow(unsafe_code)] // ptrace(2) writes through pointers.

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::io;
use std::time::{Duration, Instant};

/// The registers of a stopped thread, as the kernel names them.
pub(crate) type Registers = libc::user_regs_struct;

/// The largest vector state that is taken, in bytes: AVX-512 and AMX take 11 KiB.
const MAX_VECTORS: usize = 32 << 10;
/// The register set of the vector state (include/uapi/linux/elf.h).
const NT_X86_XSTATE: usize = 0x202;
/// How long a stop is waited for without sleeping: most take some microseconds.
const SPIN: Duration = Duration::from_micros(500);
/// Pause between two looks after that.
const PAUSE: Duration = Duration::from_micros(100);

/// Why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It was interrupted, as it was told to.
    Interrupted,
    /// The whole process is stopped by this signal (`SIGSTOP` and its like).
    Group,
    /// It enters a system call, or has come to its end.
    SystemCall,
    /// It is about to get a signal, and does when it goes on.
    Signal(c_int),
    Other,
}

/// A thread that this process traces. Dropping it lets the thread go.
pub(crate) struct Tracee {
    tid: libc::pid_t,
    is_stopped: bool,
    /// The signal that it is about to get.
    signal: c_int,
}

impl Tracee {
    /// Begins to trace a thread, which runs on.
    ///
    /// # Errors
    ///
    /// Those of `PTRACE_SEIZE`: `EPERM` where this account may not, `ESRCH`.
    pub(crate) fn seize(tid: libc::pid_t) -> io::Result<Self> {
        let options = libc::PTRACE_O_TRACESYSGOOD as usize;
        request(libc::PTRACE_SEIZE, tid, 0, options)?;
        Ok(Self { tid, is_stopped: false, signal: 0 })
    }

    /// Has the thread stop soon, also in the middle of a system call, which goes on afterwards.
    pub(crate) fn interrupt(&self) -> io::Result<()> {
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0)
    }

    /// Waits for the next stop. `None`: there was none until the deadline.
    ///
    /// # Errors
    ///
    /// `ESRCH`: the process has ended.
    pub(crate) fn wait(&mut self, deadline: Instant) -> io::Result<Option<Stop>> {
        let begin = Instant::now();
        loop {
            let mut status = 0;
            // SAFETY: the kernel writes one number to the local variable.
            match unsafe { libc::waitpid(self.tid, &mut status, libc::__WALL | libc::WNOHANG) } {
                0 if Instant::now() >= deadline => return Ok(None),
                0 if begin.elapsed() < SPIN => std::thread::yield_now(),
                0 => std::thread::sleep(PAUSE),
                -1 => {
                    let error = io::Error::last_os_error();
                    match error.raw_os_error() {
                        Some(libc::EINTR) => {}
                        Some(libc::ECHILD) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                        _ => return Err(error),
                    }
                }
                _ if !libc::WIFSTOPPED(status) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                _ => {
                    let stop = stop_of(status);
                    self.is_stopped = true;
                    self.signal = if let Stop::Signal(signal) = stop { signal } else { 0 };
                    return Ok(Some(stop));
                }
            }
        }
    }

    /// Lets it run to its next system call, the begin or the end of it. It gets the signal that it
    /// stopped for.
    pub(crate) fn resume_to_call(&mut self) -> io::Result<()> {
        self.go(libc::PTRACE_SYSCALL)
    }

    pub(crate) fn step(&mut self) -> io::Result<()> {
        // What it has stopped for was the step before.
        if self.signal == libc::SIGTRAP {
            self.signal = 0;
        }
        self.go(libc::PTRACE_SINGLESTEP)
    }

    /// Leaves it stopped with its process, and hears when it goes on.
    pub(crate) fn listen(&mut self) -> io::Result<()> {
        self.go(libc::PTRACE_LISTEN)
    }

    fn go(&mut self, how: c_uint) -> io::Result<()> {
        request(how, self.tid, 0, self.signal as usize)?;
        self.is_stopped = false;
        Ok(())
    }

    pub(crate) fn registers(&self) -> io::Result<Registers> {
        // SAFETY: all fields are numbers, for which zero is a value.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, self.tid, 0, (&raw mut registers).expose_provenance())?;
        Ok(registers)
    }

    pub(crate) fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        request(libc::PTRACE_SETREGS, self.tid, 0, std::ptr::from_ref(registers).expose_provenance())
    }

    /// The floating point and vector state, in the form of XSAVE (uncompacted).
    pub(crate) fn vectors(&self) -> io::Result<Vec<u8>> {
        let mut state = vec![0u8; MAX_VECTORS];
        let mut part = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        request(libc::PTRACE_GETREGSET, self.tid, NT_X86_XSTATE, (&raw mut part).expose_provenance())?;
        state.truncate(part.iov_len);
        Ok(state)
    }

    /// The signal mask that the program has chosen, also where ppoll(2) has another for its time.
    pub(crate) fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        request(libc::PTRACE_GETSIGMASK, self.tid, size_of_val(&mask), (&raw mut mask).expose_provenance())?;
        Ok(mask)
    }

    pub(crate) fn set_signal_mask(&self, mask: u64) -> io::Result<()> {
        request(libc::PTRACE_SETSIGMASK, self.tid, size_of_val(&mask), (&raw const mask).expose_provenance())
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // Only a stopped thread can be let go. One that does not stop has ended.
        if !self.is_stopped && self.interrupt().is_ok() {
            let _ = self.wait(Instant::now() + Duration::from_secs(1));
        }
        if self.signal == libc::SIGTRAP {
            self.signal = 0;
        }
        if self.is_stopped {
            let _ = request(libc::PTRACE_DETACH, self.tid, 0, self.signal as usize);
        }
    }
}

fn stop_of(status: c_int) -> Stop {
    const SYSTEM_CALL: c_int = libc::SIGTRAP | 0x80;
    match (status >> 16, libc::WSTOPSIG(status)) {
        (0, SYSTEM_CALL) => Stop::SystemCall,
        (0, signal) => Stop::Signal(signal),
        (libc::PTRACE_EVENT_STOP, libc::SIGTRAP) => Stop::Interrupted,
        (libc::PTRACE_EVENT_STOP, _) => Stop::Group,
        _ => Stop::Other,
    }
}

/// ptrace(2). `data`: a number, or the address of a local variable of the type that the request
/// reads or writes.
fn request(request: c_uint, tid: libc::pid_t, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests made here read or write nothing of this process but what `data` points
    // to. The callers pass variables of the requests' types, or buffers with their lengths, that
    // live until the call returns.
    let answer: c_long = unsafe {
        libc::ptrace(
            request,
            tid,
            std::ptr::with_exposed_provenance_mut::<c_void>(address),
            std::ptr::with_exposed_provenance_mut::<c_void>(data),
        )
    };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
