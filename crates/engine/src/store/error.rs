//! Why the store cannot grow.

use kmem::memfd::MemfdError;
use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    #[error(
        "the daemon's memory cgroup leaves {left_mib} MiB: merging waits until there are {reserve_mib} MiB (raise the limit, or give the daemon a cgroup of its own)"
    )]
    Cgroup { left_mib: u64, reserve_mib: u64 },
    #[error("the host has {left_mib} MiB of memory available; merging waits until there are {reserve_mib} MiB")]
    Host { left_mib: u64, reserve_mib: u64 },
    #[error("the store cannot grow: {0}")]
    Memfd(#[from] MemfdError),
    #[error("the store cannot take memory: {0}")]
    Allocate(std::io::Error),
    /// Of one client: the store can grow for others.
    #[error("no frame is charged to the client's control group: {0} (ENOMEM: it has no room left)")]
    Payer(Errno),
    #[error(
        "the store has {0} segments, and can have no more; divide the programs among more domains (`pageone \
             run --domain`)"
    )]
    Full(usize),
}
