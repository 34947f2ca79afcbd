//! Guests to try merging on: Debian's cloud kernel under QEMU, which checksum their own files
//! forever.
//!
//! A guest has no disk and no network: only a kernel, an initramfs and a serial console, which is
//! QEMU's standard output. [`Spec::prepare`] finds QEMU and a kernel and builds the initramfs;
//! [`Spec::command`] starts QEMU; [`Guest`] runs a command and reads its console.
//!
//! A guest's memory holds:
//!
//! - its files, in a ramfs. Every guest has the same bytes, on pages of its own;
//! - the kernel. [`Spec`] boots it with `nokaslr`. Otherwise the kernel relocates itself to a
//!   random address at each boot, and no page that contains an absolute address equals another
//!   guest's. Guests booted alike lay out nearly all of their memory alike, so duplicate runs are
//!   long;
//! - the loaded archive, which the kernel frees after unpacking and fills with one byte (0xcc): all
//!   of it is one page, many times. Guests on real hosts are full of such leftovers;
//! - what it rewrites: 4 MiB of random bytes and a 4 MiB copy in each round. Neither can be merged.
//!
//! QEMU marks guest RAM `MADV_MERGEABLE` (`mem-merge=on` is its default), so the same guests serve
//! the kernel's KSM.

mod console;
mod cpio;
pub mod find;
mod guest;
mod heard;
mod initramfs;
pub mod load;
mod probe;
mod spec;

pub use guest::{Broken, Guest, StartError, Verdict};
pub use initramfs::InitramfsError;
pub use probe::{NoKvm, try_kvm};
pub use spec::{Accelerator, MEMORY_MIB_MIN, Options, PrepareError, Spec};
