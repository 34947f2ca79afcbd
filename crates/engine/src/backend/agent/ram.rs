//! Where a guest's RAM lies in the regions of its client, found once by QMP, and whether it has its
//! device.
//!
//! QEMU may take minutes to answer, so a thread of its own asks it, one for each guest. It ends
//! with the client's connection. A user has [`SEARCHES`] of them at a time. The agent keeps the
//! answer, also for later daemons.

use std::collections::BTreeMap;
use std::sync::Arc;

use kmem::PAGE_SIZE;
use qmp::{Qmp, QmpError};
use wire::recycle::Extent;
use wire::{PageNo, RegionId, ToAgent};

use super::device::{OfClient, send};
use crate::client::Client;
use crate::core::ledger::Region;
use crate::core::recycle::device::{self, Guest, Monitor, QMP_TIME};
use crate::core::recycle::layout::{LayoutError, Place, extents_of, find_ram};
use crate::core::recycle::state::Device;
use crate::users::log_of;
use crate::world::searches::{SEARCHES, Search};
use crate::world::shared::Shared;

/// Why RAM that QEMU has is not recycled.
const UNMANAGED: &str = "none of it is memory that the agent manages. RAM that other processes map (share=on, as vhost-user and virtiofsd \
    need) and RAM that is not to be merged (mem-merge=off, merge=off) cannot be taken back: start QEMU without these, or use \
    virtio-balloon's free-page-reporting=on instead of --ppr";
#[derive(Debug, thiserror::Error)]
enum RamError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("{UNMANAGED}")]
    Unmanaged,
}

/// QEMU's monitor has come. A thread of its own asks where the guest's RAM lies, tells the agent
/// and the client's ledger, and looks whether the device is plugged in. Where QEMU was started with
/// another's state it plugs the device in when that is there, and ends.
pub(crate) fn ask(shared: &Arc<Shared>, client: &Arc<Client>) {
    let Some(search) = Search::begin(shared, client.domain.key.group().0) else {
        return refuse(
            client,
            &format!("{SEARCHES} guests of its user are being asked for their RAM; start fewer at a time"),
        );
    };
    let (shared, of) = (shared.clone(), client.clone());
    let ask = move || {
        if let Err(why) = locate(&shared, &of, &search) {
            refuse(&of, &why.to_string());
        }
    };
    if let Err(e) = std::thread::Builder::new().name("memory-map".into()).spawn(ask) {
        log_of!(client.user, warn, pid = client.pid, "not recycled: no thread to ask QEMU with: {e}");
    }
}

fn refuse(client: &Client, why: &str) {
    log_of!(client.user, warn, pid = client.pid, "not recycled: {why}");
    if let Some(recycling) = &mut client.state().recycling {
        recycling.refuse(why.to_string());
    }
}

fn locate(shared: &Arc<Shared>, client: &Arc<Client>, search: &Search) -> Result<(), RamError> {
    let Ok(session) = client.session() else { return Ok(()) };
    let Some(socket) = session.socket() else { return Ok(()) };
    let goes_on = || search.goes_on() && client.state().link.is_up();
    let mut qmp = Qmp::open(socket, QMP_TIME, &goes_on)?;
    let is_first = client.state().recycling.as_ref().is_some_and(|recycling| !recycling.is_located());
    if is_first {
        let extents = extents(client, &mut qmp)?;
        if !send(shared, client, &wire::encode(&ToAgent::Ram(extents.clone()))) {
            return Ok(());
        }
        client.state().set_extents(extents);
    }
    if client.version < ToAgent::RenewPool.since() || device::is_plugged(&mut qmp)? {
        return Ok(());
    }
    let guest = OfClient { shared, client };
    guest.set_device(Device::Out);
    Ok(device::plug_by_itself(&guest, &mut qmp, is_first)?)
}

/// Asks QEMU; gives the extents of RAM that the client's agent manages.
fn extents(client: &Client, qmp: &mut Monitor<'_>) -> Result<Vec<Extent>, RamError> {
    let ram = find_ram(qmp)?;
    // Frames that the pool has no room for are never recycled.
    let extents = extents_of(&places(&client.state().regions), &ram);
    if extents.is_empty() {
        return Err(RamError::Unmanaged);
    }
    let all = ram.iter().map(|ram| (ram.end - ram.start) / PAGE_SIZE as u64).fold(0, u64::saturating_add);
    let managed: u64 = extents.iter().map(|extent| u64::from(extent.run.len)).sum();
    let unmanaged = all.saturating_sub(managed);
    if unmanaged > 0 {
        let mib = (unmanaged * PAGE_SIZE as u64) >> 20;
        log_of!(client.user, warn, pid = client.pid, "{mib} MiB of its guest's RAM are not recycled: {UNMANAGED}");
    }
    Ok(extents)
}

fn places(regions: &BTreeMap<RegionId, Region>) -> Vec<Place> {
    let of = |(&id, region): (&RegionId, &Region)| Place {
        start: region.start,
        pages: region.pages,
        region: id,
        first: PageNo(0),
    };
    regions.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use wire::Run;

    use super::*;
    use crate::core::recycle::layout::Ram;

    #[test]
    fn ram_is_cut_at_regions() {
        let page = PAGE_SIZE as u64;
        let region = |start: u64, pages| Region::new(start * page, pages).unwrap();
        let regions = [(RegionId(1), region(1000, 100)), (RegionId(2), region(1200, 50))].into();
        let ram = [
            Ram { start: 256 * page, end: 356 * page, host: 1000 * page },
            Ram { start: 1 << 32, end: (1 << 32) + 300 * page, host: 1050 * page },
        ];
        let extent =
            |frame, region, page, len| Extent { frame, region: RegionId(region), run: Run::new(PageNo(page), len) };
        let above = (1 << 32) / page;
        let absurd = Ram { start: 0, end: 2 * page, host: u64::MAX - page + 1 };
        assert!(extents_of(&places(&regions), &[absurd]).is_empty());
        assert_eq!(
            extents_of(&places(&regions), &ram),
            [extent(256, 1, 0, 100), extent(above, 1, 50, 50), extent(above + 150, 2, 0, 50)]
        );
    }
}
