//! Whether a device may write to the process's memory.

use std::io;

use kmem::procfs;

use super::Source;

impl Source {
    /// Whether a device may write to the memory after the kernel has noted the write: by direct
    /// I/O, whose requests pin pages. The kernel notes the page when a request begins, not when it
    /// ends.
    pub fn may_do_direct_io(&self) -> bool {
        const DEVICES: [&str; 6] = ["/dev/sg", "/dev/bsg", "/dev/ng", "/dev/nvme", "/dev/vfio", "/dev/infiniband"];
        let may = || -> io::Result<bool> {
            for descriptor in procfs::descriptors(self.pid)? {
                let descriptor = descriptor?;
                // Files registered with an io_uring are not in the list of descriptors.
                if descriptor.registered > 0 || descriptor.is_direct() {
                    return Ok(true);
                }
                let name = descriptor.name(self.pid)?;
                if DEVICES.iter().any(|device| name.starts_with(device)) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        may().unwrap_or(true)
    }

    /// Whether memory is pinned for long: a device may write to it at any time.
    pub fn is_pinned(&self) -> bool {
        procfs::status(Some(self.pid)).map_or(true, |status| status.vm_pin_kib > 0)
    }
}
