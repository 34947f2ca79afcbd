//! `check`: everything is read and compared with what it should be.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::buffer::AlignedBuf;
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::mblock::Mblock;
use crate::pool::{Access, Pool};
use crate::{BLOCK, MediaClass, checksum};

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Bytes that are not what was written.
    Damage {
        /// Where.
        damage: Damage,
        /// Whether it was put right; nothing was lost then.
        repaired: bool,
    },
    /// A log ended in something unfinished, as after a crash. Nobody was told that it was safe.
    TornTail {
        /// The log.
        object: Object,
        /// Where its last whole record ends.
        offset: u64,
    },
    /// Metadata records that are gone.
    RecordsLost(u32),
    /// The directory of a class is not there, or belongs to another pool.
    ClassMissing {
        /// Which class.
        class: MediaClass,
        /// Where it should be.
        path: PathBuf,
        /// Committed mblocks in it.
        mblocks: u64,
    },
    /// A data file takes more of its medium than its mblocks need.
    SpaceLost {
        /// Which class.
        class: MediaClass,
        /// Bytes too many.
        bytes: u64,
    },
    /// Something could not be read.
    Unreadable(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damage { damage, repaired } => write!(f, "{damage}{}", if *repaired { " (repaired)" } else { "" }),
            Self::TornTail { object, offset } => write!(f, "{object} had an unfinished end, from byte {offset} on"),
            Self::RecordsLost(count) => write!(f, "{count} metadata records are gone"),
            Self::ClassMissing { class, path, mblocks } => {
                write!(
                    f,
                    "class {class} is missing: {} holds none of this pool; it had {mblocks} mblocks",
                    path.display()
                )
            }
            Self::SpaceLost { class, bytes } => {
                write!(
                    f,
                    "class {class} takes {bytes} bytes more than its mblocks need; opening it exclusively frees them"
                )
            }
            Self::Unreadable(why) => f.write_str(why),
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What is not as it should be, opening the pool included.
    pub findings: Vec<Finding>,
    /// mblocks looked at.
    pub mblocks: u64,
    /// Bytes of data read.
    pub bytes: u64,
    /// mlogs and MDCs looked at.
    pub logs: u64,
}

impl Report {
    /// Whether all is well, or was put right.
    pub fn is_clean(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| matches!(finding, Finding::Damage { repaired: true, .. } | Finding::TornTail { .. }))
    }
}

/// File systems round up: this much is no loss.
const SLACK: u64 = 1 << 20;

impl Pool {
    /// Looks at every object; with `data` every byte of data is read too. What opening the pool
    /// found is in the report. Opened exclusively, everything that can be repaired without
    /// losing anything committed was repaired then.
    ///
    /// # Errors
    ///
    /// Those of looking at the files; what cannot be read of an object is a finding.
    pub fn check(&self, data: bool) -> Result<Report, PoolError> {
        let mut report = Report { findings: self.findings().to_vec(), ..Report::default() };
        let note = |findings: &mut Vec<Finding>, error: ObjectError| match error {
            ObjectError::Damaged(damage) => findings.push(Finding::Damage { damage, repaired: false }),
            // Deleted since the list was made, or open elsewhere in this process; the class's absence is known.
            ObjectError::NotFound(_) | ObjectError::Open(_) | ObjectError::NoClass(_) => {}
            other => findings.push(Finding::Unreadable(other.to_string())),
        };
        for props in self.mblocks() {
            let result = self.mblock(props.id).map(|mblock| mblock.check(data, &mut report));
            if let Err(e) = result.and_then(|result| result) {
                note(&mut report.findings, e);
            }
        }
        let damage = |findings: &mut Vec<Finding>, all: &[Damage], torn: Option<(Object, u64)>| {
            findings.extend(all.iter().map(|damage| Finding::Damage { damage: damage.clone(), repaired: false }));
            findings.extend(torn.map(|(object, offset)| Finding::TornTail { object, offset }));
        };
        for props in self.mlogs() {
            match self.mlog_open(props.id) {
                Ok(log) => damage(&mut report.findings, log.damage(), log.torn()),
                Err(e) => note(&mut report.findings, e),
            }
            report.logs += 1;
        }
        for props in self.mdcs() {
            match self.mdc_open(props.id) {
                Ok(mdc) => damage(&mut report.findings, mdc.damage(), mdc.torn()),
                Err(e) => note(&mut report.findings, e),
            }
            report.logs += 1;
        }
        if self.props().access == Access::Exclusive {
            for usage in self.usage()?.classes.iter().filter(|c| c.present) {
                let held = self.inner.class(usage.class).map_or(0, |class| class.held());
                if usage.used_bytes > held + SLACK {
                    let bytes = usage.used_bytes - held;
                    report.findings.push(Finding::SpaceLost { class: usage.class, bytes });
                }
            }
        }
        Ok(report)
    }
}

impl Mblock {
    fn check(&self, data: bool, report: &mut Report) -> Result<(), ObjectError> {
        report.mblocks += 1;
        let (table, damage) = self.read_table()?;
        report.findings.extend(damage.map(|damage| Finding::Damage { damage, repaired: false }));
        if !data {
            return Ok(());
        }
        let mut buffer = AlignedBuf::zeroed(1 << 20);
        let step = (buffer.len() / BLOCK) as u64;
        let (blocks, id) = (checksum::blocks(self.info.record.len), self.info.record.id);
        let mut first = 0;
        while first < blocks {
            let count = step.min(blocks - first);
            let bytes = &mut buffer[..count as usize * BLOCK];
            let at = self.info.record.offset + first * BLOCK as u64;
            self.class.data.read_at(bytes, at).during("reading", Object::Mblock(id))?;
            if self.info.deleted.load(Ordering::Acquire) {
                return Ok(());
            }
            for (number, block) in (first..).zip(bytes.chunks_exact(BLOCK)) {
                if table.get(number as usize) != Some(&checksum::of_block(id, number, block)) {
                    report.findings.push(Finding::Damage { damage: self.damage(number), repaired: false });
                }
            }
            report.bytes += bytes.len() as u64;
            first += count;
        }
        Ok(())
    }
}
