//! What the daemon asks for, dispatched.

use std::time::Duration;

use wire::{OLDEST, ToAgent, ToDaemon, VERSION};

use crate::daemon::batch::Merger;
use crate::daemon::detach::detach;
use crate::daemon::digest;
use crate::daemon::error::LinkError;
use crate::daemon::given_back;
use crate::daemon::send::try_flush;
use crate::recycle::{pool, sweep};
use crate::runtime::cpu_ns;
use crate::runtime::log;
use crate::runtime::state::STATE;
use crate::runtime::state::recycler::Recycler;
use crate::runtime::state::segments::Accepted;

pub(super) enum Handled {
    Done,
    Detached,
    Refused(String),
}

/// Handles the messages of one connection after the other.
pub(super) struct Requests {
    merger: Merger,
    /// The daemon of this connection has welcomed this client.
    welcome: bool,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self { merger: Merger::new(), welcome: false }
    }

    pub(super) fn begin(&mut self) {
        self.welcome = false;
    }

    pub(super) fn is_welcome(&self) -> bool {
        self.welcome
    }

    pub(super) fn handle(&mut self, message: ToAgent) -> Result<Handled, LinkError> {
        match message {
            ToAgent::Refused { reason } => return Ok(Handled::Refused(reason)),
            ToAgent::Welcome { version, .. } if !(OLDEST..=VERSION).contains(&version) => {
                let reason = format!("the daemon speaks protocol {version}, this library {OLDEST} and {VERSION}");
                return Ok(Handled::Refused(reason));
            }
            ToAgent::Welcome { version, direct_io_ms } if !self.welcome => {
                let mut state = STATE.lock();
                let fd = state.uplink.received.take().ok_or(LinkError::Descriptors)?;
                let address = state.uplink.control.accept(fd)?;
                state.direct_io = Some(Duration::from_millis(direct_io_ms.into()));
                state.uplink.version = Some(version);
                state.uplink.outbox.push(ToDaemon::Mapped { address });
                state.uplink.outbox.push(ToDaemon::Library { version: env!("CARGO_PKG_VERSION").into() });
                state.uplink.outbox.push(ToDaemon::CpuTime { cpu_ns: cpu_ns() });
                if let Some(pool) = state.recycler.as_ref().map(Recycler::announcement) {
                    state.uplink.outbox.push(pool);
                }
                drop(state);
                given_back::tell();
                self.welcome = true;
            }
            message if self.welcome => return self.serve(message),
            _ => return Err(LinkError::OutOfOrder),
        }
        Ok(Handled::Done)
    }

    /// Does what a message after the handshake asks for.
    fn serve(&mut self, message: ToAgent) -> Result<Handled, LinkError> {
        match message {
            ToAgent::Segment { segment } => {
                let mut state = STATE.lock();
                let fd = state.uplink.received.take().ok_or(LinkError::Descriptors)?;
                if let Accepted::LeftOut { most } = state.segments.accept(segment, fd)? {
                    state.uplink.outbox.push(ToDaemon::SegmentLeftOut { segment, most });
                }
            }
            ToAgent::DropSegment { segment } => STATE.lock().segments.remove(segment),
            ToAgent::Merge(batch) => self.merger.batch(batch, || try_flush(&mut STATE.lock())),
            ToAgent::Digest(request) => digest::answer(&request),
            ToAgent::Ram(extents) => {
                let recycled = pool::set_ram(&mut STATE.lock(), extents);
                if let Some(mib) = recycled {
                    log::line(format_args!("recycles {mib} MiB of guest memory"));
                }
            }
            ToAgent::Recycle { budget_ns } => {
                sweep::sweep(Duration::from_nanos(budget_ns), || try_flush(&mut STATE.lock()));
            }
            ToAgent::RenewPool => pool::renew(&mut STATE.lock()),
            ToAgent::Detach => {
                if detach() {
                    return Ok(Handled::Detached);
                }
            }
            ToAgent::Welcome { .. } | ToAgent::Refused { .. } => {
                return Err(LinkError::OutOfOrder);
            }
        }
        Ok(Handled::Done)
    }
}
