//! What KSM's settings were before `pageone ksm advise`: `kill -9` leaves them as they are, and the
//! next `advise` puts these back.
//!
//! A file in `/run`, which a reboot empties as it resets KSM. Whoever governs holds its lock. Where
//! KSM has other values than were set last, somebody has set them since, and they stand.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{Code, Coded};

/// Bytes of the file at most.
const MOST: u64 = 4096;

/// The values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Found {
    pub(super) pages_to_scan: u64,
    /// `run`, if KSM was stopped.
    pub(super) stopped: Option<u32>,
    /// `pages_to_scan` as it was set last, and before that: which one is in effect is not known.
    pub(super) set: [u64; 2],
}

/// The file, locked.
pub(super) struct Kept(File);

impl Kept {
    /// Opens it, or makes it.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
        let file = options.open(path).with_context(|| format!("cannot open {}", path.display()))?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let what = "another `pageone ksm advise` governs KSM; end that one first";
            return Err(Coded(Code::SecondDaemon, what.into()).into());
        }
        Ok(Self(file))
    }

    /// What one that was killed has found.
    pub(super) fn read(&mut self) -> Option<Found> {
        let mut text = String::new();
        self.0.rewind().ok()?;
        (&self.0).take(MOST).read_to_string(&mut text).ok()?;
        // Behind it is the rest of a longer one, if its writer was killed just then.
        serde_json::Deserializer::from_str(&text).into_iter().next()?.ok()
    }

    /// Keeps what was found. `None`: it was put back.
    pub(super) fn write(&mut self, found: Option<&Found>) -> Result<()> {
        let text = found.map(serde_json::to_string).transpose()?.unwrap_or_default();
        let written = self.0.rewind().and_then(|()| self.0.write_all(text.as_bytes()));
        written.and_then(|()| self.0.set_len(text.len() as u64)).context("cannot keep what KSM's settings were in /run")
    }
}
