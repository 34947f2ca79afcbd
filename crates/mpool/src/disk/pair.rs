//! The MDC, a metadata container: a pair of logs that compacts into itself.
//!
//! One log is active. Compaction erases the other one with a higher generation, and appends go
//! there: first the records that the caller still needs. Its end is written as a frame of its own
//! and synced; from then on the other log is the active one. Opening takes the log with the higher
//! generation if its compaction came to an end, and the other if not, so a crash leaves all of the
//! old records or all of the new ones.
//!
//! Nothing is synced during a compaction, and frames say what was durable when they were written.
//! So a log in which something was durable is complete even when damage has hit the end frame.
//!
//! A log that has lost its header and has no frames is the one that is not active, if the other one
//! is complete: it is made anew. Where neither is complete, what there is can be read, and nothing
//! is written.

use crate::MediaClass;
use crate::disk::frame::{Frame, Kind};
use crate::disk::log::{Log, MISSING, Opened, Place, Reserve};
use crate::disk::medium::{Access, Medium};
use crate::disk::superblock::End;
use crate::error::{Damage, During, Object, ObjectError};

/// An open pair of logs.
pub(crate) struct Pair {
    object: Object,
    logs: [Log; 2],
    active: usize,
    pub(crate) compacting: bool,
    /// The end of a compaction failed. Which log is active is unknown until they are opened again.
    failed: bool,
    /// Why it is not written: which log is active is not known.
    broken: Option<Damage>,
    /// What opening found in the logs, for [`Pair::mend`].
    opened: Option<[Opened; 2]>,
}

/// The log that is read.
impl AsRef<Log> for Pair {
    fn as_ref(&self) -> &Log {
        &self.logs[self.active]
    }
}

/// An opened log of a pair, its records, and whether its compaction came to an end.
type Half = (Log, Opened, Vec<Vec<u8>>, bool);

/// What opening found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) damage: Vec<Damage>,
    /// Records that neither file has.
    pub(crate) lost: u32,
    /// Where a tail that was not whole was cut.
    pub(crate) torn: Vec<(Object, u64)>,
}

/// Where a pair lies, and to which object it belongs.
pub(crate) struct PairPlace<'a> {
    pub(crate) medium: &'a dyn Medium,
    pub(crate) names: [String; 2],
    pub(crate) objects: [Object; 2],
    pub(crate) class: MediaClass,
    pub(crate) id: u64,
}

impl PairPlace<'_> {
    fn place(&self, i: usize) -> Place<'_> {
        let (object, name) = (self.objects[i], self.names[i].as_str());
        Place { medium: self.medium, name, object, class: self.class, id: self.id }
    }
}

impl Pair {
    /// Makes an empty pair. Its names are durable when the medium's names are synced.
    pub(crate) fn create(place: &PairPlace<'_>) -> Result<Self, ObjectError> {
        let mut logs = [Log::create(&place.place(0), 2)?, Log::create(&place.place(1), 1)?];
        logs[0].append_compaction_end()?;
        logs[0].close()?;
        logs[1].release()?;
        Ok(Self {
            object: place.objects[0],
            logs,
            active: 0,
            compacting: false,
            failed: false,
            broken: None,
            opened: None,
        })
    }

    /// Makes a pair that is not complete.
    pub(crate) fn create_empty(place: &PairPlace<'_>) -> Result<Self, ObjectError> {
        let logs = [Log::create(&place.place(0), 1)?, Log::create(&place.place(1), 1)?];
        let object = place.objects[0];
        Ok(Self { object, logs, active: 0, compacting: false, failed: false, broken: None, opened: None })
    }

    /// Writes `records` into the log that is not read, as a compaction of which nobody needs the
    /// other log. Until its end is synced that one is as it was.
    pub(crate) fn write_anew(&mut self, place: &PairPlace<'_>, records: &[&[u8]]) -> Result<(), ObjectError> {
        let (old, new) = (self.active, 1 - self.active);
        let generation = self.logs.iter().map(|log| log.generation).max().unwrap_or(0) + 1;
        let mut log = Log::create(&place.place(new), generation)?;
        place.medium.sync_names().during("syncing the names of", place.objects[new])?;
        records.chunks(4096).try_for_each(|some| log.append(some, Reserve::Keep))?;
        log.append_compaction_end()?;
        log.close()?;
        self.logs[new] = log;
        self.logs[old].begin_anew(&place.place(old))?;
        place.medium.sync_names().during("syncing the names of", place.objects[old])?;
        (self.active, self.failed, self.broken, self.opened) = (new, false, None, None);
        Ok(())
    }

    /// Opens a pair; `each` gets its records. Nothing is written before [`Pair::mend`].
    pub(crate) fn open(
        place: &PairPlace<'_>,
        access: Access,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(Self, Found), ObjectError> {
        let open = |i: usize| -> Result<Option<Half>, ObjectError> {
            let (mut records, mut ended) = (Vec::new(), false);
            let found = Log::open(&place.place(i), access, &mut |frame: &Frame<'_>| match frame.kind {
                Kind::Record => records.push(frame.payload.to_vec()),
                Kind::CompactionEnd => ended = true,
                Kind::Close => {}
            })?;
            let Some((log, opened)) = found else { return Ok(None) };
            let complete = ended || opened.durable;
            Ok(Some((log, opened, records, complete)))
        };
        let missing = |i: usize, other: &Half| -> Half {
            let damage = Damage { object: place.objects[i], offset: 0, what: MISSING };
            let opened = Opened { no_header: true, file_damage: vec![damage], ..Opened::default() };
            (Log::missing(&place.place(i), &other.0), opened, Vec::new(), false)
        };
        let (zero, one) = match (open(0)?, open(1)?) {
            (Some(zero), Some(one)) => (zero, one),
            (Some(zero), None) => {
                let one = missing(1, &zero);
                (zero, one)
            }
            (None, Some(one)) => (missing(0, &one), one),
            (None, None) => return Err(Damage { object: place.objects[0], offset: 0, what: MISSING }.into()),
        };
        let newer = usize::from(one.0.generation > zero.0.generation);
        let mut both = [zero, one];
        // A compaction that did not come to an end leaves the other log, unless that is gone.
        let active = match (both[newer].3, both[1 - newer].3) {
            (true, _) => newer,
            (false, true) => 1 - newer,
            (false, false) => usize::from(both[1].2.len() > both[0].2.len()),
        };
        let mut found = Found { lost: both[active].1.lost, ..Found::default() };
        for (i, (_, opened, ..)) in both.iter_mut().enumerate() {
            found.damage.append(&mut opened.file_damage);
            found.torn.extend(opened.torn.map(|at| (place.objects[i], at)));
            // A crash may leave anything in the log that is not read.
            if i == active {
                found.damage.append(&mut opened.damage);
            }
        }
        // What the newer one lost may be the end of its compaction.
        let what = match (both[active].3, active != newer && both[newer].1.lost > 0) {
            (false, _) => Some("neither log of the pair is complete"),
            (true, true) => Some("the newer log of the pair is not complete"),
            (true, false) => None,
        };
        let broken = what.map(|what| Damage { object: place.objects[newer], offset: 0, what });
        found.lost += u32::from(broken.is_some());
        found.damage.extend(broken.clone());
        both[active].2.iter().for_each(|record| each(record));
        let [(zero, first, ..), (one, second, ..)] = both;
        let (object, logs, opened) = (place.objects[0], [zero, one], Some([first, second]));
        Ok((Self { object, logs, active, compacting: false, failed: false, broken, opened }, found))
    }

    /// Makes all files what they should be; what was read is durable then. Where a part is lost
    /// that decides which log is active, nothing is done.
    pub(crate) fn mend(&mut self, place: &PairPlace<'_>) -> Result<(), ObjectError> {
        let Some(opened) = self.opened.take() else { return Ok(()) };
        if self.broken.is_some() || self.logs[self.active].is_broken() {
            return Ok(());
        }
        let (active, now) = (self.active, self.logs[self.active].generation);
        for (i, (log, opened)) in self.logs.iter_mut().zip(&opened).enumerate() {
            match &opened.mending {
                _ if log.is_broken() && i != active => log.begin_anew(&place.place(i))?,
                Some(mending) => log.mend(&place.place(i), mending)?,
                None => {}
            }
        }
        let other = &mut self.logs[1 - active];
        if other.generation > now {
            // The end of that compaction may be on its way to the medium still.
            other.erase(0)?;
        } else if other.end > 0 {
            other.release()?;
        }
        Ok(())
    }

    /// Whether something is open to doubt until the pair is opened again.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed || self.logs[self.active].is_failed()
    }

    fn check(&self) -> Result<(), ObjectError> {
        match &self.broken {
            _ if self.failed => Err(ObjectError::Failed(self.object)),
            Some(damage) => Err(damage.clone().into()),
            None => Ok(()),
        }
    }

    fn log(&mut self) -> &mut Log {
        &mut self.logs[self.active ^ usize::from(self.compacting)]
    }

    pub(crate) fn append(&mut self, records: &[&[u8]], reserve: Reserve) -> Result<(), ObjectError> {
        self.check()?;
        self.log().append(records, reserve)
    }

    /// Makes all records durable; during a compaction its end does.
    pub(crate) fn sync(&mut self) -> Result<(), ObjectError> {
        self.check()?;
        if self.compacting { Ok(()) } else { self.log().sync() }
    }

    pub(crate) fn start_compaction(&mut self) -> Result<(), ObjectError> {
        self.check()?;
        if self.compacting {
            return Err(ObjectError::Compaction(self.object, "under way already"));
        }
        let generation = self.logs[self.active].generation + 1;
        self.logs[1 - self.active].erase(generation)?;
        self.compacting = true;
        Ok(())
    }

    pub(crate) fn end_compaction(&mut self) -> Result<(), ObjectError> {
        if !self.compacting {
            return Err(ObjectError::Compaction(self.object, "not under way"));
        }
        self.check()?;
        self.failed = true;
        let log = self.log();
        log.append_compaction_end()?;
        log.sync()?;
        (self.compacting, self.failed) = (false, false);
        self.active = 1 - self.active;
        // Only space: the log is not read again. A failure costs nothing but that.
        let _ = self.logs[1 - self.active].release();
        Ok(())
    }

    /// Goes on as if the compaction had not been started.
    pub(crate) fn abandon_compaction(&mut self) {
        self.compacting = false;
        let _ = self.logs[1 - self.active].release();
    }

    /// Where the active log ends.
    pub(crate) fn end(&self) -> End {
        self.logs[self.active].end()
    }

    /// Bytes of frames in the log that is appended to.
    pub(crate) fn appended(&self) -> u64 {
        self.logs[self.active ^ usize::from(self.compacting)].content
    }

    /// Bytes of frames in the active log.
    pub(crate) fn content(&self) -> u64 {
        self.logs[self.active].content
    }

    /// Bytes of the active log, from its first frame to its last.
    pub(crate) fn len(&self) -> u64 {
        self.logs[self.active].end
    }

    pub(crate) fn used(&self) -> Result<u64, ObjectError> {
        Ok(self.logs[0].used()? + self.logs[1].used()?)
    }

    pub(crate) fn close(&mut self) -> Result<(), ObjectError> {
        self.check()?;
        if self.compacting {
            self.abandon_compaction();
        }
        self.log().close()
    }
}
