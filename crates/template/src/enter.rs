//! `__libc_start_main`: where a program begins.

#![allow(unsafe_code)] // Defines a symbol of the C library.

use std::ffi::{c_char, c_int, c_void};

use crate::copies;
use crate::inherited::Arguments;

/// The C library's function of this name.
type Start = unsafe extern "C" fn(
    main: *mut c_void,
    count: c_int,
    words: *mut *mut c_char,
    init: *mut c_void,
    fini: *mut c_void,
    linker_fini: *mut c_void,
    stack_end: *mut c_void,
) -> c_int;

unsafe extern "C" {
    /// environ(7).
    static mut environ: *mut *mut c_char;
}

/// Calls the C library's, in each copy if the program is a template.
///
/// # Safety
///
/// The program's first instructions call it, once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __libc_start_main(
    main: *mut c_void,
    count: c_int,
    words: *mut *mut c_char,
    init: *mut c_void,
    fini: *mut c_void,
    linker_fini: *mut c_void,
    stack_end: *mut c_void,
) -> c_int {
    // SAFETY: the name is a C string.
    let real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"__libc_start_main".as_ptr()) };
    if real.is_null() {
        std::process::abort();
    }
    // SAFETY: the C library's function of that name has this type. In versions from 2.34 on `init`
    // and `fini` are null, and ignored.
    let real: Start = unsafe { std::mem::transmute(real) };
    let (count, words) = match copies::serve() {
        None => (count, words),
        Some(Arguments { count, words, environment }) => {
            // SAFETY: the process has one thread, which is here: nobody reads the variable now.
            unsafe { environ = environment };
            (count, words)
        }
    };
    // SAFETY: the program makes this very call. Other words are as the kernel lays them out: a list
    // with null behind it, and the environment behind that, which stay for ever.
    unsafe { real(main, count, words, init, fini, linker_fini, stack_end) }
}
