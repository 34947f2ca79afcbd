//! The safe point, and the calls that the thread makes from there.
//!
//! ```text
//! in ppoll? ─▶ seize, interrupt ─▶ still in ppoll, on its own stack?
//!                                      │ write the frame, block signals
//!                                      ▼
//!      dlopen(library) ─▶ at rt_sigreturn ─▶ the agent's function ─▶ at rt_sigreturn ─▶ let go
//!                         is it mapped? else dlerror()
//! ```
//!
//! The end of a call is seen by its rt_sigreturn(2): the thread stops at each system call. Signals
//! stay pending meanwhile, but for those that tell of a fault. The kernel would answer a blocked
//! one of these by taking the program's handler away.

use std::ffi::c_int;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kmem::Range;
use kmem::procfs;

use crate::frame::{self, Frame, PPOLL, SIGRETURN, SYSCALL};
use crate::image::{self, Memory};
use crate::reply::{self, Attached};
use crate::target::{self, Target, failed};
use crate::tracee::{Registers, Stop, Tracee};
use crate::{AttachError, Request};

/// The agent's function (crates/agent/src/intercept/attach.rs).
const ENTRY: &str = "pageone_agent_attach";
/// The end of an interrupted ppoll(2), before the kernel decides whether to begin it again
/// (include/linux/errno.h).
const ERESTARTNOHAND: i64 = -514;
/// `mov $15, %rax; syscall`: the C library's code behind each signal handler.
const RESTORER: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// Bytes of stack that the calls may need.
const ROOM: usize = 64 << 10;
/// The longest path.
const MAX_PATH: usize = 1024;
/// Signals of faults.
const FAULTS: [c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
/// How long a stop takes at most: the thread has only to return from the kernel.
const STOP_TIME: Duration = Duration::from_secs(1);
/// First pause before the thread is looked at again, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
/// Bits of the flags register: single step, and the direction of string instructions.
const TRAP_AND_DIRECTION: u64 = 0x500;

/// The thread at its safe point.
struct Session<'a> {
    request: &'a Request<'a>,
    memory: &'a Memory,
    tracee: Tracee,
    registers: Registers,
    frame: Frame,
    /// The instruction behind the `syscall` of [`RESTORER`].
    after_restorer: u64,
}

pub(crate) fn attach(request: &Request<'_>) -> Result<Attached, AttachError> {
    let pid = request.pid;
    // Before it waits for events it may still be loading its libraries.
    let is_waiting = poll(request, || Ok(waits_in_ppoll(pid).then_some(())))?.is_some();
    let target = &target::loaded(request)?;
    if !is_waiting {
        return Err(AttachError::NoSafePoint { pid, seconds: request.timeout.as_secs() });
    }
    let strange = |what| AttachError::Strange { pid, what };
    let library = path(request.library)?;
    let socket = path(request.socket)?;
    let memory = Memory::open(pid).map_err(|e| failed(pid, "its memory", e))?;
    let in_libc = |name| {
        let homes = [Some(target.libc), target.libdl];
        homes.into_iter().flatten().find_map(|base| image::function(&memory, base, name))
    };
    let dlopen = in_libc("dlopen").ok_or(strange("its C library has no dlopen"))?;
    let dlerror = in_libc("dlerror").ok_or(strange("its C library has no dlerror"))?;
    let restorer = find(&memory, target).ok_or(strange("its C library returns from signals in a way of its own"))?;
    let mut session = Session::begin(request, &memory, target, restorer)?;
    let base = match target.agent {
        Some(base) => base,
        None => session.load(dlopen, dlerror, &library)?,
    };
    let entry = image::function(&memory, base, ENTRY).ok_or(AttachError::OldAgent(pid))?;
    session.enter(entry, &socket)
}

fn path(path: &Path) -> Result<Vec<u8>, AttachError> {
    let mut bytes = path.as_os_str().as_bytes().to_vec();
    if bytes.len() >= MAX_PATH || bytes.contains(&0) || !path.is_absolute() {
        return Err(AttachError::Path(path.to_path_buf()));
    }
    bytes.push(0);
    Ok(bytes)
}

/// Where the C library returns from signals.
fn find(memory: &Memory, target: &Target) -> Option<u64> {
    let mut text = vec![0; target.text.len.min(16 << 20)];
    memory.read(target.text.start as u64, &mut text).ok()?;
    let at = text.windows(RESTORER.len()).position(|bytes| bytes == RESTORER)?;
    Some((target.text.start + at) as u64)
}

impl<'a> Session<'a> {
    /// Waits for the safe point, and prepares the thread for calls.
    fn begin(
        request: &'a Request<'a>,
        memory: &'a Memory,
        target: &Target,
        restorer: u64,
    ) -> Result<Self, AttachError> {
        let pid = request.pid;
        let kernel = |what| move |e| failed(pid, what, e);
        let (tracee, registers) = safe_point(request, memory, target)?;
        let vectors = tracee.vectors().map_err(kernel("its vector registers"))?;
        let mask = tracee.signal_mask().map_err(kernel("its signal mask"))?;
        let frame = frame::build(&registers, vectors, mask, restorer)
            .ok_or(AttachError::Strange { pid, what: "its vector registers or its stack" })?;
        memory.write(frame.stack, &frame.bytes).map_err(kernel("its stack"))?;
        // The way back comes first: from here on the frame restores the mask too.
        let back = Registers { rip: restorer, rsp: frame.stack + 8, orig_rax: u64::MAX, ..registers };
        tracee.set_registers(&back).map_err(kernel("its registers"))?;
        let faults = FAULTS.iter().fold(0u64, |mask, signal| mask | 1 << (signal - 1));
        tracee.set_signal_mask(!faults).map_err(kernel("its signal mask"))?;
        let after_restorer = restorer + RESTORER.len() as u64;
        Ok(Self { request, memory, tracee, registers, frame, after_restorer })
    }

    fn load(&mut self, dlopen: u64, dlerror: u64, library: &[u8]) -> Result<u64, AttachError> {
        let pid = self.request.pid;
        self.write(0, library)?;
        self.call(dlopen, [self.frame.scratch, libc::RTLD_NOW as u64, 0], "dlopen")?;
        if let Some(base) = target::agent(pid)? {
            return Ok(base);
        }
        let text = self.result_of(dlerror)?;
        let mut reason = [0; 512];
        let read = text.and_then(|address| self.memory.read(address, &mut reason).ok());
        let reason = read.map_or_else(|| "the loader does not say why".into(), |()| reply::printable(&reason));
        Err(AttachError::Load { pid, reason, library: self.request.library.to_path_buf() })
    }

    fn enter(&mut self, entry: u64, socket: &[u8]) -> Result<Attached, AttachError> {
        let pid = self.request.pid;
        let reply = self.frame.scratch + MAX_PATH as u64;
        self.write(0, socket)?;
        self.write(MAX_PATH as u64, &reply::empty(self.request))?;
        self.call(entry, [self.frame.scratch, reply, reply::LEN as u64], "the agent")?;
        let mut answer = [0; reply::LEN];
        self.memory.read(reply, &mut answer).map_err(|e| failed(pid, "the agent's answer", e))?;
        reply::read(pid, &answer)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), AttachError> {
        let written = self.memory.write(self.frame.scratch + at, bytes);
        written.map_err(|e| failed(self.request.pid, "its stack", e))
    }

    /// Makes a call, and returns when its rt_sigreturn(2) is about to be made.
    fn call(&mut self, function: u64, arguments: [u64; 3], what: &'static str) -> Result<(), AttachError> {
        let pid = self.request.pid;
        self.jump(function, arguments)?;
        let is_end = |at: &Registers, session: &Self| at.orig_rax == SIGRETURN && session.is_at_end(at);
        if self.run_until(is_end)?.is_some() {
            return Ok(());
        }
        // The frame brings the thread back without us.
        Err(AttachError::Waits { pid, what, seconds: self.request.timeout.as_secs() })
    }

    /// The pointer that a function returns, seen by single steps until it has returned. `None`: it
    /// is null, or was not there in time.
    fn result_of(&mut self, function: u64) -> Result<Option<u64>, AttachError> {
        let pid = self.request.pid;
        let ended = |e| failed(pid, "the call in it", e);
        let restorer = self.after_restorer - RESTORER.len() as u64;
        let deadline = Instant::now() + self.request.timeout;
        self.jump(function, [0; 3])?;
        while Instant::now() < deadline {
            self.tracee.step().map_err(ended)?;
            match self.wait(deadline).map_err(ended)? {
                Some(Stop::Group) => self.tracee.listen().map_err(ended)?,
                Some(_) => {
                    let at = self.tracee.registers().map_err(ended)?;
                    if at.rip == restorer && at.rsp == self.frame.stack + 8 {
                        return Ok(Some(at.rax).filter(|&address| address != 0));
                    }
                }
                None => break,
            }
        }
        Ok(None)
    }

    /// Waits for the next stop. `None`: there was none until the deadline.
    fn wait(&mut self, deadline: Instant) -> io::Result<Option<Stop>> {
        loop {
            self.request.guard.beat();
            let stop = self.tracee.wait(deadline.min(Instant::now() + STOP_TIME))?;
            if stop.is_some() || Instant::now() >= deadline {
                return Ok(stop);
            }
        }
    }

    /// Whether the thread is at the restorer's system call, with the frame on its stack.
    fn is_at_end(&self, at: &Registers) -> bool {
        at.rip == self.after_restorer && at.rsp == self.frame.stack + 8
    }

    /// Has the thread go on at a function. A system call that it is about to make is left out.
    fn jump(&self, function: u64, arguments: [u64; 3]) -> Result<(), AttachError> {
        let [rdi, rsi, rdx] = arguments;
        let eflags = self.registers.eflags & !TRAP_AND_DIRECTION;
        let (rip, rsp, orig_rax) = (function, self.frame.stack, u64::MAX);
        let registers = Registers { rip, rsp, rdi, rsi, rdx, rax: 0, orig_rax, eflags, ..self.registers };
        self.tracee.set_registers(&registers).map_err(|e| failed(self.request.pid, "its registers", e))
    }

    /// Lets the thread run from system call to system call, until the registers are as looked for.
    /// `None`: they were not in time.
    fn run_until(&mut self, is_end: impl Fn(&Registers, &Self) -> bool) -> Result<Option<Registers>, AttachError> {
        let pid = self.request.pid;
        let ended = |e: io::Error| failed(pid, "the call in it", e);
        let deadline = Instant::now() + self.request.timeout;
        self.tracee.resume_to_call().map_err(ended)?;
        while let Some(stop) = self.wait(deadline).map_err(ended)? {
            if stop == Stop::Group {
                self.tracee.listen().map_err(ended)?;
                continue;
            }
            if stop == Stop::SystemCall {
                let registers = self.tracee.registers().map_err(ended)?;
                if is_end(&registers, self) {
                    return Ok(Some(registers));
                }
            }
            self.tracee.resume_to_call().map_err(ended)?;
        }
        Ok(None)
    }
}

/// Stops the first thread where it waits in ppoll(2).
fn safe_point(request: &Request<'_>, memory: &Memory, target: &Target) -> Result<(Tracee, Registers), AttachError> {
    let pid = request.pid;
    let kernel = |e| failed(pid, "stopping it", e);
    let stopped = poll(request, || {
        // The thread is traced for a moment only: a signal to a traced thread waits for the tracer.
        if !waits_in_ppoll(pid) {
            return Ok(None);
        }
        let mut tracee = Tracee::seize(pid).map_err(kernel)?;
        tracee.interrupt().map_err(kernel)?;
        match tracee.wait(Instant::now() + STOP_TIME).map_err(kernel)? {
            Some(Stop::Interrupted) => {
                let registers = tracee.registers().map_err(kernel)?;
                Ok(is_safe(pid, &registers, memory, target).then_some((tracee, registers)))
            }
            Some(Stop::Group) => Err(AttachError::Stopped(pid)),
            _ => Ok(None),
        }
    });
    stopped?.ok_or(AttachError::NoSafePoint { pid, seconds: request.timeout.as_secs() })
}

/// Asks again and again until there is an answer. `None`: there was none in time.
fn poll<T>(
    request: &Request<'_>,
    mut ask: impl FnMut() -> Result<Option<T>, AttachError>,
) -> Result<Option<T>, AttachError> {
    let deadline = Instant::now() + request.timeout;
    let mut pause = FIRST_PAUSE;
    loop {
        let answer = ask()?;
        if answer.is_some() || Instant::now() >= deadline {
            return Ok(answer);
        }
        request.guard.beat();
        sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether the thread sleeps in ppoll(2). Where the kernel does not say, it may.
fn waits_in_ppoll(pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/syscall"));
    text.map_or(true, |text| text.split(' ').next().and_then(|number| number.parse().ok()) == Some(PPOLL))
}

/// Whether a stopped thread waited in ppoll(2), called by the C library, on the process's first
/// stack, with room below. In a 32-bit segment it would be another system call.
fn is_safe(pid: i32, registers: &Registers, memory: &Memory, target: &Target) -> bool {
    const USER_CODE: u64 = 0x33;
    let mut instruction = [0; SYSCALL as usize];
    let call = registers.rip.wrapping_sub(SYSCALL);
    registers.orig_rax == PPOLL
        && registers.rax as i64 == ERESTARTNOHAND
        && registers.cs == USER_CODE
        && target.text.contains(&Range::new(call as usize, instruction.len()))
        && memory.read(call, &mut instruction).is_ok()
        && instruction == [0x0f, 0x05]
        && has_room(pid, registers.rsp as usize)
}

fn has_room(pid: i32, stack: usize) -> bool {
    let needed = Range::new(stack.saturating_sub(ROOM), ROOM);
    let mut has_room = false;
    let maps = procfs::for_each_map(Some(pid), |line| {
        has_room |= line.path == "[stack]" && line.range.contains(&needed);
    });
    maps.is_ok() && has_room
}
