//! Clones of one snapshot, which may make the same random numbers, are not started unasked.
//!
//! A command that starts clones locks a file of the snapshot's, shared, in the directory of this
//! user's sockets. Its guests inherit a second descriptor, by which nothing can be written: that
//! lock ends with the last of them, whatever becomes of the command. A guest's QEMU can end it too,
//! but not the command's own. Another user's clones are not known.

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use snapshot::record::Description;

use crate::paths;

/// The file that is locked as long as a clone of a snapshot lives.
pub(super) struct Twins(File);

impl Twins {
    /// `label`: see [`checkpoint::Catalog::label`].
    pub(super) fn of(label: &str) -> Result<Self> {
        Ok(Self(paths::open_own(&paths::own_directory().join("clones"), &label.replace('/', "-"))?))
    }

    /// Refuses guests that would make the same random numbers: `count` of them, one beside the
    /// guest that was stored, or one beside those of another command.
    pub(super) fn refuse(&self, description: &Description, count: u32) -> Result<()> {
        if description.reseeds {
            return Ok(());
        }
        let twin = match &description.source {
            _ if count > 1 => format!("these {count} guests"),
            Some(source) if source.runs() => format!("this guest and the one that was stored (process {})", source.pid),
            // Of two commands at the same moment one gets it.
            _ if flock(&self.0, FlockOperation::NonBlockingLockExclusive).is_err() => {
                "this guest and another clone of the snapshot, which runs,".into()
            }
            _ => return Ok(()),
        };
        bail!(
            "{twin} could make the same random numbers, and so the same keys: that their kernel makes new ones in a clone is known \
             only of guests with the device vmgenid whose qemu-guest-agent found its driver at `snapshot save`. --same-random \
             starts them all the same"
        )
    }

    /// Leaves a lock to all processes that are started from now on, and keeps one.
    pub(super) fn hold(self) -> Result<[File; 2]> {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let left = File::open(path).context("cannot open the file of a snapshot's clones again")?;
        for file in [&self.0, &left] {
            let held = flock(file, FlockOperation::NonBlockingLockShared);
            held.context("another command starts clones of this snapshot just now: try again")?;
        }
        fcntl_setfd(&left, FdFlags::empty())?;
        Ok([self.0, left])
    }
}

#[cfg(test)]
mod tests;
