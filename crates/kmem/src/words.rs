//! Which memory `/proc/self/cmdline` and `/proc/self/environ` show (`PR_SET_MM_MAP`).
//!
//! Sources: prctl(2), `PR_SET_MM`; proc_pid_stat(5); the kernel's include/uapi/linux/prctl.h.

#![allow(unsafe_code)] // prctl(2) with an address.

use std::io;

use crate::range::Range;
use crate::raw::syscall;

/// `struct prctl_mm_map`.
#[repr(C)]
struct MmMap {
    /// Code from where to where, data, break, stack, words, environment: as `stat` has them.
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    /// The auxiliary vector; length 0: it stays.
    auxv: u64,
    auxv_size: u32,
    /// The program's file; -1: it stays.
    exe_fd: i32,
}

const _: () = assert!(size_of::<MmMap>() == 104 && std::mem::offset_of!(MmMap, exe_fd) == 100);

/// Fields of `/proc/self/stat`.
const START_CODE: usize = 26;
const START_STACK: usize = 28;
const START_DATA: usize = 45;

/// Has the kernel show these bytes as the words and the environment of this process: each word, and
/// each variable, ends with a zero. Any address may be given; what is not anonymous memory shows as
/// nothing.
///
/// # Errors
///
/// `EINVAL`: the kernel lacks `CONFIG_CHECKPOINT_RESTORE`. `InvalidData`: `stat` has other fields.
pub fn show(words: Range, environment: Range) -> io::Result<()> {
    let stat = crate::procfs::Stat::of(None)?;
    let at = |number| stat.field(number);
    let map = MmMap {
        start_code: at(START_CODE)?,
        end_code: at(START_CODE + 1)?,
        start_stack: at(START_STACK)?,
        start_data: at(START_DATA)?,
        end_data: at(START_DATA + 1)?,
        start_brk: at(START_DATA + 2)?,
        // SAFETY: an increment of 0 only asks.
        brk: unsafe { libc::sbrk(0) } as u64,
        arg_start: words.start as u64,
        arg_end: words.end() as u64,
        env_start: environment.start as u64,
        env_end: environment.end() as u64,
        auxv: 0,
        auxv_size: 0,
        exe_fd: -1,
    };
    let (option, change) = (libc::PR_SET_MM as usize, libc::PR_SET_MM_MAP as usize);
    let args = [option, change, (&raw const map).expose_provenance(), size_of::<MmMap>(), 0];
    // SAFETY: the call reads `map`, which outlives it, and remembers where other processes see this
    // one's words. It maps, unmaps and writes nothing: break, code and data keep their bounds.
    unsafe { syscall(libc::SYS_prctl, args) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_shows_what_it_was_told() {
        let read = |name: &str| std::fs::read(format!("/proc/self/{name}")).unwrap();
        let before = (read("cmdline"), read("environ"));
        let of = |bytes: &[u8]| {
            let kept: &'static mut [u8] = Box::leak(bytes.into());
            Range::new(kept.as_ptr() as usize, kept.len())
        };
        show(of(b"a\0word\0"), of(b"NAME=value\0")).unwrap();
        assert_eq!((read("cmdline"), read("environ")), (b"a\0word\0".into(), b"NAME=value\0".into()));
        assert_ne!(before.0, read("cmdline"));
        // The break is where it was: memory can be had.
        assert_eq!(vec![1_u8; 1 << 20].iter().map(|&byte| u64::from(byte)).sum::<u64>(), 1 << 20);
    }
}
