//! The connection to a client's agent, and the tracking of what the client writes.

use control::ClientState;

/// The connection to a client's agent.
///
/// ```text
///   Connected ◀──a report── Stalled        Detached: it has said goodbye, for good
///       │  ──no report for too long──▶│
///       └────────────┬────────────────┘
///                    ▼ the connection ends
///               Disconnected: the process may live; a new connection is a new client
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Connected,
    /// Its agent does not report in time.
    Stalled,
    Disconnected,
    /// Everything was unmerged and given back; the agent will not come again.
    Detached,
}

impl Link {
    /// Whether messages reach the agent.
    pub(crate) fn is_up(self) -> bool {
        matches!(self, Self::Connected | Self::Stalled)
    }

    /// The agent is late with its report.
    pub(crate) fn stall(&mut self) {
        if self.is_up() {
            *self = Self::Stalled;
        }
    }

    /// The agent reports, or has nothing to report.
    pub(crate) fn resume(&mut self) {
        if self.is_up() {
            *self = Self::Connected;
        }
    }

    pub(crate) fn disconnect(&mut self) {
        if self.is_up() {
            *self = Self::Disconnected;
        }
    }

    /// As `status` shows it.
    pub(crate) fn state(self) -> ClientState {
        match self {
            Self::Connected => ClientState::Merging,
            Self::Stalled => ClientState::Stalled,
            Self::Disconnected => ClientState::Disconnected,
            Self::Detached => ClientState::Detached,
        }
    }
}

/// What clears the kernel's notes of written pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Only this daemon's scans: none is lost.
    Complete,
    /// A checkpoint that has frozen the client: nothing of it is scanned or merged.
    Frozen,
    /// The agent, which gives everything back: nothing of it is scanned or merged any more.
    Detaching,
    /// Only this daemon's scans again, after a freeze: some notes may be lost.
    Interrupted,
}

impl Tracking {
    pub(crate) fn is_frozen(self) -> bool {
        matches!(self, Self::Frozen | Self::Detaching)
    }

    /// A scan begins that looks for what has gone unseen. Whether it has to.
    pub(crate) fn resume(&mut self) -> bool {
        let interrupted = *self == Self::Interrupted;
        if interrupted {
            *self = Self::Complete;
        }
        interrupted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_has_detached_stays_so() {
        let mut link = Link::Connected;
        link.stall();
        assert_eq!((link, link.is_up()), (Link::Stalled, true));
        link.resume();
        link.disconnect();
        link.stall();
        assert_eq!((link, link.is_up()), (Link::Disconnected, false));
        link = Link::Detached;
        link.disconnect();
        assert_eq!(link.state(), ClientState::Detached);
    }

    #[test]
    fn a_freeze_is_followed_by_one_search_for_what_went_unseen() {
        let mut tracking = Tracking::Frozen;
        assert!(tracking.is_frozen() && !tracking.resume());
        tracking = Tracking::Interrupted;
        assert!(tracking.resume() && !tracking.resume());
        assert_eq!(tracking, Tracking::Complete);
    }
}
