//! Checking a pool: every object is read and compared with its checksums and records.

use std::sync::atomic::Ordering;

use crate::BLOCK;
use crate::disk::buffer::AlignedBuf;
use crate::disk::checksum;
use crate::disk::medium::Access;
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::finding::Finding;
use crate::objects::mblock::Mblock;
use crate::pool::Pool;

/// What of a pool is read to check it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Records, logs and checksums.
    Metadata,
    /// Every byte of data, too.
    Data,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All findings, those of opening the pool included.
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
    /// Checks every object. The report includes the findings of opening the pool. Opened
    /// exclusively, everything that can be repaired without losing anything committed was repaired
    /// then.
    ///
    /// # Errors
    /// Those of looking at the files. An object that cannot be read is a finding, not an error.
    pub fn check(&self, depth: Depth) -> Result<Report, PoolError> {
        let mut report = Report { findings: self.findings().to_vec(), ..Report::default() };
        let note = |findings: &mut Vec<Finding>, error: ObjectError| match error {
            ObjectError::Damaged(damage) => findings.push(Finding::Damage { damage, repaired: false }),
            // Deleted since the list was made, or open elsewhere in this process; the class's
            // absence is known.
            ObjectError::NotFound(_) | ObjectError::Open(_) | ObjectError::NoClass(_) => {}
            other => findings.push(Finding::Unreadable(other.to_string())),
        };
        for props in self.mblocks() {
            let result = self.mblock(props.id).map(|mblock| mblock.check(depth, &mut report));
            if let Err(e) = result.and_then(|result| result) {
                note(&mut report.findings, e);
            }
        }
        let damage = |findings: &mut Vec<Finding>, all: &[Damage], repaired, torn: Option<(Object, u64)>| {
            findings.extend(all.iter().map(|damage| Finding::Damage { damage: damage.clone(), repaired }));
            findings.extend(torn.map(|(object, offset)| Finding::TornTail { object, offset }));
        };
        for props in self.mlogs() {
            match self.mlog_open(props.id) {
                Ok(log) => damage(&mut report.findings, log.damage(), log.0.mended, log.torn()),
                Err(e) => note(&mut report.findings, e),
            }
            report.logs += 1;
        }
        for props in self.mdcs() {
            match self.mdc_open(props.id) {
                Ok(mdc) => damage(&mut report.findings, mdc.damage(), mdc.0.mended, mdc.torn()),
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
    fn check(&self, depth: Depth, report: &mut Report) -> Result<(), ObjectError> {
        report.mblocks += 1;
        let (table, damage) = self.read_table()?;
        report.findings.extend(damage.map(|damage| Finding::Damage { damage, repaired: false }));
        if depth == Depth::Metadata {
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
