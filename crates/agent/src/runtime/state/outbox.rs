//! Messages that are not sent yet.
//!
//! The lock is held while mappings change and until the message that tells of it is queued;
//! messages are sent in the order of the queue. It is bounded: when the daemon does not read,
//! everything is dropped and the connection is closed. The next one starts with a full list of
//! regions, and the daemon reads the mappings from `/proc/PID/maps`.

use std::collections::VecDeque;

use wire::{Run, ToDaemon};

/// Most messages in the queue: a daemon that is this far behind does not read.
const LIMIT: usize = 4096;
/// Most outcomes in one report: each takes up to 11 bytes of a packet of 64 KiB.
const MOST_OUTCOMES: usize = 4096;

#[derive(Default)]
pub(crate) struct Outbox {
    /// Those to send, the next one first.
    pub(crate) queue: VecDeque<ToDaemon>,
    open: bool,
    overflowed: bool,
}

impl Outbox {
    /// A closed queue, which drops every message.
    pub(crate) const fn new() -> Self {
        Self { queue: VecDeque::new(), open: false, overflowed: false }
    }

    /// Opens the queue for a new connection; `account` is sent first.
    pub(crate) fn open(&mut self, account: impl Iterator<Item = ToDaemon>) {
        *self = Self { queue: account.collect(), open: true, overflowed: false };
    }

    /// Closes the queue and drops its messages: the connection is gone.
    pub(crate) fn close(&mut self) {
        *self = Self::new();
    }

    /// Queues a message, or adds it to the last one where that says the same. Without a connection
    /// it is dropped.
    pub(crate) fn push(&mut self, message: ToDaemon) {
        if !self.open {
            return;
        }
        if let (ToDaemon::Discarded { region, run }, Some(ToDaemon::Discarded { region: last_region, run: last })) =
            (&message, self.queue.back_mut())
            && region == last_region
        {
            // A balloon discards page by page, upwards or downwards.
            if last.page.0.checked_add(last.len) == Some(run.page.0) {
                last.len += run.len;
                return;
            }
            if run.page.0.checked_add(run.len) == Some(last.page.0) {
                *last = Run::new(run.page, last.len + run.len);
                return;
            }
        }
        if let (ToDaemon::Report(report), Some(ToDaemon::Report(last))) = (&message, self.queue.back_mut())
            && report.batch == last.batch
            && report.outcomes.len() + last.outcomes.len() <= MOST_OUTCOMES
        {
            last.outcomes.extend_from_slice(&report.outcomes);
            (last.last, last.cpu_ns, last.maps) = (report.last, report.cpu_ns, report.maps);
            last.window_ns = last.window_ns.max(report.window_ns);
            return;
        }
        if self.queue.len() >= LIMIT {
            *self = Self { overflowed: true, ..Self::new() };
            return;
        }
        self.queue.push_back(message);
    }

    pub(crate) fn has_overflowed(&self) -> bool {
        self.overflowed
    }
}

#[cfg(test)]
mod tests;
