//! What is said when something is wrong, and the watch over operations that do not end.
//!
//! All of this works in a child of a raw fork, where the heap's lock may be held for ever: nothing
//! here allocates.

#![allow(unsafe_code)] // Handles signals.

use std::fmt::{Arguments, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

use crate::ops::OPS;
use crate::{arena, sys};

/// Operations that are kept for a finding.
const KEPT: usize = 50;
/// Numbers kept of each: which, and what it was about.
const FIELDS: usize = 5;
/// Fields of the last operations; the operation `n` is at `n % KEPT`.
static LOG: [[AtomicUsize; FIELDS]; KEPT] = [const { [const { AtomicUsize::new(0) }; FIELDS] }; KEPT];
static NOW: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);
/// When the operation began, in milliseconds since the start. 0: none is under way.
static BEGAN: AtomicU64 = AtomicU64::new(0);
/// The child of a fork, and of which operation.
static CHILD: AtomicU64 = AtomicU64::new(0);
static FOUND: AtomicBool = AtomicBool::new(false);

/// How long an operation may take. A daemon may be stopped for a second, and the machine be busy.
const PATIENCE: Duration = Duration::from_secs(80);

/// Text in a buffer of its own.
struct Text {
    bytes: [u8; 1024],
    len: usize,
}

impl Text {
    fn line(arguments: Arguments<'_>) {
        let mut text = Self { bytes: [0; 1024], len: 0 };
        let _ = text.write_fmt(arguments);
        let _ = text.write_str("\n");
        // SAFETY: a buffer of this function.
        unsafe { libc::write(1, text.bytes.as_ptr().cast(), text.len) };
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let count = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}

/// Notes that an operation begins.
pub(crate) fn begin(number: u64, op: usize) {
    let fields = &LOG[number as usize % KEPT];
    fields[1..].iter().for_each(|field| field.store(usize::MAX, Relaxed));
    fields[0].store(op, Relaxed);
    NOW.store(number, Relaxed);
    BEGAN.store(millis().max(1), Release);
}

/// Notes what the operation is about.
pub(crate) fn about(numbers: &[usize]) {
    let fields = &LOG[NOW.load(Relaxed) as usize % KEPT];
    let free = fields.iter().position(|field| field.load(Relaxed) == usize::MAX).unwrap_or(FIELDS);
    fields[free..].iter().zip(numbers).for_each(|(field, &number)| field.store(number, Relaxed));
}

/// Notes that the operation has ended.
pub(crate) fn end() {
    BEGAN.store(0, Release);
}

/// From now on this process is the child of a fork.
pub(crate) fn in_child() {
    CHILD.store(NOW.load(Relaxed), Relaxed);
    BEGAN.store(0, Release);
}

fn millis() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// Says what is wrong and ends the process.
pub(crate) fn report(what: Arguments<'_>, address: usize) -> ! {
    if FOUND.swap(true, SeqCst) {
        // Another thread says it, or this one failed while it did.
        sys::sleep_ms(5000);
        sys::exit_now(1);
    }
    let (seed, now, child) = (SEED.load(Relaxed), NOW.load(Relaxed), CHILD.load(Relaxed));
    Text::line(format_args!("FINDING {what}"));
    Text::line(format_args!("  client seed {seed}, process {}, operation {now}", sys::getpid()));
    if child > 0 {
        Text::line(format_args!("  in the child of operation {child}"));
    }
    for number in now.saturating_sub(KEPT as u64 - 1)..=now {
        let fields = [0, 1, 2, 3, 4].map(|field| LOG[number as usize % KEPT][field].load(Relaxed));
        let name = OPS.get(fields[0]).map_or("-", |op| op.name);
        let mut numbers = Text { bytes: [0; 1024], len: 0 };
        for field in fields[1..].iter().take_while(|field| **field != usize::MAX) {
            let _ = write!(numbers, " {field:#x}");
        }
        let numbers = std::str::from_utf8(&numbers.bytes[..numbers.len]).unwrap_or_default();
        Text::line(format_args!("  {number} {name}{numbers}"));
    }
    if address > 0 {
        Text::line(format_args!("  at {address:#x}, in:"));
        print_map(address);
    }
    Text::line(format_args!("END"));
    sys::exit_now(1)
}

/// Says that a byte of a page is wrong.
pub(crate) fn bytes(what: &str, memory: usize, wanted: usize, at: usize) -> ! {
    // Words, since the whole page is often another one.
    let word = |start: usize| {
        let bytes = [0, 1, 2, 3, 4, 5, 6, 7].map(|n| arena::byte(start + (at & !7) + n));
        u64::from_ne_bytes(bytes)
    };
    let (found, wanted) = (word(memory), word(wanted));
    report(format_args!("{what}: byte {at} of the page at {memory:#x}: want {wanted:#x}, found {found:#x}"), memory)
}

/// Prints the line of `/proc/self/maps` that an address lies in, or those before and behind a hole.
fn print_map(address: usize) {
    let mut before = Text { bytes: [0; 1024], len: 0 };
    let Ok(file) = std::fs::File::open("/proc/self/maps") else { return };
    let mut line = [0u8; 512];
    let (mut len, mut chunk) = (0, [0u8; 4096]);
    while let Ok(count @ 1..) = std::io::Read::read(&mut &file, &mut chunk) {
        for &byte in &chunk[..count] {
            if byte != b'\n' {
                line[len.min(511)] = byte;
                len += 1;
                continue;
            }
            let text = std::str::from_utf8(&line[..len.min(511)]).unwrap_or_default();
            len = 0;
            let bounds = text.split(' ').next().and_then(|bounds| bounds.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16).ok();
            let Some((Some(start), Some(end))) = bounds.map(|(start, end)| (number(start), number(end))) else {
                continue;
            };
            if start > address {
                Text::line(format_args!("  nothing is mapped there; before and behind it:"));
                Text::line(format_args!("  {}", std::str::from_utf8(&before.bytes[..before.len]).unwrap_or_default()));
            }
            if end > address {
                return Text::line(format_args!("  {text}"));
            }
            before.len = 0;
            let _ = before.write_str(text);
        }
    }
}

/// The instruction at which a signal came.
fn program_counter(context: &libc::ucontext_t) -> usize {
    #[cfg(target_arch = "x86_64")]
    let counter = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    let counter = context.uc_mcontext.pc as usize;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    compile_error!("the program counter in this architecture's ucontext_t is not known here");
    counter
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes valid structures; these signals have an address.
    let (address, code) =
        unsafe { ((*info).si_addr() as usize, program_counter(&*context.cast::<libc::ucontext_t>())) };
    Text::line(format_args!("code at {code:#x}, in:"));
    print_map(code);
    report(format_args!("signal {signal} at {address:#x}"), address)
}

/// Makes faults findings, and watches for operations that do not end.
pub(crate) fn watch(seed: u64) {
    SEED.store(seed, Relaxed);
    millis();
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGABRT] {
        // SAFETY: the structure is initialised: its mask is empty, as zeros are.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    let limit = (PATIENCE * e2e::patience()).as_millis() as u64;
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let began = BEGAN.load(Acquire);
            if began > 0 && millis() > began + limit {
                print_threads();
                report(format_args!("an operation does not end"), 0);
            }
        }
    });
}

/// Where each thread of this process waits.
fn print_threads() {
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let stack = read("stack").replace('\n', " ");
        Text::line(format_args!("  thread {} {} {}", read("comm").trim(), read("syscall").trim(), stack.trim()));
    }
}
