//! A guest that writes a known pattern of frames: a few bytes of 32-bit code without paging, and
//! nothing else.

#![allow(unsafe_code)] // Guest memory is handed to KVM, and its dirty log is read.

use std::os::fd::{AsRawFd, BorrowedFd};

use kmem::testing::Memory;
use kmem::{PAGE_SIZE, kvm};
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// The slot whose pages the guest writes, with a dirty log.
pub const SLOT: u32 = 1;
/// Pages of that slot.
pub const PAGES: u32 = 1 << 17;
/// Frame number of its first page; not a multiple of 64.
pub const FIRST: u64 = 0x1_0003;
/// Its address in the guest, in bytes.
const ADDRESS: u64 = FIRST * PAGE_SIZE as u64;
/// A port without a device.
const PORT: u16 = 0x80;
/// An odd number: counting in steps of it meets every page once.
const STEP: u32 = 0x9E37_79B1 & (PAGES - 1);

/// The pages, in the order of their writing.
pub fn pattern(first: u32, count: u32) -> impl Iterator<Item = u64> {
    (first..first + count).map(|i| u64::from(i.wrapping_mul(STEP) & (PAGES - 1)))
}

/// A VM with one vCPU.
pub struct Guest {
    // Dropped in this order: the VM first, then its memory.
    pub vcpu: VcpuFd,
    _vm: VmFd,
    _code: Memory,
    pub memory: Memory,
}

pub fn borrow(fd: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor stays open as long as its owner is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

/// KVM, or why there is none.
pub fn open() -> Option<Kvm> {
    match Kvm::new() {
        Ok(kvm) => Some(kvm),
        Err(why) => {
            println!("SKIPPED: /dev/kvm: {why}");
            None
        }
    }
}

impl Guest {
    /// A guest; `before` is called with the VM before it has vCPUs.
    pub fn new<T>(kvm: &Kvm, before: impl FnOnce(BorrowedFd<'_>) -> T) -> (Guest, T) {
        let vm = kvm.create_vm().unwrap();
        let result = before(borrow(&vm));
        let (code, memory) = (Memory::new(1), Memory::new(PAGES as usize));
        for (slot, flags, guest_phys_addr, range) in
            [(0, 0, 0, code.0), (SLOT, KVM_MEM_LOG_DIRTY_PAGES, ADDRESS, memory.0)]
        {
            let (memory_size, userspace_addr) = (range.len as u64, range.start as u64);
            let region = kvm_userspace_memory_region { slot, flags, guest_phys_addr, memory_size, userspace_addr };
            // SAFETY: the memory outlives the VM (`Guest` drops it later), and no reference into it
            // is made: `Memory` gives out pointers only.
            unsafe { vm.set_user_memory_region(region) }.unwrap();
        }
        let program = program();
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(code.0.start);
        // SAFETY: the page is mapped, belongs to this guest, and is longer than the program; no
        // vCPU runs yet.
        unsafe { start.copy_from_nonoverlapping(program.as_ptr(), program.len()) };
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        let flat = kvm_segment {
            limit: u32::MAX,
            present: 1,
            s: 1,
            db: 1,
            g: 1,
            type_: 3,
            selector: 16,
            ..Default::default()
        };
        sregs.cs = kvm_segment { type_: 11, selector: 8, ..flat };
        [sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss] = [flat; 5];
        sregs.cr0 |= 1; // Protected mode.
        vcpu.set_sregs(&sregs).unwrap();
        (Guest { vcpu, _vm: vm, _code: code, memory }, result)
    }

    /// Makes the guest write `count` pages of the pattern from number `first` on. `full` is called
    /// when its ring is full.
    pub fn write(&mut self, first: u32, count: u32, mut full: impl FnMut()) {
        let mut regs = self.vcpu.get_regs().unwrap();
        regs.rip = 0;
        regs.rflags = 2;
        regs.rax = u64::from(first.wrapping_mul(STEP) & (PAGES - 1));
        regs.rcx = u64::from(count);
        self.vcpu.set_regs(&regs).unwrap();
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::Hlt) => return,
                Ok(VcpuExit::IoOut(PORT, _)) => {}
                Ok(VcpuExit::Unsupported(kvm::EXIT_DIRTY_RING_FULL)) => full(),
                Ok(exit) => panic!("the guest left with {exit:?}"),
                Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
                Err(e) => panic!("KVM_RUN: {e}"),
            }
        }
    }
}

/// From number eax on, ecx times: writes ecx into the page, and goes to the next number. It leaves
/// the guest every 32 pages. Where the hardware cannot run this code, KVM interprets it, and checks
/// for a full ring only at an exit.
fn program() -> Vec<u8> {
    let mut code = vec![0x89, 0xC7]; //                          next: mov edi, eax
    code.extend([0xC1, 0xE7, 0x0C]); //                                shl edi, 12
    code.extend([0x89, 0x8F]); //                                      mov [edi + ADDRESS], ecx
    code.extend((ADDRESS as u32).to_le_bytes());
    code.push(0x05); //                                                add eax, STEP
    code.extend(STEP.to_le_bytes());
    code.push(0x25); //                                                and eax, PAGES - 1
    code.extend((PAGES - 1).to_le_bytes());
    code.extend([0xF6, 0xC1, 0x1F]); //                                test cl, 31
    code.extend([0x75, 0x02]); //                                      jnz over
    code.extend([0xE6, PORT as u8]); //                                out PORT, al
    code.push(0x49); //                                          over: dec ecx
    code.extend([0x75, (-(code.len() as i8) - 2) as u8]); //           jnz next
    code.push(0xF4); //                                                hlt
    code
}
