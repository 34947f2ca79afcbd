//! Whether a device may write to the process's memory.

use std::io;

use kmem::procfs;

use super::Source;

impl Source {
    /// Whether a device may write to the memory after the kernel has noted the write: by direct
    /// I/O, whose requests pin pages. The kernel notes the page when a request begins, not when it
    /// ends.
    pub fn may_do_direct_io(&self) -> bool {
        const DIRECT: u64 = 0o40000; // O_DIRECT on x86-64.
        const DEVICES: [&str; 6] = ["/dev/sg", "/dev/bsg", "/dev/ng", "/dev/nvme", "/dev/vfio", "/dev/infiniband"];
        let may = || -> io::Result<bool> {
            for entry in std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid))? {
                let path = entry?.path();
                let Ok(info) = std::fs::read_to_string(&path) else { continue };
                let number = |name: &str, radix| {
                    let value = info.lines().find_map(|line| line.strip_prefix(name))?;
                    u64::from_str_radix(value.trim(), radix).ok()
                };
                // Files registered with an io_uring are not in the list of descriptors.
                let ring = number("UserFiles:", 10).is_some_and(|files| files > 0);
                if ring || number("flags:", 8).is_none_or(|flags| flags & DIRECT != 0) {
                    return Ok(true);
                }
                let name = path.file_name().unwrap_or_default();
                let target = std::fs::read_link(format!("/proc/{}/fd", self.pid) + "/" + &name.to_string_lossy());
                let target = target.unwrap_or_default().to_string_lossy().into_owned();
                if DEVICES.iter().any(|device| target.starts_with(device)) {
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
