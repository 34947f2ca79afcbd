//! KVM's reports of written guest pages: the dirty log and the dirty ring.
//!
//! Both work on descriptors that the VMM has: the VM's and its vCPUs'. A VM has either a log or
//! rings: with rings enabled, a request for a log fails with `ENXIO`.
//!
//! Source: Documentation/virt/kvm/api.rst, "KVM_GET_DIRTY_LOG" (4.8), "KVM_CLEAR_DIRTY_LOG"
//! (4.117), "KVM_RESET_DIRTY_RINGS" (4.133), "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2" (7.18),
//! "KVM_CAP_DIRTY_LOG_RING" (8.29).

#![allow(unsafe_code)] // ioctls whose arguments hold pointers, and memory shared with the kernel.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, opcode};

use crate::{PAGE_SIZE, Range, mm};

/// `struct kvm_dirty_log`.
#[repr(C)]
struct DirtyLog {
    slot: u32,
    padding: u32,
    bitmap: *mut u64,
}

/// `struct kvm_clear_dirty_log`.
#[repr(C)]
struct ClearDirtyLog {
    slot: u32,
    num_pages: u32,
    first_page: u64,
    bitmap: *const u64,
}

/// `struct kvm_enable_cap`.
#[repr(C)]
struct EnableCap {
    cap: u32,
    flags: u32,
    args: [u64; 4],
    pad: [u8; 64],
}

/// `struct kvm_dirty_gfn`: an entry of a ring.
#[repr(C)]
struct DirtyGfn {
    flags: AtomicU32,
    slot: u32,
    offset: u64,
}

const _: () = assert!(size_of::<DirtyLog>() == 16 && std::mem::offset_of!(DirtyLog, bitmap) == 8);
const _: () = assert!(size_of::<ClearDirtyLog>() == 24 && std::mem::offset_of!(ClearDirtyLog, bitmap) == 16);
const _: () = assert!(size_of::<EnableCap>() == 104 && std::mem::offset_of!(EnableCap, args) == 8);
const _: () = assert!(size_of::<DirtyGfn>() == 16 && std::mem::offset_of!(DirtyGfn, offset) == 8);

const KVMIO: u8 = 0xAE;
const KVM_CHECK_EXTENSION: Opcode = opcode::none(KVMIO, 0x03);
const KVM_GET_DIRTY_LOG: Opcode = opcode::write::<DirtyLog>(KVMIO, 0x42);
const KVM_ENABLE_CAP: Opcode = opcode::write::<EnableCap>(KVMIO, 0xA3);
const KVM_CLEAR_DIRTY_LOG: Opcode = opcode::read_write::<ClearDirtyLog>(KVMIO, 0xC0);
const KVM_RESET_DIRTY_RINGS: Opcode = opcode::none(KVMIO, 0xC7);
const _: () = assert!(KVM_GET_DIRTY_LOG == 0x4010_AE42 && KVM_CLEAR_DIRTY_LOG == 0xC018_AEC0);
const _: () = assert!(KVM_ENABLE_CAP == 0x4068_AEA3 && KVM_RESET_DIRTY_RINGS == 0xAEC7);

const CAP_MANUAL_DIRTY_LOG_PROTECT2: u32 = 168;
const CAP_DIRTY_LOG_RING: u32 = 192;
const CAP_DIRTY_LOG_RING_ACQ_REL: u32 = 223;
/// `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE`.
const MANUAL_PROTECT_ENABLE: u64 = 1;
/// `KVM_DIRTY_LOG_PAGE_OFFSET`: the offset of the ring in a vCPU's descriptor, in pages (x86-64 and
/// arm64).
const RING_PAGE_OFFSET: u64 = 64;
/// `KVM_DIRTY_GFN_F_DIRTY`: the kernel has filled the entry in.
const GFN_DIRTY: u32 = 1;
/// `KVM_DIRTY_GFN_F_RESET`: the entry was read.
const GFN_RESET: u32 = 2;

/// The exit reason `KVM_EXIT_DIRTY_RING_FULL`: collect and reset the rings before the vCPU runs
/// again.
pub const EXIT_DIRTY_RING_FULL: u32 = 31;

/// One ioctl that returns a number.
struct Call {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: the trait asks that `opcode` and `as_ptr` fit together and that the output is decoded as
// the ioctl defines it. `Call` is private; each of the functions below that makes one pairs an
// opcode with the argument of that opcode. Each of these ioctls returns a number.
unsafe impl Ioctl for Call {
    type Output = u32;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(value: IoctlOutput, _: *mut c_void) -> Result<u32, Errno> {
        Ok(value as u32)
    }
}

/// `KVM_CHECK_EXTENSION` of a VM. 0: it has no such capability.
fn check_extension(vm: BorrowedFd<'_>, cap: u32) -> Result<u32, Errno> {
    let call = Call { opcode: KVM_CHECK_EXTENSION, argument: std::ptr::without_provenance_mut(cap as usize) };
    // SAFETY: KVM_CHECK_EXTENSION takes a number in place of a pointer, and writes nothing.
    unsafe { ioctl::ioctl(vm, call) }
}

fn enable_cap(vm: BorrowedFd<'_>, cap: u32, value: u64) -> Result<(), Errno> {
    let mut argument = EnableCap { cap, flags: 0, args: [value, 0, 0, 0], pad: [0; 64] };
    let call = Call { opcode: KVM_ENABLE_CAP, argument: (&raw mut argument).cast() };
    // SAFETY: KVM_ENABLE_CAP reads a `kvm_enable_cap`, a local that outlives the call. The
    // capabilities used here take one number in `args`, and no pointer.
    unsafe { ioctl::ioctl(vm, call) }.map(drop)
}

/// Makes [`dirty_log`] only read; [`clear_dirty_log`] then protects pages again. `false`: the
/// kernel is older than 5.1, and reading the log also clears it and protects its pages.
///
/// # Errors
///
/// `EBADF`, `ENOTTY`: the descriptor is not a VM's.
pub fn enable_manual_protect(vm: BorrowedFd<'_>) -> Result<bool, Errno> {
    if u64::from(check_extension(vm, CAP_MANUAL_DIRTY_LOG_PROTECT2)?) & MANUAL_PROTECT_ENABLE == 0 {
        return Ok(false);
    }
    enable_cap(vm, CAP_MANUAL_DIRTY_LOG_PROTECT2, MANUAL_PROTECT_ENABLE).map(|()| true)
}

/// Reads the dirty log of a memory slot (`KVM_GET_DIRTY_LOG`): bit `i % 64` of word `i / 64` stands
/// for the slot's page `i`.
///
/// # Errors
///
/// `ENOENT`: no such slot, or the slot has no log (`KVM_MEM_LOG_DIRTY_PAGES`). `ENXIO`: the VM has
/// rings.
///
/// # Safety
///
/// `bitmap` has at least one bit for every page that the slot has at the time of the call, in whole
/// words. The kernel writes that many bits, whatever the length of `bitmap`.
pub unsafe fn dirty_log(vm: BorrowedFd<'_>, slot: u32, bitmap: &mut [u64]) -> Result<(), Errno> {
    let mut argument = DirtyLog { slot, padding: 0, bitmap: bitmap.as_mut_ptr() };
    let call = Call { opcode: KVM_GET_DIRTY_LOG, argument: (&raw mut argument).cast() };
    // SAFETY: KVM_GET_DIRTY_LOG reads a `kvm_dirty_log`, a local that outlives the call. It writes
    // one bit for each page of the slot to `bitmap`, which by the contract has as many.
    unsafe { ioctl::ioctl(vm, call) }.map(drop)
}

/// Clears pages of a slot in its log and write-protects them (`KVM_CLEAR_DIRTY_LOG`): those of the
/// first `pages` pages whose bit is set in `bitmap`.
///
/// # Errors
///
/// `EINVAL`: `pages` is neither a multiple of 64 nor the slot's size, or manual protection was not
/// enabled.
///
/// # Panics
///
/// When `bitmap` has fewer than `pages` bits.
pub fn clear_dirty_log(vm: BorrowedFd<'_>, slot: u32, pages: u32, bitmap: &[u64]) -> Result<(), Errno> {
    assert!(bitmap.len() >= pages.div_ceil(64) as usize, "a bitmap for {pages} pages");
    let mut argument = ClearDirtyLog { slot, num_pages: pages, first_page: 0, bitmap: bitmap.as_ptr() };
    let call = Call { opcode: KVM_CLEAR_DIRTY_LOG, argument: (&raw mut argument).cast() };
    // SAFETY: KVM_CLEAR_DIRTY_LOG reads a `kvm_clear_dirty_log`, a local that outlives the call,
    // and `pages` bits of the bitmap, whose length was checked above.
    unsafe { ioctl::ioctl(vm, call) }.map(drop)
}

/// Gives every vCPU that is created from now on a ring of `entries` entries. `false`: the kernel is
/// older than 5.11 and has no rings.
///
/// # Errors
///
/// `EINVAL`: `entries` is not a power of two, is less than 256 (one page) or too many, or the VM
/// has vCPUs already.
pub fn enable_dirty_rings(vm: BorrowedFd<'_>, entries: u32) -> Result<bool, Errno> {
    for cap in [CAP_DIRTY_LOG_RING_ACQ_REL, CAP_DIRTY_LOG_RING] {
        if check_extension(vm, cap)? > 0 {
            enable_cap(vm, cap, u64::from(entries) * size_of::<DirtyGfn>() as u64)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Write-protects the pages of all entries that were taken from the rings, and frees the entries
/// for the kernel (`KVM_RESET_DIRTY_RINGS`). Returns their number.
///
/// # Errors
///
/// `EINVAL`: the VM has no rings.
pub fn reset_dirty_rings(vm: BorrowedFd<'_>) -> Result<u32, Errno> {
    let call = Call { opcode: KVM_RESET_DIRTY_RINGS, argument: std::ptr::null_mut() };
    // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument, and writes only to the VM's own rings.
    unsafe { ioctl::ioctl(vm, call) }
}

/// The mapped ring of a vCPU. One thread takes entries from it; the vCPU may run meanwhile.
#[derive(Debug)]
pub struct DirtyRing {
    memory: Range,
    entries: u32,
    next: u32,
}

/// A page that a vCPU wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyPage {
    /// Address space (16 bits; 1 is x86's system management mode) and memory slot (16 bits).
    pub slot: u32,
    /// The number of the page in its slot.
    pub offset: u64,
}

impl DirtyRing {
    /// Maps the ring of a vCPU. `entries` is the number that was passed to [`enable_dirty_rings`].
    ///
    /// # Errors
    ///
    /// `EINVAL`: the vCPU has no ring, or its ring has another size.
    pub fn map(vcpu: BorrowedFd<'_>, entries: u32) -> Result<Self, Errno> {
        let memory = Range::new(0, entries as usize * size_of::<DirtyGfn>());
        let (protection, offset) = (libc::PROT_READ | libc::PROT_WRITE, RING_PAGE_OFFSET * PAGE_SIZE as u64);
        // SAFETY: a mapping that is not fixed replaces nothing.
        let start = unsafe { mm::mmap(memory, protection, libc::MAP_SHARED, vcpu.as_raw_fd(), offset) }?;
        Ok(Self { memory: Range::new(start, memory.len), entries, next: 0 })
    }

    /// Takes the oldest entry. `None`: there are no more now. The page stays writable until
    /// [`reset_dirty_rings`].
    pub fn take(&mut self) -> Option<DirtyPage> {
        let ring: *mut DirtyGfn = std::ptr::with_exposed_provenance_mut(self.memory.start);
        // SAFETY: the mask leaves at most `entries - 1`, so the entry lies in the mapping, which
        // lives as long as `self`.
        let entry = unsafe { ring.add((self.next & (self.entries - 1)) as usize) };
        // SAFETY: the entry lies in the mapping and is aligned. The kernel writes the flags too,
        // and both sides access them atomically.
        let flags = unsafe { &(*entry).flags };
        if flags.load(Ordering::Acquire) & GFN_DIRTY == 0 {
            return None;
        }
        // SAFETY: the entry lies in the mapping and is aligned. Its flags say that it is dirty: the
        // kernel has filled it in, and does not write it again before this side marks it for reset.
        let page = unsafe {
            DirtyPage {
                slot: (&raw const (*entry).slot).read_volatile(),
                offset: (&raw const (*entry).offset).read_volatile(),
            }
        };
        flags.store(GFN_RESET, Ordering::Release);
        self.next = self.next.wrapping_add(1);
        Some(page)
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        // SAFETY: this ring made the mapping, and `take` gives out copies, so no pointer into it is
        // left.
        let _ = unsafe { mm::unmap(self.memory) };
    }
}
