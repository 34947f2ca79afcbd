//! What is noted of a scan under way ([`super::scanning`]).

use wire::RegionId;

use crate::core::ledger::Emptied;

/// A scan under way.
#[derive(Default)]
pub(crate) struct UnderScan {
    /// The region that is being scanned.
    pub(super) region: RegionId,
    /// Its pages of which the agent has reported since the scan of the region began.
    pub(super) overtaken: Emptied,
}
