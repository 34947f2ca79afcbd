//! A program that is limited, or limits itself, after it has marked memory.

use super::PAGE;

/// Sets both limits of a resource.
pub fn limit(resource: usize, value: usize) -> String {
    let limit = libc::rlimit { rlim_cur: value as u64, rlim_max: value as u64 };
    // SAFETY: reads a local.
    super::client::code(unsafe { libc::setrlimit(resource as _, &limit) })
}

/// Refuses a system call to all threads from now on, with EPERM.
pub fn refuse(number: usize) -> String {
    let code = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel reads the filter, which lives until the call returns.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        let done = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program);
        super::client::code(done as i32)
    }
}

/// Lets the kernel's KSM have all of the process: 0 by the C library, 1 past it.
pub fn ksm_all(way: usize) -> String {
    // SAFETY: takes numbers.
    super::client::code(unsafe {
        match way {
            0 => libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0),
            _ => libc::syscall(libc::SYS_prctl, libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) as i32,
        }
    })
}

/// How many mappings in a range the kernel's KSM has.
pub fn mergeable_by_kernel(start: usize, len: usize) -> String {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut count) = (false, 0);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            count += usize::from(inside && flags.split_ascii_whitespace().any(|flag| flag == "mg"));
        } else if let Some((low, high)) = line.split_once(' ').and_then(|(bounds, _)| bounds.split_once('-'))
            && let (Ok(low), Ok(high)) = (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16))
        {
            inside = low < start + len && start < high;
        }
    }
    count.to_string()
}

/// Marks memory of malloc, plain, aligned and of a thread's heap, and frees it.
pub fn mark_malloc() -> String {
    const LEN: usize = 4 << 20;
    // SAFETY: blocks of the C library's allocator; marking changes no bytes.
    unsafe {
        let plain = libc::malloc(LEN);
        let mut aligned = std::ptr::null_mut();
        libc::posix_memalign(&mut aligned, PAGE, LEN);
        for block in [plain, aligned] {
            let start = (block as usize).next_multiple_of(PAGE);
            libc::madvise(start as *mut _, LEN - PAGE, libc::MADV_MERGEABLE);
        }
        libc::free(plain);
        libc::free(aligned);
    }
    "0".into()
}
