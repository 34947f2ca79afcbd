//! The engine as the program has it: starting and stopping.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::backend::agent::pass::{self, Buffers};
use crate::backend::lend;
use crate::backend::module::Files;
use crate::client::Client;
use crate::config::{Changes, Config};
use crate::daemon::place::{Place, StartError, io_error};
use crate::daemon::service::Service;
use crate::sync::Mutex;
use crate::world::shared::Shared;
use crate::world::stall::{Slot, TICK};
use crate::world::state_file::{STATE_FILE, StateFile};

/// How long further clients may end before the memory of all goes back to the kernel.
const TRIM_AFTER: Duration = Duration::from_secs(1);
/// Bytes of ledgers from which on that is worth the time.
const TRIM_FROM: u64 = 1 << 20;

/// A running engine.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    service: Mutex<Option<JoinHandle<()>>>,
    workers: Arc<Workers>,
    pub(crate) files: Arc<Files>,
    pub(crate) place: Arc<Place>,
}

impl Engine {
    /// Starts the engine in `config.directory`, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// [`StartError`]: another daemon serves the directory, or something there cannot be made.
    pub fn start(config: Config) -> Result<Self, StartError> {
        kmem::mm::map_large_pieces();
        let place = Arc::new(Place::take(config.directory.clone())?);
        let directory = &place.directory;
        let listener = place.listen()?;
        let state_file = StateFile::load(directory).map_err(io_error("read", &directory.join(STATE_FILE)))?;
        let watch = |e: rustix::io::Errno| io_error("watch", directory)(e.into());
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let eventfd = || rustix::event::eventfd(0, flags).map(Arc::new).map_err(watch);
        let (wake, news) = (eventfd()?, eventfd()?);
        let count = config.workers();
        let shared = Arc::new(Shared::new(config, state_file));
        let (reaper, gone) = std::sync::mpsc::channel::<Arc<Client>>();
        let files = Arc::new(Files::default());
        files.told_by(news.clone());
        // What is there already.
        files.news();
        let mut service =
            Service::new(shared.clone(), files.clone(), listener, [wake.clone(), news], reaper).map_err(watch)?;
        service.listens_in(place.clone());
        let workers = Arc::new(Workers {
            shared: shared.clone(),
            threads: Mutex::default(),
            next: AtomicUsize::new(0),
            told: Mutex::default(),
        });
        let start = || -> std::io::Result<JoinHandle<()>> {
            for _ in 0..count {
                workers.spawn()?;
            }
            let watched = workers.clone();
            workers.threads.lock().push((None, spawn("watch", move || watched.watch())?));
            // Ends with the service thread.
            let reaper = spawn("reaper", move || reap(&gone))?;
            workers.threads.lock().push((None, reaper));
            let (of_files, of_engine) = (files.clone(), shared.clone());
            workers.threads.lock().push((None, spawn("files", move || lend::run(&of_files, &of_engine))?));
            let (of_files, of_engine) = (files.clone(), shared.clone());
            workers.threads.lock().push((None, spawn("files-recycle", move || of_files.guests.run(&of_engine))?));
            spawn("service", move || service.run())
        };
        if let Some(why) = crate::backend::module::no_agents() {
            tracing::warn!("no agents: {why}");
        }
        let service = Mutex::new(Some(start().map_err(io_error("start threads for", directory))?));
        Ok(Self { shared, wake, service, workers, files, place })
    }

    /// Puts other settings in effect; clients stay connected and merged. `config` must have passed
    /// [`Config::check`]. Settings that need a restart keep their values; the answer names them.
    pub fn reconfigure(&self, config: Config) -> Changes {
        let changes = self.shared.reconfigure(config);
        self.wake();
        changes
    }

    /// Lets the service thread look at what has changed.
    fn wake(&self) {
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    /// Whether the engine has ended by itself (`exit_when_idle`).
    pub fn ended(&self) -> bool {
        self.shared.stopping()
    }

    /// Ends every thread. Merged memory stays merged; clients wait for the next daemon.
    pub fn stop(&self) {
        self.shared.stop();
        self.wake();
        self.files.wake();
        if let Some(service) = self.service.lock().take() {
            let _ = service.join();
        }
        self.workers.join();
        #[cfg(feature = "lock-times")]
        crate::sync::tell();
        self.place.leave();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Time between two lines in the log on workers that are held up.
const SILENCE: Duration = Duration::from_secs(60);

/// A thread and the worker that it is; `None`: another thread.
type Thread = (Option<Arc<Slot>>, JoinHandle<()>);

struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<Thread>>,
    next: AtomicUsize,
    /// When the log last told of one that was held up.
    told: Mutex<Option<Instant>>,
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(body)
}

impl Workers {
    fn spawn(&self) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let (begun, slot) = std::sync::mpsc::sync_channel(1);
        let thread = spawn(&format!("merge-{}", self.next.fetch_add(1, Relaxed)), move || {
            let slot = shared.stalls.enter();
            let _ = begun.send(slot.clone());
            work(&shared, &slot);
            shared.stalls.leave(&slot);
        })?;
        self.threads.lock().push((slot.recv().ok(), thread));
        Ok(())
    }

    /// Puts others in the place of workers that are held up in a client's memory.
    fn watch(&self) {
        while self.shared.queue.wait_for_work() {
            std::thread::sleep(TICK);
            self.shared.stalls.look(|user, time| {
                let mut told = self.told.lock();
                if told.is_none_or(|told| told.elapsed() >= SILENCE) {
                    *told = Some(Instant::now());
                    tracing::warn!(
                        uid = %user,
                        "a worker is held up in the memory of a client of this user for {} ms; another takes its place",
                        time.as_millis()
                    );
                }
                self.shared.queue.set_aside(user);
                if let Err(e) = self.spawn() {
                    tracing::error!("cannot start a worker; there is one fewer: {e}");
                }
            });
            self.threads.lock().retain(|(_, thread)| !thread.is_finished());
        }
    }

    /// Waits for the end of all but those that are held up.
    fn join(&self) {
        let mut threads = std::mem::take(&mut *self.threads.lock());
        while !threads.is_empty() {
            threads
                .retain(|(slot, thread)| !thread.is_finished() && !slot.as_ref().is_some_and(|slot| slot.is_held_up()));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Takes back what clients held that have ended. Threads that live on have allocated it, and malloc
/// would keep most of it.
fn reap(gone: &Receiver<Arc<Client>>) {
    let mut bytes = 0;
    while let Ok(first) = gone.recv() {
        let end = Instant::now() + TRIM_AFTER;
        bytes += first.reap();
        drop(first);
        while let Ok(client) = gone.recv_timeout(end.saturating_duration_since(Instant::now())) {
            bytes += client.reap();
        }
        if bytes >= TRIM_FROM {
            kmem::mm::trim_heap();
            bytes = 0;
        }
    }
}

/// A worker: takes one client after the other, for one pass each, until another has its place.
fn work(shared: &Shared, slot: &Slot) {
    let mut buffers = Buffers::new();
    while let Some((client, kind)) = shared.queue.take() {
        pass::run(shared, &client, &mut buffers, kind);
        if slot.is_replaced() {
            shared.queue.returned(client.user.owner);
            return shared.queue.done(client);
        }
        shared.charge_agents();
        shared.pacer.pause(client.user.owner, || shared.stopping());
        shared.queue.done(client);
    }
}
