//! Why nothing of a client is merged.

use kmem::procfs::Status;

use crate::users::{User, log_of};

/// Why nothing of a client is merged at present, if so.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    pub(crate) why: Option<String>,
    pub(crate) is_pinned: bool,
    /// Why its memory could not be read the last time.
    unreadable: Option<String>,
}

impl Refusals {
    pub(super) fn pinned(&mut self, pid: i32) {
        (self.why, self.is_pinned) = (Some(pinned_reason(pid)), true);
    }

    /// Refuses pinned or locked memory, and logs that once. Whether it may be merged.
    pub(crate) fn check(&mut self, user: &User, pid: i32, status: &Status) -> bool {
        if status.vm_pin_kib == 0 && status.vm_lck_kib == 0 {
            self.why = None;
            return true;
        }
        if self.why.is_none() {
            let why = pinned_reason(pid);
            log_of!(user, warn, pid, "not merged: {why}");
            (self.why, self.is_pinned) = (Some(why), true);
        }
        false
    }

    /// Its memory could not be read. Each period tries again; the log says it once.
    pub(crate) fn unreadable(&mut self, user: &User, pid: i32, why: String) {
        (self.why, self.is_pinned) = (Some(why.clone()), false);
        self.held_up(user, pid, why);
    }

    /// It is left alone for a reason that `status` knows and that ends by itself; logged once.
    pub(crate) fn held_up(&mut self, user: &User, pid: i32, why: String) {
        if self.unreadable.as_ref() != Some(&why) {
            log_of!(user, warn, pid, "not merged: {why}");
            self.unreadable = Some(why);
        }
    }

    pub(crate) fn readable(&mut self) {
        self.unreadable = None;
    }
}

/// Why a process with pinned or locked memory is not merged.
fn pinned_reason(pid: i32) -> String {
    let (pin, lck) = kmem::procfs::status(Some(pid)).map_or((0, 0), |s| (s.vm_pin_kib, s.vm_lck_kib));
    let what =
        if pin > 0 || lck == 0 { format!("pinned (VmPin {pin} KiB)") } else { format!("locked (VmLck {lck} KiB)") };
    format!(
        "its memory is {what}: a device or a promise holds on to these frames, so nothing more is merged; start it without mlock, VFIO or registered buffers"
    )
}
