//! How an agent can break the protocol.

use dirty::NewError;
use wire::{RegionId, Run};

use crate::config::bounds::UNMAPPED_REGIONS;
use crate::core::content::index::MAX_REGIONS;
use crate::core::ledger::LedgerError;
use crate::users::OverBound;

/// A message that the protocol does not allow; the connection is closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("it introduced itself twice")]
    IntroducedTwice,
    #[error("it spoke of region {0}, which it never announced")]
    UnknownRegion(RegionId),
    #[error("it spoke of pages {run} of region {region}, which has {pages}")]
    OutsideRegion { region: RegionId, run: Run, pages: u32 },
    #[error("it announced region {0}; there can be {MAX_REGIONS}")]
    TooManyRegions(RegionId),
    #[error("it announced a region of over 16 TiB")]
    RegionTooLarge,
    #[error("it announced region {0} twice")]
    RegionTwice(RegionId),
    #[error(
        "it announced over {UNMAPPED_REGIONS} regions that are not among its mappings, such as {start:#x}+{len:#x}; only mapped private memory can be managed"
    )]
    NotMapped { start: u64, len: u64 },
    #[error(transparent)]
    OverBound(#[from] OverBound),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Shrunk(#[from] NewError),
    #[error("its report on batch {0} names more pages than a batch can have")]
    ReportTooLong(u64),
    #[error("it reported on batch {0}, which is not under way")]
    UnknownBatch(u64),
    #[error("a pool came without its descriptor")]
    PoolWithoutDescriptor,
    #[error("it announced a pool twice")]
    PoolTwice,
    #[error("a pool came without extents and without QMP")]
    PoolWithoutPlace,
    #[error("its guest's RAM leaves region {0}")]
    RamLeavesRegion(RegionId),
    #[error("it swept without a pool")]
    SweptWithoutPool,
    #[error("it renewed a pool without one")]
    RenewedWithoutPool,
}
