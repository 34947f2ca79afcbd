//! The cache that maps share, with its threads: those that serve faults, and the reaper.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::core::Core;
use super::fill;
use super::settings::{CacheMemory, CacheStats, LoadTimes, Settings};
use crate::BLOCK;
use crate::error::{During, MapError};

/// The time slice that the cache's threads ask the scheduler for. Fault threads run often and
/// briefly while others wait for them; the reaper runs longer and should yield the CPU.
const SLICE: Duration = Duration::from_micros(100);

/// Memory for maps, with the threads that serve faults and evict. Clones are the same cache; it
/// ends with the last of them and of its maps.
#[derive(Clone)]
pub struct Mcache {
    pub(crate) handle: Arc<Handle>,
}

impl std::fmt::Debug for Mcache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mcache").field(&self.stats()).finish()
    }
}

/// Keeps the threads running.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.stop();
        let _ = rustix::io::write(&*self.stop, &u64::MAX.saturating_sub(1).to_ne_bytes());
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Mcache {
    /// A cache without maps.
    ///
    /// # Errors
    /// `PageSize`; `Userfaultfd`: not permitted, or the kernel is older than 6.6; `Io`.
    pub fn new(settings: Settings) -> Result<Self, MapError> {
        kmem::check_page_size(kmem::page_size())?;
        let reaper = settings.reaper;
        let threads = settings.fault_threads.max(1);
        let core = Arc::new(Core::new(settings)?);
        core.look_at_memory();
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from);
        let stop = Arc::new(stop.during("making", "an eventfd")?);
        let mut handle = Handle { core: core.clone(), stop: stop.clone(), threads: Vec::new() };
        let mut start = |name: String, run: Box<dyn FnOnce() + Send>| -> Result<(), MapError> {
            let run = move || {
                // Optional: without it these threads wait longer for the CPU.
                let _ = kmem::sched::slice::request(SLICE);
                run();
            };
            let thread = std::thread::Builder::new().name(name).spawn(run).during("starting", "a thread")?;
            handle.threads.push(thread);
            Ok(())
        };
        for i in 0..threads {
            let (core, stop) = (core.clone(), stop.clone());
            start(format!("mcache-fault-{i}"), Box::new(move || fill::serve_faults(&core, stop.as_fd())))?;
        }
        if reaper {
            start("mcache-reaper".into(), Box::new(move || core.reap()))?;
        }
        Ok(Self { handle: Arc::new(handle) })
    }

    /// Its statistics.
    pub fn stats(&self) -> CacheStats {
        let core = &self.handle.core;
        let levels = core.levels();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let time = |counter: &AtomicU64| Duration::from_nanos(get(counter));
        CacheStats {
            maps: core.maps().len(),
            memory: CacheMemory {
                resident: (core.resident_pages() * BLOCK) as u64,
                total: levels.total,
                available: levels.available,
                pressure: core.pressure(),
            },
            loaded: get(&core.stats.loaded),
            loads: get(&core.stats.loads),
            times: LoadTimes {
                delayed: time(&core.stats.delayed),
                waited: time(&core.stats.waited),
                reading: time(&core.stats.reading),
                placing: time(&core.stats.placing),
            },
            faults: get(&core.stats.faults),
            reaped: get(&core.stats.reaped),
            evicted_directly: get(&core.stats.direct),
            waits: get(&core.stats.waits),
            seen_used: get(&core.stats.seen),
            poisoned: get(&core.stats.poisoned),
            huge: get(&core.stats.huge),
        }
    }
}
