//! The status of files that are merged below their mappings: a domain for each mount's, a client
//! for each file.

use std::sync::Arc;

use control::{ClientMetrics, ClientState, ClientStatus, DomainMetrics, DomainStatus, Reason, RefusedStatus, Remarks};
use kmem::pageonefs::Plain;

use crate::access::Access;
use crate::backend::module::mounts::OfMount;
use crate::backend::module::{File, Owner};
use crate::core::ledger::PAGES;
use crate::report::why::{Known, why};
use crate::world::headroom::View;

const PAGE: i64 = kmem::PAGE_SIZE as i64;
/// Bytes of kernel memory for one merged page, measured (docs/design/module.md).
const MERGED_BYTES: i64 = 9;

/// What is the same for all files.
pub(super) struct OfHost<'a> {
    pub(super) headroom: &'a View,
    pub(super) cpu_limit: Option<f64>,
}

/// A domain for each that mounts have, and the process behind each of its clients.
pub(super) fn domains(mounts: &[OfMount], host: &OfHost<'_>) -> Vec<(DomainStatus, Vec<Option<Arc<Owner>>>)> {
    let mut domains: Vec<(&OfMount, Vec<&Arc<File>>)> = Vec::new();
    for mount in mounts {
        match domains.iter_mut().find(|(other, _)| Arc::ptr_eq(&other.contents, &mount.contents)) {
            Some((_, files)) => files.extend(&mount.files),
            None => domains.push((mount, mount.files.iter().collect())),
        }
    }
    let of = |(mount, files): (&OfMount, Vec<&Arc<File>>)| {
        let (clients, owners) = files.into_iter().map(|file| client(file, host)).unzip();
        let name = format!("pageonefs:{}", mount.name);
        let mut domain = DomainStatus { name, clients, ..DomainStatus::default() };
        let merged: u64 = domain.clients.iter().map(|client| client.metrics.pages_merged).sum();
        let shared = mount.stats.frames.min(merged);
        let profits: i64 = domain.clients.iter().map(|client| client.metrics.general_profit).sum();
        domain.metrics = DomainMetrics {
            pages_shared: shared,
            frame_bytes: mount.stats.frames * PAGE as u64,
            pages_sharing: merged - shared,
            known_contents: mount.contents.index.len(),
            general_profit: profits - shared as i64 * PAGE - mount.contents.bytes() as i64,
            ..DomainMetrics::default()
        };
        (domain, owners)
    };
    domains.into_iter().map(of).collect()
}

/// Files that are not merged, as their users have too many. Whose processes and tenants they are is
/// not known: so only who may see all sees them.
pub(super) fn left_out(mounts: &[OfMount], access: &Access) -> Vec<RefusedStatus> {
    let seen = mounts.iter().filter(|_| *access == Access::All);
    let users = seen.flat_map(|mount| mount.left_out.iter().map(move |(owner, files)| (mount, owner.number(), files)));
    let of = |(mount, uid, files): (&OfMount, u32, &u64)| RefusedStatus {
        uid,
        name: format!("files of {}", mount.name),
        reason: format!("{files} files are not merged: there are too many, and others have no more than these"),
        times: 1,
        ..RefusedStatus::default()
    };
    users.map(of).collect()
}

fn client(file: &File, host: &OfHost<'_>) -> (ClientStatus, Option<Arc<Owner>>) {
    let state = file.state();
    let counts = state.region.counts();
    // The ledger may not know yet what was merged before.
    let merged = counts.merged.max(state.merged);
    let recycling = state.recycling.as_ref().map(|recycling| recycling.lock().status());
    let metrics = ClientMetrics {
        regions: 1,
        region_bytes: state.size.min(u64::from(PAGES) * PAGE as u64),
        pages_merged: merged,
        pages_unshared: counts.unshared,
        pages_volatile: state.region.volatile(),
        pages_recycled: counts.recycled,
        pages_copied_total: state.totals.unmerged,
        pages_differed_total: state.totals.differed,
        full_scans: state.totals.scans,
        general_profit: merged as i64 * (PAGE - MERGED_BYTES) + counts.recycled as i64 * PAGE
            - state.region.bytes() as i64
            - recycling.as_ref().map_or(0, |recycling| recycling.metrics.pool_bytes as i64),
        ..ClientMetrics::default()
    };
    let refused = state.plain.map(plain);
    let limited = state.unmanaged();
    let known = Known {
        metrics: Some(&metrics),
        state: ClientState::Merging,
        refused: refused.as_deref(),
        limited: limited.as_deref().map(|text| (Reason::Scattered, text)),
        is_pinned: state.plain == Some(Plain::Pinned),
        host_paused: host.headroom.pauses(file.who()),
        due: state.region.due(),
        cpu_limit: host.cpu_limit,
        ..Known::default()
    };
    let why = why(&known);
    let owner = state.owner.clone().filter(|owner| owner.lives());
    let (pid, uid) = owner.as_ref().map_or((0, 0), |owner| (owner.pid, owner.uid));
    let inode = format!("inode {}", file.inode);
    let own = owner.as_ref().and_then(|owner| owner.own.get()).cloned().unwrap_or_default();
    let status = ClientStatus {
        pid,
        uid,
        name: owner.as_ref().map_or(inode.clone(), |owner| format!("{} ({inode})", owner.name)),
        own_name: own.name,
        own_uuid: own.uuid,
        metrics,
        recycling,
        state: ClientState::Merging,
        remarks: Remarks { refused, limited, ..Remarks::default() },
        why,
        ..ClientStatus::default()
    };
    (status, owner)
}

/// Why nothing of a file is merged, and the remedy.
fn plain(plain: Plain) -> String {
    match plain {
        Plain::Asked => "its file was made plain, for good; another file is merged".into(),
        Plain::Pinned => {
            "its memory is pinned for long, as VFIO, vDPA and registered buffers do; a guest without such a \
                          device is merged"
                .into()
        }
        Plain::Store => "it is a store's: its pages are lent to other files".into(),
        Plain::Other(reason) => {
            format!(
                "its file is plain, for reason {reason} of the module's, which this daemon does not know: update it"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::module::contents::Contents;
    use crate::core::content::seed::Seed;

    #[test]
    fn files_that_are_left_out_are_told_to_who_may_see_all_and_to_nobody_else() {
        let (stats, files) = Default::default();
        let contents = Arc::new(Contents::new(Seed::random()));
        let mounts = [OfMount {
            name: "/mnt/a".into(),
            stats,
            contents,
            files,
            left_out: [(claims::Owner::of(1000), 7)].into(),
        }];
        let told = left_out(&mounts, &Access::All);
        assert!(told.len() == 1 && told[0].uid == 1000 && told[0].reason.starts_with("7 files"), "{told:?}");
        // Another tenant's processes may have the same user.
        assert!([Access::Of(1000, None), Access::Nobody].iter().all(|access| left_out(&mounts, access).is_empty()));
    }
}
