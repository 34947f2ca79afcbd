//! Unplugging the device of a guest's pool, and plugging it in again.
//!
//! QEMU neither saves nor migrates a guest that has the device. So it is unplugged before: the
//! guest's driver cancels every mark and lets go of it, and the agent takes a new, empty pool.
//! Nobody keeps a note of whether the device is there; QEMU is asked. Where the daemon itself works
//! on the pool, as the guest's RAM is a file of `pageonefs`, it clears the pool instead.
//!
//! ```text
//!   unplug   device_del, wait for the guest     plug   an empty pool
//!            an empty pool                             the guard (no loadvm)
//!            object-del, the guard goes                object-add, device_add
//! ```
//!
//! In both the guard outlives the device: at no time can memory be brought back to which marks that
//! anybody looks at do not belong.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use wire::recycle::{QEMU_DEVICE, QEMU_GUARD, QEMU_POOL, QEMU_PORT};
use wire::{PageNo, Run};

use super::state::Device;
use crate::config::bounds::SLICE;

/// How long a guest may take to let go: native PCI Express hotplug alone waits 5 s.
const UNPLUG_TIME: Duration = Duration::from_secs(30);
/// How long QEMU may take to answer all the rest, and how long the agent.
pub(crate) const ANSWER_TIME: Duration = Duration::from_secs(30);
/// How long a QEMU that starts may take to answer.
pub(crate) const QMP_TIME: Duration = Duration::from_secs(120);
/// Pause between two looks whether an incoming migration has ended.
const INCOMING_STEP: Duration = Duration::from_millis(500);
/// Pause between two looks.
const STEP: Duration = Duration::from_millis(50);

/// A session with QEMU's monitor, whose socket is the client's.
pub(crate) type Monitor<'a> = Qmp<'a, BorrowedFd<'a>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(
        "process {0} has no device for free pages: it is no QEMU that was started with `pageone run --ppr`, or its agent \
         is of an older build; start it again"
    )]
    NoMonitor(i32),
    #[error("process {0}: its device is being plugged, or waits for the end of an incoming migration; try again later")]
    Busy(i32),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlugError {
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    /// Where its RAM lies is not known, so nobody works on its pool.
    #[error(
        "the RAM of process {0} is a file of pageonefs, its pages are not punched ({1}), and its device cannot be unplugged: to \
         save or migrate the guest, start it without --ppr"
    )]
    OfFile(i32, String),
    #[error("{0}")]
    NoDevice(String),
    #[error("{0}")]
    Busy(String),
    #[error(
        "the guest of process {0} has not let go of its device within {limit} s, and goes on as before. Does it run, and \
         does its kernel support hotplug (acpiphp)? Its log says what it waits for", limit = UNPLUG_TIME.as_secs()
    )]
    Held(i32),
    /// The state of a migration is coming in.
    #[error("process {0} waits for an incoming migration; its device is plugged in by itself after that")]
    Incoming(i32),
    #[error("the agent in process {0} has not made a new pool; is the process stopped? Try again")]
    Agent(i32),
    #[error("process {pid}: {why}")]
    Qemu { pid: i32, why: String },
}

impl PlugError {
    fn of(pid: i32) -> impl Fn(QmpError) -> Self {
        move |error| Self::Qemu { pid, why: error.to_string() }
    }
}

impl From<SessionError> for PlugError {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::NoMonitor(_) => Self::NoDevice(error.to_string()),
            SessionError::Busy(_) => Self::Busy(error.to_string()),
        }
    }
}

/// Whether the device is there, or on its way out.
pub(crate) fn is_plugged(qmp: &mut Monitor<'_>) -> Result<bool, QmpError> {
    Ok(names(qmp, "/machine/peripheral")?.iter().any(|name| name == QEMU_DEVICE))
}

fn is_incoming(qmp: &mut Monitor<'_>) -> Result<bool, QmpError> {
    Ok(qmp.execute("query-status", json!({}))?["status"] == "inmigrate")
}

fn names(qmp: &mut Monitor<'_>, path: &str) -> Result<Vec<String>, QmpError> {
    let list = qmp.execute("qom-list", json!({ "path": path }))?;
    let name = |item: &Value| item["name"].as_str().map(str::to_owned);
    Ok(list.as_array().into_iter().flatten().filter_map(name).collect())
}

/// What is done in a session with a guest's monitor: [`unplug`], [`plug_again`].
pub(crate) type Act = fn(&dyn Guest, &mut Monitor<'_>) -> Result<(), PlugError>;

/// A guest whose device comes and goes, and what looks at its pool: an agent, or the daemon.
pub(crate) trait Guest {
    fn pid(&self) -> i32;

    /// From now on no mark from before is looked at: the pool is empty, or another. There is no
    /// device. Gives the number of the pool's descriptor in QEMU's process.
    fn renew(&self) -> Result<u32, PlugError>;

    fn pool_len(&self) -> u64;

    /// Pages that count as recycled are ordinary ones again.
    fn forget_recycled(&self);

    /// Notes whether the device is there, for status.
    fn set_device(&self, device: Device);

    fn log(&self, what: &str);
}

/// All pages of a region, in slices: others may have its lock between two of them.
pub(crate) fn slices(pages: u32) -> impl Iterator<Item = Run> {
    (0..pages).step_by(SLICE as usize).map(move |first| Run::new(PageNo(first), SLICE.min(pages - first)))
}

/// Unplugs the device. No earlier mark counts then, and QEMU can save and migrate the guest.
pub(crate) fn unplug(guest: &dyn Guest, qmp: &mut Monitor<'_>) -> Result<(), PlugError> {
    let why = PlugError::of(guest.pid());
    let_go(guest.pid(), qmp)?;
    guest.renew()?;
    guest.forget_recycled();
    qmp.extend(ANSWER_TIME);
    for name in names(qmp, "/objects").map_err(&why)?.iter().filter(|name| name.starts_with(QEMU_POOL)) {
        qmp.execute("object-del", json!({ "id": name })).map_err(&why)?;
    }
    wait_for_memory(guest.pid(), qmp)?;
    if has_guard(qmp).map_err(&why)? {
        qmp.execute("blockdev-del", json!({ "node-name": QEMU_GUARD })).map_err(&why)?;
    }
    guest.set_device(Device::Out);
    guest.log("free pages: paused, the device is unplugged");
    Ok(())
}

/// Plugs the device in again, by request.
pub(crate) fn plug_again(guest: &dyn Guest, qmp: &mut Monitor<'_>) -> Result<(), PlugError> {
    if is_incoming(qmp).map_err(PlugError::of(guest.pid()))? {
        return Err(PlugError::Incoming(guest.pid()));
    }
    plug(guest, qmp)
}

/// Plugs the device in, with an empty pool.
fn plug(guest: &dyn Guest, qmp: &mut Monitor<'_>) -> Result<(), PlugError> {
    let why = PlugError::of(guest.pid());
    qmp.extend(ANSWER_TIME);
    if !is_plugged(qmp).map_err(&why)? {
        let descriptor = guest.renew()?;
        qmp.extend(ANSWER_TIME);
        add(guest, qmp, descriptor).map_err(&why)?;
    }
    guest.set_device(Device::In);
    guest.log("free pages: the device is plugged in");
    Ok(())
}

/// The device of a guest that was found is not there. Where QEMU was started with another's state
/// it is plugged in when that is there. `is_first`: no daemon has worked on the pool before. One
/// that runs, and has served a daemon before, was paused by somebody.
/// `Err`: QEMU does not answer. That it cannot be plugged in is noted in the log.
pub(crate) fn plug_by_itself(guest: &dyn Guest, qmp: &mut Monitor<'_>, is_first: bool) -> Result<(), QmpError> {
    let mut incoming = is_incoming(qmp)?;
    if !is_first && !incoming {
        return Ok(());
    }
    while incoming {
        std::thread::sleep(INCOMING_STEP);
        qmp.extend(QMP_TIME);
        incoming = is_incoming(qmp)?;
    }
    if let Err(why) = plug(guest, qmp) {
        guest.log(&format!("its free pages are not recycled yet: {why}; `pageone ppr resume` tries again"));
    }
    Ok(())
}

pub(crate) fn monitor<'a>(
    pid: i32,
    socket: BorrowedFd<'a>,
    goes_on: &'a (dyn Fn() -> bool + Sync),
) -> Result<Monitor<'a>, PlugError> {
    Qmp::open(socket, ANSWER_TIME, goes_on).map_err(PlugError::of(pid))
}

/// Asks the guest for the device, and waits until it is gone.
fn let_go(pid: i32, qmp: &mut Monitor<'_>) -> Result<(), PlugError> {
    let why = PlugError::of(pid);
    qmp.extend(UNPLUG_TIME + ANSWER_TIME);
    if !is_plugged(qmp).map_err(&why)? {
        return Ok(());
    }
    let deadline = Instant::now() + UNPLUG_TIME;
    let asked = qmp.execute("device_del", json!({ "id": QEMU_DEVICE }));
    // It may have been asked before, and be about to let go.
    let refused = match asked {
        Ok(_) => None,
        Err(error @ QmpError::Refused { .. }) => Some(error),
        Err(error) => return Err(why(error)),
    };
    while is_plugged(qmp).map_err(&why)? {
        if let Some(error) = refused.as_ref().filter(|error| !error.to_string().contains("already in the process")) {
            return Err(PlugError::Qemu { pid, why: error.to_string() });
        }
        if Instant::now() >= deadline {
            return Err(PlugError::Held(pid));
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

/// Waits until QEMU has freed the device's memory, which it would save, and nobody could load.
fn wait_for_memory(pid: i32, qmp: &mut Monitor<'_>) -> Result<(), PlugError> {
    let deadline = Instant::now() + ANSWER_TIME;
    qmp.extend(2 * ANSWER_TIME);
    while qmp.monitor("info ramblock").map_err(PlugError::of(pid))?.contains(QEMU_POOL) {
        if Instant::now() >= deadline {
            return Err(PlugError::Qemu { pid, why: "QEMU has not freed the memory of the device; try again".into() });
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

fn has_guard(qmp: &mut Monitor<'_>) -> Result<bool, QmpError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(nodes.as_array().into_iter().flatten().any(|node| node["node-name"] == QEMU_GUARD))
}

/// Adds the guard, the pool and the device; after an error, none of what it added is left.
fn add(guest: &dyn Guest, qmp: &mut Monitor<'_>, descriptor: u32) -> Result<(), QmpError> {
    let bytes = guest.pool_len();
    if !has_guard(qmp)? {
        qmp.execute("blockdev-add", json!({ "driver": "null-co", "node-name": QEMU_GUARD, "read-only": false }))?;
    }
    // No name comes twice, see `QEMU_POOL`.
    let number = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_micros());
    let object = format!("{QEMU_POOL}{number}");
    let path = format!("/proc/self/fd/{descriptor}");
    let arguments = json!({ "qom-type": "memory-backend-file", "id": object, "mem-path": path, "share": true,
        "merge": false, "dump": false, "size": bytes });
    let mut added = qmp.execute("object-add", arguments).map(drop);
    if added.is_ok() {
        let mut device = json!({ "driver": "ivshmem-plain", "id": QEMU_DEVICE, "memdev": object });
        if names(qmp, "/machine/peripheral")?.iter().any(|name| name == QEMU_PORT) {
            device["bus"] = QEMU_PORT.into();
        }
        added = qmp.execute("device_add", device).map(drop);
        if added.is_err() {
            let _ = qmp.execute("object-del", json!({ "id": object }));
        }
    }
    if added.is_err() {
        let _ = qmp.execute("blockdev-del", json!({ "node-name": QEMU_GUARD }));
    }
    added
}
