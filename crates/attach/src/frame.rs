//! A signal frame, as the kernel makes one before it calls a handler (x86-64).
//!
//! ```text
//!   the thread's stack ─┐
//!   red zone, 128 bytes │ which the interrupted function may use
//!   scratch             │ paths and the agent's answer
//!   vector state        │ aligned to 64 bytes
//!   frame               │ return address, registers, signal mask
//!   the call's stack    ▼
//! ```
//!
//! A function that is called with the frame's address in the stack pointer finds its return address
//! there: the C library's code behind each signal handler, which calls rt_sigreturn(2). The kernel
//! then takes all registers from the frame (`struct rt_sigframe`, arch/x86/include/asm/sigframe.h).

use std::arch::x86_64::__cpuid_count;

use crate::tracee::Registers;

/// The red zone of the System V ABI.
const RED_ZONE: u64 = 128;
/// Bytes for paths and the agent's answer.
pub(crate) const SCRATCH: u64 = 4096;
/// Bytes of a return address, `struct ucontext` and the signal mask.
const FRAME: usize = 8 + 40 + 256 + 8;

/// Where registers lie in the legacy part of the vector state.
const LEGACY: usize = 512;
/// … and the bytes left to software in it (`struct _fpx_sw_bytes`).
const SOFTWARE: usize = 464;
/// Bytes of the header behind it. It begins with the components that are in use.
const HEADER: usize = 64;
/// `FP_XSTATE_MAGIC1` and `FP_XSTATE_MAGIC2` (arch/x86/include/uapi/asm/sigcontext.h).
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS` (uapi/asm/ucontext.h).
const FLAGS: u64 = 7;
/// No value of `ss_flags`: the kernel leaves the thread's alternate stack as it is.
const NO_STACK: u32 = 0x7f;
/// ppoll(2) and rt_sigreturn(2).
pub(crate) const PPOLL: u64 = libc::SYS_ppoll as u64;
pub(crate) const SIGRETURN: u64 = libc::SYS_rt_sigreturn as u64;
/// Bytes of the instruction `syscall`.
pub(crate) const SYSCALL: u64 = 2;

/// A frame, and where it lies.
pub(crate) struct Frame {
    /// The stack pointer with which a function is called.
    pub(crate) stack: u64,
    /// Scratch of [`SCRATCH`] bytes.
    pub(crate) scratch: u64,
    /// What is written at [`Frame::stack`]: the frame and the vector state.
    pub(crate) bytes: Vec<u8>,
}

/// The frame that brings a thread back into the ppoll(2) that it was interrupted in.
///
/// `registers`: those at the stop, `restorer`: code that calls rt_sigreturn(2). `None`: the vector
/// state is not understood.
pub(crate) fn build(registers: &Registers, mut vectors: Vec<u8>, mask: u64, restorer: u64) -> Option<Frame> {
    let used = seal(&mut vectors)?;
    let scratch = registers.rsp.checked_sub(RED_ZONE + SCRATCH)? & !63;
    let state = scratch.checked_sub(used as u64)? & !63;
    // As at a function's entry: the return address lies at an odd multiple of 8.
    let stack = (state.checked_sub(FRAME as u64)? & !15).checked_sub(8)?;
    let mut bytes = Vec::with_capacity((scratch - stack) as usize);
    let mut word = |value: u64| bytes.extend(value.to_le_bytes());
    let r = registers;
    // The alternate stack: its place, its flags, its size.
    [restorer, FLAGS, 0, 0, NO_STACK.into(), 0].into_iter().for_each(&mut word);
    [r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15].into_iter().for_each(&mut word);
    // The system call is made once more, with the time that is left: the kernel has noted that in
    // the caller's variable.
    let (number, again) = (r.orig_rax, r.rip.checked_sub(SYSCALL)?);
    [r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, number, r.rcx, r.rsp, again, r.eflags].into_iter().for_each(&mut word);
    word(r.cs & 0xffff | (r.ss & 0xffff) << 48);
    // The error, the trap, the mask of old, the address of the fault.
    [0; 4].into_iter().for_each(&mut word);
    word(state);
    [0; 8].into_iter().for_each(&mut word);
    word(mask);
    bytes.resize((state - stack) as usize, 0);
    bytes.extend(&vectors);
    Some(Frame { stack, scratch, bytes })
}

/// Marks the vector state as the kernel does in frames of its own, and returns its length.
///
/// The kernel refuses states larger than those that the thread may use, and the trace has room for
/// all that the processor has. So it is cut behind the last component in use.
fn seal(state: &mut Vec<u8>) -> Option<usize> {
    let in_use = u64::from_le_bytes(state.get(LEGACY..LEGACY + 8)?.try_into().ok()?);
    let end = |component: u32| {
        // Size and offset of a component (Intel SDM, CPUID leaf 0DH). The first two are legacy.
        let layout = __cpuid_count(0xd, component);
        layout.eax as usize + layout.ebx as usize
    };
    let ends = (2..63).filter(|component| in_use >> component & 1 == 1).map(end);
    let len = ends.max().unwrap_or(0).max(LEGACY + HEADER);
    if state.len() < len {
        return None;
    }
    state.truncate(len);
    state[SOFTWARE..LEGACY].fill(0);
    let mut put = |at: usize, bytes: &[u8]| state[SOFTWARE + at..][..bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC1.to_le_bytes());
    put(4, &(len as u32 + 4).to_le_bytes());
    // The legacy components are always there.
    put(8, &(in_use | 3).to_le_bytes());
    put(16, &(len as u32).to_le_bytes());
    state.extend(MAGIC2.to_le_bytes());
    Some(state.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_lies_below_the_red_zone_and_is_aligned_as_a_call() {
        // SAFETY: all fields are numbers.
        #[allow(unsafe_code)]
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        (registers.rip, registers.orig_rax, registers.rbx) = (0x1002, PPOLL, 77);
        let mut vectors = vec![0; 4096];
        vectors[LEGACY] = 3;
        for rsp in 0x7fff_0000_1000u64..0x7fff_0000_1040 {
            registers.rsp = rsp;
            let frame = build(&registers, vectors.clone(), 5, 0xabc).unwrap();
            assert_eq!(frame.stack % 16, 8);
            assert!(frame.scratch + SCRATCH <= rsp - RED_ZONE);
            assert!(frame.stack + frame.bytes.len() as u64 <= frame.scratch);
            let word = |at: usize| u64::from_le_bytes(frame.bytes[at..at + 8].try_into().unwrap());
            assert_eq!((word(0), word(FRAME - 8)), (0xabc, 5), "return address and mask");
            // Offsets of struct sigcontext.
            let context = 8 + 40;
            assert_eq!((word(context + 88), word(context + 104)), (77, PPOLL), "rbx and rax");
            assert_eq!((word(context + 120), word(context + 128)), (rsp, 0x1000), "rsp and rip");
            let state = word(context + 184);
            assert_eq!(state % 64, 0);
            let at = (state - frame.stack) as usize;
            assert_eq!(frame.bytes[at + SOFTWARE..][..4], MAGIC1.to_le_bytes());
            assert_eq!(frame.bytes[at + LEGACY + HEADER..], MAGIC2.to_le_bytes());
        }
        registers.rsp = 100;
        assert!(build(&registers, vectors, 0, 0).is_none(), "no room");
        registers.rsp = 0x7fff_0000_1000;
        assert!(build(&registers, vec![0; 100], 0, 0).is_none(), "no vector state");
    }
}
