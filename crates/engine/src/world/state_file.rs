//! The state file: which segments daemons of this directory have made, so that a restarted daemon
//! takes back no others.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use wire::SegmentId;

/// Name of the state file in the daemon's directory.
pub(crate) const STATE_FILE: &str = "segments";
/// Bytes of it, at most: 400,000 segments, which hold more than any host has.
const MOST: u64 = 16 << 20;

/// The segments that daemons of this directory have made: one `INODE DOMAIN` a line.
pub(crate) struct StateFile {
    path: PathBuf,
    known: BTreeMap<SegmentId, String>,
    written: BTreeMap<SegmentId, String>,
    earlier: BTreeSet<SegmentId>,
    fails: bool,
}

impl StateFile {
    pub(crate) fn load(directory: &Path) -> std::io::Result<Self> {
        let path = directory.join(STATE_FILE);
        let bytes = match claims::read(&path, MOST).map_err(std::io::Error::from) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        // A line that is no segment, or no text, is dropped: at worst a segment is not taken back.
        let known: BTreeMap<_, _> = bytes
            .split(|byte| *byte == b'\n')
            .filter_map(|line| std::str::from_utf8(line).ok())
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(inode, domain)| Some((inode.parse().ok()?, domain.to_string())))
            .collect();
        Ok(Self { path, written: known.clone(), earlier: known.keys().copied().collect(), known, fails: false })
    }

    pub(crate) fn has(&self, segment: SegmentId) -> bool {
        self.known.contains_key(&segment)
    }

    /// Whether a daemon has made it for this domain.
    pub(crate) fn knows(&self, segment: SegmentId, domain: &str) -> bool {
        self.known.get(&segment).is_some_and(|d| d == domain)
    }

    /// Writes the segments that exist, without those that this daemon made and closed, which nobody
    /// can hand back. Those of earlier daemons stay: clients that hold them may still come. A
    /// failure is logged once, and tried again.
    pub(crate) fn record(&mut self, now: BTreeMap<SegmentId, String>, closed: &[SegmentId]) {
        let Self { known, earlier, .. } = self;
        known.retain(|segment, _| earlier.contains(segment) || !closed.contains(segment));
        self.known.extend(now);
        // Somebody may have deleted it.
        if self.known == self.written && (self.known.is_empty() || self.path.exists()) {
            return;
        }
        let result = self.write();
        if let Err(error) = &result
            && !self.fails
        {
            let file = self.path.display();
            tracing::warn!(
                "cannot write {file}: {error}; until it can be written, a restarted daemon loses this store"
            );
        }
        self.fails = result.is_err();
    }

    fn write(&mut self) -> std::io::Result<()> {
        let mut text = String::new();
        for (segment, domain) in &self.known {
            text += &format!("{segment} {domain}\n");
        }
        let new = self.path.with_extension("new");
        use std::os::unix::fs::OpenOptionsExt;
        let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        std::fs::rename(&new, &self.path)?;
        self.written = self.known.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
