//! A simple model of a pool, and a random workload that runs on both.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::path::{Path, PathBuf};

use crate::sim::{Random, Sim};
use crate::{
    Allocation, Fallback, Finding, MblockWriter, Mdc, MediaClass, Mlog, ObjectError, OpenOptions, Pool, PoolError,
};

pub(super) const PATH: &str = "/pool";

/// What is known to be true of something after an operation that may have failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum There {
    Yes,
    /// The operation failed in a way that leaves it open, until the pool is opened again.
    Maybe,
    No,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    seed: u64,
    len: usize,
    there: There,
}

#[derive(Clone, Debug, Default)]
pub(super) struct LogModel {
    /// All appended since the last erasure.
    records: Vec<Vec<u8>>,
    /// How many of them must survive.
    synced: usize,
    /// Erased, perhaps: then it may be empty.
    maybe_empty: bool,
    /// A sync failed: the handle is of no use.
    broken: bool,
    /// Appending it failed: it may be there, behind the others.
    maybe: Option<Vec<u8>>,
}

/// What the pool should hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) blocks: BTreeMap<u64, Block>,
    log: Option<(u64, LogModel)>,
    /// The MDC's records: any one of these.
    mdc: Option<(u64, Vec<Vec<Vec<u8>>>)>,
    pub(super) classes: Vec<MediaClass>,
}

pub(super) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Makes a pool, encrypted if there is a key.
pub(super) fn create(sim: &Sim, key: Option<&Path>, name: &str) -> Result<Pool, PoolError> {
    match key {
        Some(key) => Pool::create_encrypted_on(sim.storage(), Path::new(PATH), name, key),
        None => Pool::create_on(sim.storage(), Path::new(PATH), name),
    }
}

/// A file with a key.
pub(super) fn key(first: u8) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, (0..32).map(|i| first.wrapping_add(i * 7)).collect::<Vec<u8>>()).unwrap();
    file
}

/// A pool with its model.
pub(super) struct Driver {
    pub(super) sim: Sim,
    pub(super) pool: Option<Pool>,
    pub(super) model: Model,
    /// There is nothing to be put right when it is opened.
    pub(super) strict: bool,
    /// The file with the key, if the pool is to be encrypted.
    pub(super) key: Option<PathBuf>,
    log: Option<Mlog>,
    mdc: Option<Mdc>,
    writers: Vec<(MblockWriter, u64, usize)>,
}

impl Driver {
    pub(super) fn new(sim: Sim) -> Self {
        let (model, writers) = Default::default();
        Self { sim, pool: None, model, strict: false, key: None, log: None, mdc: None, writers }
    }

    /// Makes the pool; an error is fine, it is tried again by [`Driver::reopen`].
    pub(super) fn create(&mut self) -> Result<(), PoolError> {
        self.pool = Some(create(&self.sim, self.key.as_deref(), "model")?);
        self.model.classes = vec![MediaClass::Capacity];
        Ok(())
    }

    /// One operation. Errors are fine; wrong answers panic.
    pub(super) fn step(&mut self, random: &mut Random) {
        let Some(pool) = self.pool.clone() else { return };
        match random.below(16) {
            0..4 => self.write(&pool, random),
            4 => self.delete(&pool, random),
            5 => {
                // Abort, or commit several unfinished mblocks at once.
                let writers = std::mem::take(&mut self.writers);
                if random.below(2) == 0 {
                    self.commit(writers);
                }
            }
            6 => self.read_something(&pool, random),
            7..10 => self.use_log(&pool, random),
            10..14 => self.use_mdc(&pool, random),
            14 => {
                let class = MediaClass::ALL[1 + random.below(2) as usize];
                if pool.add_class(class, Path::new(&format!("/{class}"))).is_ok() {
                    self.model.classes.push(class);
                }
            }
            _ => {
                let _ = pool.rename(["a", "b"][random.below(2) as usize]);
            }
        }
    }

    fn write(&mut self, pool: &Pool, random: &mut Random) {
        let class = MediaClass::ALL[random.below(3) as usize];
        let fallback = [Fallback::None, Fallback::Capacity, Fallback::Any][random.below(3) as usize];
        let Ok(mut writer) = pool.mblock_alloc(Allocation { class, capacity: 64 << 10, fallback }) else { return };
        let (seed, len) = (random.next(), random.below(60_000) as usize);
        let bytes = content(seed, len);
        let cut = random.below(len as u64 + 1) as usize;
        let parts = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
        if writer.write(&parts).is_err() {
            return;
        }
        self.writers.push((writer, seed, len));
        if random.below(3) > 0 {
            let writers = std::mem::take(&mut self.writers);
            self.commit(writers);
        }
    }

    fn commit(&mut self, writers: Vec<(MblockWriter, u64, usize)>) {
        let known: Vec<(u64, u64, usize)> = writers.iter().map(|(w, seed, len)| (w.id(), *seed, *len)).collect();
        let result = MblockWriter::commit_all(writers.into_iter().map(|(w, ..)| w).collect());
        let failed = match result {
            Ok(_) => There::Yes,
            // Synced or not: unknown.
            Err(_) => There::Maybe,
        };
        for (id, seed, len) in known {
            self.model.blocks.insert(id, Block { seed, len, there: failed });
        }
    }

    fn delete(&mut self, pool: &Pool, random: &mut Random) {
        let yes: Vec<u64> =
            self.model.blocks.iter().filter(|(_, b)| b.there == There::Yes).map(|(id, _)| *id).collect();
        if yes.is_empty() {
            return;
        }
        let id = yes[random.below(yes.len() as u64) as usize];
        let result = pool.mblock_delete(&[id]);
        if let Some(block) = self.model.blocks.get_mut(&id) {
            block.there = if result.is_ok() { There::No } else { There::Maybe };
        }
    }

    fn read_something(&mut self, pool: &Pool, random: &mut Random) {
        let pick = random.below(self.model.blocks.len() as u64) as usize;
        let Some((&id, block)) = self.model.blocks.iter().nth(pick) else { return };
        if let (There::Yes, Ok(mblock)) = (block.there, pool.mblock(id)) {
            let start = random.below(block.len as u64 + 1) as usize;
            let mut bytes = vec![0; random.below((block.len - start) as u64 + 1) as usize];
            if mblock.read(start as u64, &mut bytes).is_ok() {
                assert_eq!(bytes, content(block.seed, block.len)[start..start + bytes.len()]);
            }
        }
    }

    fn use_log(&mut self, pool: &Pool, random: &mut Random) {
        if self.model.log.is_none() {
            let Ok(id) = pool.mlog_create(MediaClass::Capacity, 1 << 20) else { return };
            self.model.log = Some((id, LogModel::default()));
        }
        let Some((id, model)) = &mut self.model.log else { return };
        if self.log.is_none() && !model.broken {
            self.log = pool.mlog_open(*id).ok();
        }
        let Some(log) = &mut self.log else { return };
        match random.below(8) {
            0 => match log.erase(0) {
                Ok(_) => *model = LogModel::default(),
                Err(_) => (model.maybe_empty, model.broken) = (true, true),
            },
            1 => {
                self.log = None;
                // Closing syncs where it can.
            }
            2 if !model.broken => {
                log.rewind();
                for record in &model.records {
                    match log.read() {
                        Ok(found) => assert_eq!(found.as_ref(), Some(record)),
                        Err(ObjectError::Io(_)) => return,
                        Err(e) => panic!("{e}"),
                    }
                }
                assert!(matches!(log.read(), Ok(None) | Err(ObjectError::Io(_))));
            }
            n => {
                let record = content(random.next(), random.below(900) as usize);
                let sync = n % 2 == 0;
                let before = log.len();
                match log.append(&record, sync) {
                    Ok(()) => {
                        model.records.push(record);
                        model.synced = if sync { model.records.len() } else { model.synced };
                    }
                    // Appended, but not synced.
                    Err(_) if log.len() > before => {
                        model.records.push(record);
                        model.broken = true;
                    }
                    Err(_) => {
                        model.maybe.get_or_insert(record);
                        model.broken = true;
                    }
                }
            }
        }
    }

    fn use_mdc(&mut self, pool: &Pool, random: &mut Random) {
        if self.model.mdc.is_none() {
            let Ok(id) = pool.mdc_create(MediaClass::Capacity, 1 << 20) else { return };
            self.model.mdc = Some((id, vec![vec![]]));
        }
        let Some((id, states)) = &mut self.model.mdc else { return };
        if self.mdc.is_none() {
            self.mdc = pool.mdc_open(*id).ok();
        }
        let Some(mdc) = &mut self.mdc else { return };
        // What it is for sure, if it is.
        let Some(now) = states.last().cloned() else { return };
        let sure = states.len() == 1;
        if !sure {
            return;
        }
        let record = content(random.next(), random.below(300) as usize);
        let append = |now: &Vec<Vec<u8>>| now.iter().cloned().chain([record.clone()]).collect::<Vec<_>>();
        match random.below(4) {
            0 => {
                let kept: Vec<Vec<u8>> = now.iter().skip(now.len() / 2).cloned().collect();
                let refs: Vec<&[u8]> = kept.iter().map(Vec::as_slice).collect();
                let result =
                    mdc.start_compaction().and_then(|()| mdc.append(&refs, false)).and_then(|()| mdc.end_compaction());
                *states = if result.is_ok() { vec![kept] } else { vec![now, kept] };
            }
            _ => {
                let result = mdc.append(&[&record], true);
                *states = if result.is_ok() { vec![append(&now)] } else { vec![now.clone(), append(&now)] };
            }
        }
    }

    /// Lets go of everything, as a process that ends.
    pub(super) fn close(&mut self) {
        (self.log, self.mdc) = (None, None);
        self.writers.clear();
        self.pool = None;
    }

    /// Lets go of everything, or loses the power.
    pub(super) fn end(mut self, random: &mut Random) -> Self {
        if self.sim.is_dead() || random.below(2) == 0 {
            return self.crash(random);
        }
        self.close();
        if self.sim.is_dead() { self.crash(random) } else { self }
    }

    fn crash(self, random: &mut Random) -> Self {
        let mut crashed = Self::new(self.sim.crash(random));
        crashed.model = self.model.clone();
        crashed
    }

    /// Opens the pool while things go wrong. It may be refused, and the power may go then.
    pub(super) fn open_badly(self, what: &str, random: &mut Random) -> Self {
        if self.model.classes.is_empty() {
            return self;
        }
        let opened = Pool::open_on(self.sim.storage(), Path::new(PATH), OpenOptions::default());
        if let Err(e) = &opened {
            assert!(self.sim.has_fired(), "{what}: {e}");
            assert!(matches!(e, PoolError::Io(_) | PoolError::Damaged(_)), "{what}: {e:?}");
        }
        // The power may go as it is closed.
        drop(opened);
        if self.sim.is_dead() || random.below(2) == 0 { self.crash(random) } else { self }
    }

    /// Opens the pool and compares all of it with the model. What was open to doubt is known
    /// afterwards.
    pub(super) fn reopen(&mut self, what: &str) {
        if self.model.classes.is_empty() {
            return;
        }
        let pool = Pool::open_on(self.sim.storage(), Path::new(PATH), OpenOptions::default());
        let pool = pool.unwrap_or_else(|e| panic!("{what}: {e}"));
        let report = pool.check(crate::Depth::Data).unwrap();
        // A class whose adding failed may be known, and missing, or its superblock half written.
        let is_added = |class: &MediaClass| self.model.classes.contains(class);
        let mut bad = report.findings.iter().filter(|f| match f {
            Finding::TornTail { .. } => false,
            Finding::ClassMissing { class, .. } => is_added(class),
            // A power failure while it was opened or put right, or a block that could not be read.
            Finding::Damage { repaired: true, .. } => self.strict,
            _ => true,
        });
        assert_eq!(bad.next(), None, "{what}");
        for (id, block) in &mut self.model.blocks {
            match pool.mblock(*id) {
                Ok(mblock) => {
                    assert_ne!(block.there, There::No, "{what}: mblock {id} is back");
                    let mut bytes = vec![0; block.len];
                    mblock.read(0, &mut bytes).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert!(bytes == content(block.seed, block.len), "{what}: mblock {id}");
                    assert_eq!(mblock.props().len, block.len as u64);
                    block.there = There::Yes;
                }
                Err(e) => {
                    assert_ne!(block.there, There::Yes, "{what}: {e}");
                    block.there = There::No;
                }
            }
        }
        let count = self.model.blocks.values().filter(|b| b.there == There::Yes).count();
        assert_eq!(pool.mblocks().len(), count, "{what}: an mblock that nobody committed");
        for usage in pool.usage().unwrap().classes {
            let stored: u64 = pool.mblocks().iter().filter(|m| m.class == usage.class).map(|m| m.stored).sum();
            assert_eq!(usage.used_bytes, stored, "{what}: space of class {}", usage.class);
        }
        self.check_log(&pool, what);
        self.check_mdc(&pool, what);
        self.pool = Some(pool);
    }

    fn check_log(&mut self, pool: &Pool, what: &str) {
        let Some((id, model)) = &mut self.model.log else { return };
        let mut log = pool.mlog_open(*id).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut found = Vec::new();
        while let Some(record) = log.read().unwrap_or_else(|e| panic!("{what}: {e}")) {
            found.push(record);
        }
        assert!(log.damage().is_empty(), "{what}: {:?}", log.damage());
        let all: Vec<Vec<u8>> = model.records.iter().chain(&model.maybe).cloned().collect();
        let whole = found.len() >= model.synced && all.get(..found.len()) == Some(&found[..]);
        let (all, synced) = (model.records.len(), model.synced);
        let right = whole || (model.maybe_empty && found.is_empty());
        assert!(right, "{what}: {} records of {all}, {synced} synced", found.len());
        *model = LogModel { synced: found.len(), records: found, ..LogModel::default() };
    }

    fn check_mdc(&mut self, pool: &Pool, what: &str) {
        let Some((id, states)) = &mut self.model.mdc else { return };
        let mut mdc = pool.mdc_open(*id).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut found = Vec::new();
        while let Some(record) = mdc.read().unwrap_or_else(|e| panic!("{what}: {e}")) {
            found.push(record);
        }
        assert!(states.contains(&found), "{what}: {} records, {} states", found.len(), states.len());
        *states = vec![found];
    }
}
