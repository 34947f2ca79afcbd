//! The tables by which a program calls the C library, changed in place: so an injected library gets
//! to see the program's calls.
//!
//! Each object has relocations that name a symbol and a place for its address (elf(5)). Places that
//! hold the address of one of the C library's functions get the agent's function instead. So do
//! those that the loader would fill at the first call.
//!
//! ```text
//! bind       all objects, when the program is attached; refuses before it changes anything
//! bind_new   objects that were loaded since, before the program's dlsym(3)
//! ```
//!
//! A program gets at a library that it loads by dlsym(3), so its tables are changed before its
//! functions are called, but for constructors, which know nothing of the program's memory yet.
//!
//! The loader works on objects that are in its list already, and must not be disturbed. So the list
//! is read, the loader's lock is taken once and released (dladdr(3)), and only objects that were in
//! the list before are changed: they are ready.
//!
//! Not seen are addresses that the program has copied elsewhere before.

#![allow(unsafe_code)] // Reads and writes the loader's tables.

use std::ffi::{CStr, c_int, c_void};
use std::mem::zeroed;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kmem::range::Range;
use kmem::{PAGE_SIZE, raw};
use rustix::io::Errno;

use crate::intercept::next::Next;
use crate::intercept::{descriptors, interpose, process_madvise};

/// Kinds of relocations whose place holds a symbol's address.
#[cfg(target_arch = "x86_64")]
mod kind {
    pub(super) const ADDRESS: u32 = 1;
    pub(super) const DATA: u32 = 6;
    pub(super) const CALL: u32 = 7;
}
#[cfg(target_arch = "aarch64")]
mod kind {
    pub(super) const ADDRESS: u32 = 257;
    pub(super) const DATA: u32 = 1025;
    pub(super) const CALL: u32 = 1026;
}

/// Tags of the dynamic section (elf(5)).
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

/// The parts of the GNU C library, whose calls among each other are as they are under preloading.
const OWN_LIBRARIES: [&str; 4] = ["libc", "libpthread", "libdl", "ld-linux"];

/// A function that the agent sees.
struct Hook {
    name: &'static CStr,
    /// The C library's; 0 if it has none of this name.
    theirs: usize,
    ours: usize,
    /// Whether an object that asks for the name now gets the C library's.
    is_default: bool,
}

/// Why the tables are not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TableError {
    /// Another library sees the program's calls, and makes its own unseen.
    #[error("{by} stands between {object} and the C library's {name}; start the program with `pageone run`")]
    Foreign { object: String, name: String, by: String },
    /// The kernel does not let the agent write there.
    #[error("the tables of {object} cannot be changed: {errno}")]
    Sealed { object: String, errno: Errno },
}

/// `dlpi_adds` when the tables were changed last; 0: the program is not attached.
static BOUND: AtomicU64 = AtomicU64::new(0);

/// Only addresses of these are wanted: they are gone to, and not called.
type Code = unsafe extern "C" fn();
// SAFETY: the function is never called by this type.
static DLSYM: Next<Code> = unsafe { Next::new(c"dlsym") };
// SAFETY: the function is never called by this type.
static DLVSYM: Next<Code> = unsafe { Next::new(c"dlvsym") };

/// The names and addresses of the agent's functions.
macro_rules! ours {
    ($($module:ident: $($name:ident)*;)*) => {
        [$($((const { c_string(concat!(stringify!($name), "\0")) }, $module::$name as *const () as usize)),*),*]
    };
}

const fn c_string(text: &str) -> &CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(string) => string,
        Err(_) => panic!("it has one zero, at its end"),
    }
}

/// All functions that the agent sees. The names are those of its symbols.
fn hooks() -> Vec<Hook> {
    let symbols = ours! {
        interpose: mmap mmap64 munmap mremap madvise mprotect pkey_mprotect _Fork clone pthread_create ioctl prctl;
        process_madvise: process_madvise;
        descriptors: close dup2 dup3 close_range closefrom setrlimit setrlimit64 prlimit prlimit64;
    };
    let late = [(c"dlsym", late_dlsym as *const () as usize), (c"dlvsym", late_dlvsym as *const () as usize)];
    let find = |place, name: &CStr| {
        // SAFETY: the name is a C string.
        unsafe { libc::dlsym(place, name.as_ptr()) }.expose_provenance()
    };
    let hook = |(name, ours): (&'static CStr, usize)| {
        let theirs = find(libc::RTLD_NEXT, name);
        Hook { name, theirs, ours, is_default: find(libc::RTLD_DEFAULT, name) == theirs }
    };
    symbols.into_iter().chain(late).map(hook).filter(|hook| hook.theirs != 0).collect()
}

/// Changes the tables of all objects.
///
/// # Errors
///
/// [`TableError::Foreign`]: nothing was changed. After the other error a part was; what was changed
/// does what the C library does, as long as no memory is managed.
pub(crate) fn bind() -> Result<(), TableError> {
    let _ = [DLSYM.address(), DLVSYM.address()];
    let hooks = hooks();
    let (ready, adds) = ready();
    let mut foreign = None;
    for_each_place(&hooks, &ready, |object, hook, place, now| {
        if now.is_foreign(hook, object) && foreign.is_none() {
            foreign = Some((object.name(), hook.name, place.load(Ordering::Relaxed)));
        }
        Ok(())
    })?;
    if let Some((object, name, by)) = foreign
        && let Some(by) = library_of(by).filter(|by| !is_own(by))
    {
        return Err(TableError::Foreign { object, name: name.to_string_lossy().into_owned(), by });
    }
    for_each_place(&hooks, &ready, change)?;
    BOUND.store(adds, Ordering::Release);
    Ok(())
}

/// Changes the tables of new objects. The caller holds no lock of the agent.
pub(crate) fn bind_new() {
    let bound = BOUND.load(Ordering::Acquire);
    if bound == 0 || bound == adds() {
        return;
    }
    let hooks = hooks();
    let (ready, adds) = ready();
    // An object that cannot be changed stays as it is.
    let _ = for_each_place(&hooks, &ready, change);
    BOUND.store(adds, Ordering::Release);
}

/// Puts the agent's function where the C library's is, or where the loader would put that.
fn change(object: &Object, hook: &Hook, place: &AtomicUsize, now: Now) -> Result<(), TableError> {
    if !now.is_theirs(hook) {
        return Ok(());
    }
    let address = std::ptr::from_ref(place).expose_provenance();
    let page = Range::new(address & !(PAGE_SIZE - 1), PAGE_SIZE);
    let is_sealed = object.sealed.contains(&page);
    let protect = |protection| {
        // SAFETY: the page is one of the object's tables, which the loader has made readable only.
        // It stays readable, and nobody but this thread changes its protection.
        unsafe { raw::mprotect(page.start, page.len, protection) }
            .map_err(|errno| TableError::Sealed { object: object.name(), errno })
    };
    if is_sealed {
        protect(libc::PROT_READ | libc::PROT_WRITE)?;
    }
    place.store(hook.ours, Ordering::Release);
    if is_sealed {
        protect(libc::PROT_READ)?;
    }
    Ok(())
}

/// What a place holds.
enum Now {
    Function(usize),
    /// The way to the loader, which looks the function up at the first call.
    Loader,
}

impl Now {
    fn is_theirs(&self, hook: &Hook) -> bool {
        match *self {
            Self::Function(address) => address == hook.theirs,
            Self::Loader => hook.is_default,
        }
    }

    /// Whether it belongs neither to the C library nor to the agent.
    fn is_foreign(&self, hook: &Hook, object: &Object) -> bool {
        match *self {
            Self::Function(address) => {
                // A program that is not relocated has code of its own for each function.
                ![0, hook.theirs, hook.ours].contains(&address) && !object.program.contains(&Range::new(address, 1))
            }
            Self::Loader => !hook.is_default,
        }
    }
}

/// A program or a library, as the loader has mapped it.
struct Object<'a> {
    base: usize,
    path: &'a CStr,
    headers: &'a [libc::Elf64_Phdr],
    whole: Range,
    /// What is readable only, now that it is relocated.
    sealed: Range,
    /// All memory of the program.
    program: Range,
}

impl<'a> Object<'a> {
    /// # Safety
    ///
    /// `info` is what dl_iterate_phdr(3) gives a callback, which does not return before `'a` ends.
    unsafe fn new(info: &'a libc::dl_phdr_info, program: &mut Option<Range>) -> Self {
        // SAFETY: by the contract both pointers are valid, and the number is that of the headers.
        let (path, headers) = unsafe {
            (CStr::from_ptr(info.dlpi_name), std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)))
        };
        let base = info.dlpi_addr as usize;
        let place = |header: &libc::Elf64_Phdr| {
            (base + header.p_vaddr as usize, base + (header.p_vaddr + header.p_memsz) as usize)
        };
        let of = |kind| headers.iter().filter(move |header| header.p_type == kind).map(place);
        let start = of(libc::PT_LOAD).map(|(start, _)| start).min().unwrap_or(base) & !(PAGE_SIZE - 1);
        let end = of(libc::PT_LOAD).map(|(_, end)| end).max().unwrap_or(base).next_multiple_of(PAGE_SIZE);
        let whole = Range::new(start, end.saturating_sub(start));
        // As the loader rounds it.
        let (from, to) = of(libc::PT_GNU_RELRO)
            .next()
            .map_or((0, 0), |(start, end)| (start & !(PAGE_SIZE - 1), end & !(PAGE_SIZE - 1)));
        let sealed = Range::new(from, to.saturating_sub(from));
        // The program comes first.
        let program = *program.get_or_insert(whole);
        Self { base, path, headers, whole, sealed, program }
    }

    fn name(&self) -> String {
        if self.path.is_empty() { "the program".into() } else { self.path.to_string_lossy().into_owned() }
    }

    /// Whether its tables are the program's business: not those of the C library, nor the agent's.
    fn is_of_program(&self) -> bool {
        let own = at_home as *const () as usize;
        let path = self.path.to_string_lossy();
        !self.whole.contains(&Range::new(own, 1)) && !is_own(&path) && !path.starts_with("linux-vdso")
    }

    /// Calls `each` for each place in its tables that belongs to a hook.
    ///
    /// # Safety
    ///
    /// The object is mapped and relocated, and stays so until this returns.
    unsafe fn for_each_place(
        &self,
        hooks: &[Hook],
        each: &mut impl FnMut(&Object, &Hook, &AtomicUsize, Now) -> Result<(), TableError>,
    ) -> Result<(), TableError> {
        let Some(dynamic) = self.headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return Ok(()) };
        let mut values = [0usize; 24];
        let mut entry = (self.base + dynamic.p_vaddr as usize) as *const [i64; 2];
        // SAFETY: by the contract the section is mapped. It ends with a tag of zero.
        unsafe {
            while (*entry)[0] != 0 {
                if let Some(value) = usize::try_from((*entry)[0]).ok().and_then(|tag| values.get_mut(tag)) {
                    *value = (*entry)[1] as usize;
                }
                entry = entry.add(1);
            }
        }
        // The GNU C library has made most of them addresses.
        let address = |tag: i64| match values[tag as usize] {
            0 => 0,
            value if value < self.whole.start => value + self.base,
            value => value,
        };
        let (symbols, strings) = (address(DT_SYMTAB) as *const libc::Elf64_Sym, address(DT_STRTAB));
        if symbols.is_null() || strings == 0 {
            return Ok(());
        }
        for (table, len) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let (table, count) = (address(table) as *const Relocation, values[len as usize] / size_of::<Relocation>());
            let count = if table.is_null() { 0 } else { count };
            for i in 0..count {
                // SAFETY: by the contract the table is mapped, and has this many entries.
                let relocation = unsafe { table.add(i).read() };
                let (symbol, kind) = ((relocation.info >> 32) as usize, relocation.info as u32);
                let is_address =
                    matches!(kind, kind::CALL | kind::DATA) || kind == kind::ADDRESS && relocation.addend == 0;
                if symbol == 0 || !is_address {
                    continue;
                }
                // SAFETY: a relocation names a symbol of the table, and that a string of its.
                let name = unsafe { CStr::from_ptr((strings + (*symbols.add(symbol)).st_name as usize) as *const _) };
                let place = self.base + relocation.offset as usize;
                let whole_word = place.is_multiple_of(align_of::<AtomicUsize>());
                let Some(hook) = hooks.iter().find(|hook| hook.name == name && whole_word) else { continue };
                // SAFETY: the place is a word of the object's memory, aligned, and mapped by the
                // contract. The loader and calling threads read and write it as a word.
                let place = unsafe { AtomicUsize::from_ptr(place as *mut usize) };
                let value = place.load(Ordering::Acquire);
                let is_own = kind == kind::CALL && self.whole.contains(&Range::new(value, 1));
                each(self, hook, place, if is_own { Now::Loader } else { Now::Function(value) })?;
            }
        }
        Ok(())
    }
}

/// A relocation (`Elf64_Rela`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// Whether a path is that of a part of the GNU C library.
fn is_own(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    OWN_LIBRARIES
        .iter()
        .any(|own| name.strip_prefix(own).is_some_and(|rest| rest.starts_with(".so.") || rest.starts_with('-')))
}

/// The library that an address lies in.
fn library_of(address: usize) -> Option<String> {
    // SAFETY: all fields are numbers or pointers, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { zeroed() };
    // SAFETY: the C library writes to the local variable only.
    let found = unsafe { libc::dladdr(address as *const c_void, &mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: the name is a C string, as long as its object is loaded. It is one of the program's
    // start, or just used by one.
    found.then(|| unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

/// Calls `each` for every object, with the loader's list locked.
fn for_each_object<F: FnMut(&Object, &libc::dl_phdr_info)>(mut each: F) {
    struct Walk<'f, F> {
        each: &'f mut F,
        program: Option<Range>,
    }
    unsafe extern "C" fn visit<F: FnMut(&Object, &libc::dl_phdr_info)>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        walk: *mut c_void,
    ) -> c_int {
        // SAFETY: `walk` is the variable below, which nobody else uses meanwhile. `info` is valid
        // until this function returns.
        unsafe {
            let (walk, info) = (&mut *walk.cast::<Walk<'_, F>>(), &*info);
            let object = Object::new(info, &mut walk.program);
            (walk.each)(&object, info);
        }
        0
    }
    let mut walk = Walk { each: &mut each, program: None };
    // SAFETY: the function takes what is passed for it.
    unsafe { libc::dl_iterate_phdr(Some(visit::<F>), (&raw mut walk).cast()) };
}

/// The number of objects that have ever been loaded.
fn adds() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, adds: *mut c_void) -> c_int {
        // SAFETY: `adds` is the variable below. `info` is valid until this function returns.
        unsafe { *adds.cast() = (*info).dlpi_adds };
        1
    }
    let mut adds = 0u64;
    // SAFETY: the function takes what is passed for it.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut adds).cast()) };
    adds
}

/// Objects that the loader has done with, and the number of those that had ever been loaded.
fn ready() -> (Vec<(usize, String)>, u64) {
    let (mut list, mut adds) = (Vec::new(), 0);
    for_each_object(|object, info| {
        adds = info.dlpi_adds;
        list.push((object.base, object.name()));
    });
    // What the loader was doing meanwhile is done when its lock is free.
    library_of(at_home as *const () as usize);
    (list, adds)
}

fn at_home() {}

fn for_each_place(
    hooks: &[Hook],
    ready: &[(usize, String)],
    mut each: impl FnMut(&Object, &Hook, &AtomicUsize, Now) -> Result<(), TableError>,
) -> Result<(), TableError> {
    let mut result = Ok(());
    for_each_object(|object, _| {
        let is_ready = ready.iter().any(|(base, name)| *base == object.base && *name == object.name());
        if result.is_ok() && is_ready && object.is_of_program() {
            // SAFETY: an object is unmapped only after it was taken from the list, which is locked.
            // The loader has relocated it.
            result = unsafe { object.for_each_place(hooks, &mut each) };
        }
    });
    result
}

extern "C" fn before_dlsym() -> *mut c_void {
    let errno = raw::errno();
    bind_new();
    raw::set_errno(errno);
    DLSYM.address()
}

extern "C" fn before_dlvsym() -> *mut c_void {
    before_dlsym();
    DLVSYM.address()
}

/// Changes the tables of new objects, and goes on at what `before` returns, with the caller's
/// arguments and return address: dlsym(3) asks which library calls it.
macro_rules! pass_on {
    ($name:ident, $before:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "call {before}", "pop rdx", "pop rsi", "pop rdi", "jmp rax",
                before = sym $before
            )
        }
        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "stp x0, x1, [sp, -32]!", "stp x2, x30, [sp, 16]", "bl {before}", "mov x16, x0",
                "ldp x2, x30, [sp, 16]", "ldp x0, x1, [sp], 32", "br x16",
                before = sym $before
            )
        }
    };
}

pass_on!(late_dlsym, before_dlsym);
pass_on!(late_dlvsym, before_dlvsym);
