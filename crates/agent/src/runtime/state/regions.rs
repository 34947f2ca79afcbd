//! The table of regions.

use kmem::range::Range;
use wire::{RegionId, Run};

use crate::runtime::state::region::{Region, Sticky};
use crate::runtime::state::retained::Retained;
use crate::runtime::watch::Watch;

/// All regions of the process; keeps the [`Watch`] table in step.
pub(crate) struct Regions {
    list: Vec<Region>,
    retained: Retained,
    next: u32,
    watch: &'static Watch,
}

impl Regions {
    pub(crate) const fn new(watch: &'static Watch) -> Self {
        Self { list: Vec::new(), retained: Retained::new(), next: 1, watch }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.list.iter()
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<&Region> {
        self.list.iter().find(|region| region.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        self.list.iter_mut().find(|region| region.id == id)
    }

    /// The region of that name if it manages all these pages.
    pub(crate) fn managing(&self, id: RegionId, run: Run) -> Option<&Region> {
        self.get(id).filter(|region| region.manages(run))
    }

    /// The managed parts of a range.
    pub(crate) fn pieces(&self, range: Range) -> Vec<(RegionId, Run)> {
        self.list.iter().flat_map(|region| region.managed_in(range).map(|part| (region.id, part))).collect()
    }

    /// The addresses of the managed parts of a range.
    pub(crate) fn managed_bytes(&self, range: Range) -> Vec<Range> {
        self.list.iter().flat_map(|region| region.managed_in(range).map(|part| region.bytes(part))).collect()
    }

    pub(crate) fn bytes(&self, id: RegionId, run: Run) -> Option<Range> {
        self.get(id).map(|region| region.bytes(run))
    }

    /// Whether a fork copies mappings of managed memory.
    pub(crate) fn is_inherited(&self) -> bool {
        self.list.iter().any(Region::is_inherited)
    }

    /// A region that is not in the table yet. `None`: there is no memory for its bitmap.
    pub(crate) fn prepare(&self, range: Range, sticky: Sticky) -> Option<Region> {
        Region::new(RegionId(self.next), range, sticky)
    }

    pub(crate) fn insert(&mut self, region: Region) {
        self.next += 1;
        self.list.push(region);
        self.update_watch();
    }

    /// Takes pages out of management; the region goes with the last of them.
    pub(crate) fn cut(&mut self, id: RegionId, run: Run) {
        if let Some(index) = self.list.iter().position(|region| region.id == id) {
            self.list[index].drop_pages(run);
            if self.list[index].managed().is_empty() {
                self.list.swap_remove(index);
            }
            self.update_watch();
        }
    }

    /// Memory that left management and may still map frames.
    pub(crate) fn retained(&self) -> &Retained {
        &self.retained
    }

    /// Memory that left management may still map frames.
    pub(crate) fn retain(&mut self, range: Range, sticky: Sticky) {
        self.retained.add(range, sticky);
        self.update_watch();
    }

    /// The program advises on memory that is retained: new mappings there get that advice.
    pub(crate) fn advise_retained(&mut self, range: Range, change: impl Fn(&mut Sticky)) {
        self.retained.advise(range, change);
    }

    /// The range maps no frame any more.
    pub(crate) fn forget_retained(&mut self, range: Range) {
        if !self.retained.within(range).is_empty() {
            self.retained.cut(range);
            self.update_watch();
        }
    }

    fn update_watch(&self) {
        let parts = |region| Region::managed(region).iter().map(|&part| region.bytes(part));
        self.watch.set(self.list.iter().flat_map(parts).chain(self.retained.ranges()));
    }
}
