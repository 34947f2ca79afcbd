//! States and reasons: an enum for each. Its texts are the same in JSON, on screens and in metrics.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! states {
    ($($(#[$about:meta])+ $name:ident { $( $(#[$of:meta])+ $state:ident $text:literal, )+ })+) => {$(
        $(#[$about])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $( $(#[$of])+ #[serde(rename = $text)] $state, )+
            /// A daemon of another build says something that this build does not know.
            #[default]
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl $name {
            /// All that this build knows, with their texts.
            pub const ALL: &[(Self, &str)] = &[$((Self::$state, $text)),+];

            /// Its text.
            pub const fn text(self) -> &'static str {
                match self {
                    $( Self::$state => $text, )+
                    Self::Unknown => "unknown",
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.text())
            }
        }
    )+};
}

states! {
    /// The connection to a client's agent.
    ClientState {
        /// The agent reports.
        Merging "merging",
        /// The agent does not report in time.
        Stalled "stalled",
        /// There is no connection.
        Disconnected "disconnected",
        /// All memory was given back; the agent will not come again.
        Detached "detached",
    }

    /// What a client's recycler does.
    RecyclerState {
        /// It takes back what the guest frees.
        Recycling "recycling",
        /// It asks QEMU where the guest's memory lies.
        Starting "starting",
        /// The device in which the guest marks is not plugged in.
        Paused "paused",
        /// It cannot work for this guest.
        Refused "refused",
        /// The guest's marks are not believed any more.
        Dropped "dropped",
    }

    /// How the governor finds its pace.
    GovernorMode {
        /// It holds the target scan time.
        Target "target",
        /// As the kernel's advisor does.
        ScanTime "scan-time",
        /// It holds none.
        None "none",
    }

    /// Why not more of a client is merged, in one word.
    Reason {
        /// See [`ClientState::Detached`].
        Detached "detached",
        /// See [`ClientState::Disconnected`].
        Disconnected "disconnected",
        /// See [`ClientState::Stalled`].
        Stalled "stalled",
        /// A checkpoint is taken of it, or it is being detached.
        Frozen "frozen",
        /// Its memory is pinned or locked.
        Pinned "pinned",
        /// Nothing of it can be merged.
        Refused "refused",
        /// Nothing is merged on the host: too little memory would be left.
        Headroom "headroom",
        /// The store of its domain cannot grow.
        Paused "paused",
        /// Its memory is shared memory.
        Shared "shared",
        /// It has marked no memory as mergeable.
        Unmarked "unmarked",
        /// It has as many mappings as it may.
        Mappings "mappings",
        /// It has as many open files as it may.
        Files "files",
        /// Its pages lie scattered over too much of a file, or too far from its beginning.
        Scattered "scattered",
        /// It has not been scanned often enough.
        New "new",
        /// Pages stay in huge pages.
        KeptHuge "kept-huge",
        /// Pages wait to be looked at, and the CPU limit binds.
        Budget "budget",
        /// Pages wait to be looked at.
        Pending "pending",
        /// Pages wait after a write: it does direct I/O.
        Cooling "cooling",
        /// Pages were written within the last two merge periods.
        Volatile "volatile",
        /// No other page of its domain equals its pages.
        Unique "unique",
    }
}

impl Reason {
    /// Whether a line of their own tells it in the text of the status.
    pub(crate) fn has_own_line(self) -> bool {
        use Reason::*;
        matches!(self, Pinned | Refused | Headroom | Paused | Mappings | Files | Scattered | KeptHuge | Cooling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_one_text_and_an_unknown_text_ends_nothing() {
        for &(reason, text) in Reason::ALL {
            assert_eq!((reason.text(), format!("{reason:>12}")), (text, format!("{text:>12}")));
            assert_eq!(serde_json::to_value(reason).unwrap(), text);
            assert_eq!(serde_json::from_value::<Reason>(text.into()).unwrap(), reason);
        }
        let newer = serde_json::from_str::<ClientState>("\"what comes in a year\"");
        assert_eq!(newer.unwrap(), ClientState::Unknown);
    }
}
