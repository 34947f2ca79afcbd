//! What the kernel's KSM and PageONE would save, and what each would cost.
//!
//! Both sides at their best: KSM with `use_zero_pages`, PageONE with every run mapped that can be.
//! Costs of CPU are those that `pageone-bench idle` measured (docs/benchmarks.md): on another
//! machine they differ, their ratio does not much.

use serde::Serialize;

const PAGE: f64 = kmem::PAGE_SIZE as f64;

/// `struct ksm_rmap_item`, for every page that KSM has looked at
/// (Documentation/admin-guide/mm/ksm.rst, `general_profit`).
const KSM_PAGE_BYTES: f64 = 64.0;
/// `struct ksm_stable_node`, for every frame.
const KSM_FRAME_BYTES: f64 = 64.0;
/// `max_page_sharing`: users of one frame, as the kernel has it by default.
pub(super) const KSM_SHARING: u64 = 256;
/// CPU for a merged page, and for a page in a later scan.
const KSM_MERGE_US: f64 = 7.16;
const KSM_SCAN_NS: f64 = 341.0;

/// The ledger: an entry of 4 bytes and 8 bits in sets; the agent's bit.
const LEDGER_BYTES: f64 = 4.0 + 1.0 + 0.125;
/// Index: a slot and a tree node for each content.
const INDEX_BYTES: f64 = 32.0;
/// A mapping, `struct vm_area_struct` with its part of the tree that holds it.
const MAPPING_BYTES: f64 = 225.0;
const PAGEONE_MERGE_US: f64 = 3.79;
const PAGEONE_SCAN_NS: f64 = 6.31;

/// What was counted over all targets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pages {
    /// Pages looked at.
    pub(super) all: f64,
    pub(super) zero: f64,
    /// Contents that are there more than once.
    pub(super) frames: f64,
    /// The same, where a frame has [`KSM_SHARING`] users at most.
    pub(super) ksm_frames: f64,
    /// Pages with such contents.
    pub(super) shared: f64,
    /// Contents that are there once.
    pub(super) unique: f64,
    /// Mappings for the shared pages.
    pub(super) mappings: f64,
}

/// One way of merging. Bytes, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Merging {
    /// Memory given back.
    pub(super) saved_bytes: f64,
    /// Memory that the merging itself takes.
    pub(super) own_bytes: f64,
    /// The difference.
    pub(super) general_profit: f64,
    /// CPU time until all is merged.
    pub(super) merge_cpu_seconds: f64,
    /// CPU time of each scan of all pages from then on.
    pub(super) scan_cpu_seconds: f64,
}

fn merging(saved_pages: f64, own_bytes: f64, merged: f64, scanned: f64, us: f64, ns: f64) -> Merging {
    let saved_bytes = saved_pages * PAGE;
    Merging {
        saved_bytes,
        own_bytes,
        general_profit: saved_bytes - own_bytes,
        merge_cpu_seconds: merged * us / 1e6,
        scan_cpu_seconds: scanned * ns / 1e9,
    }
}

impl Pages {
    pub(super) fn ksm(&self) -> Merging {
        let own = self.all * KSM_PAGE_BYTES + self.ksm_frames * KSM_FRAME_BYTES;
        let saved = self.shared - self.ksm_frames + self.zero;
        merging(saved, own, self.shared + self.zero, self.all, KSM_MERGE_US, KSM_SCAN_NS)
    }

    pub(super) fn pageone(&self) -> Merging {
        let own = self.all * LEDGER_BYTES + (self.frames + self.unique) * INDEX_BYTES + self.mappings * MAPPING_BYTES;
        let saved = self.shared - self.frames + self.zero;
        merging(saved, own, self.shared + self.zero, self.all, PAGEONE_MERGE_US, PAGEONE_SCAN_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_the_pages() {
        let pages = Pages {
            all: 1000.0,
            zero: 100.0,
            frames: 10.0,
            ksm_frames: 12.0,
            shared: 600.0,
            unique: 300.0,
            mappings: 40.0,
        };
        let (ksm, pageone) = (pages.ksm(), pages.pageone());
        assert_eq!(ksm.saved_bytes, (600.0 - 12.0 + 100.0) * 4096.0);
        assert_eq!(ksm.own_bytes, 1012.0 * 64.0);
        assert_eq!(pageone.saved_bytes, (600.0 - 10.0 + 100.0) * 4096.0);
        assert_eq!(pageone.own_bytes, 1000.0 * 5.125 + 310.0 * 32.0 + 40.0 * 225.0);
        assert_eq!(pageone.general_profit, pageone.saved_bytes - pageone.own_bytes);
        assert!((pageone.merge_cpu_seconds - 700.0 * 3.79e-6).abs() < 1e-12);
        assert!((ksm.scan_cpu_seconds - 1000.0 * 341e-9).abs() < 1e-12);
    }
}
