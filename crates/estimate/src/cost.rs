//! What the kernel's KSM and PageONE would save, and what each would cost.
//!
//! Both at their best: KSM with `use_zero_pages`, PageONE with every possible run mapped. The CPU
//! costs are those measured by `pageone-bench idle` (docs/benchmarks.md). They differ
//! between machines; their ratio differs little.

use serde::Serialize;

const PAGE: f64 = kmem::PAGE_SIZE as f64;

/// Bytes of a `struct ksm_rmap_item`, one for each page that KSM has scanned
/// (Documentation/admin-guide/mm/ksm.rst, `general_profit`).
const KSM_PAGE_BYTES: f64 = 64.0;
/// Bytes of a `struct ksm_stable_node`, one for each frame.
const KSM_FRAME_BYTES: f64 = 64.0;
/// The most pages that share a frame: the kernel's default of `max_page_sharing`.
pub(crate) const KSM_SHARING: u64 = 256;
/// KSM's CPU time for a merged page, µs.
const KSM_MERGE_US: f64 = 7.16;
/// KSM's CPU time for a page in a later scan, ns.
const KSM_SCAN_NS: f64 = 341.0;

/// Bytes of the ledger for a page: an entry of 4 bytes, 8 bits in sets, and one bit in the agent.
const LEDGER_BYTES: f64 = 4.0 + 1.0 + 0.125;
/// Bytes of the index for a content: a slot and a tree node.
const INDEX_BYTES: f64 = 32.0;
/// Bytes of a mapping: a `struct vm_area_struct` and its share of the maple tree.
const MAPPING_BYTES: f64 = 225.0;
/// PageONE's CPU time for a merged page, µs.
const PAGEONE_MERGE_US: f64 = 3.79;
/// PageONE's CPU time for a page in a later scan, ns.
const PAGEONE_SCAN_NS: f64 = 6.31;

/// Pages of all targets, by kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pages {
    /// Pages scanned.
    pub(crate) all: f64,
    /// Pages of zeros.
    pub(crate) zero: f64,
    /// Contents with several pages.
    pub(crate) frames: f64,
    /// The frames for these contents, if [`KSM_SHARING`] pages share a frame at most.
    pub(crate) ksm_frames: f64,
    /// Pages with such contents.
    pub(crate) shared: f64,
    /// Contents with a single page.
    pub(crate) unique: f64,
    /// Mappings for the shared pages.
    pub(crate) mappings: f64,
}

/// The effect of one way of merging.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Merging {
    /// Memory saved, bytes.
    pub saved_bytes: f64,
    /// Memory that merging itself takes, bytes.
    pub own_bytes: f64,
    /// The difference, bytes.
    pub general_profit: f64,
    /// CPU time until everything is merged, seconds.
    pub merge_cpu_seconds: f64,
    /// CPU time of each later scan of all pages, seconds.
    pub scan_cpu_seconds: f64,
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
    /// Merging by KSM.
    pub(crate) fn ksm(&self) -> Merging {
        let own = self.all * KSM_PAGE_BYTES + self.ksm_frames * KSM_FRAME_BYTES;
        let saved = self.shared - self.ksm_frames + self.zero;
        merging(saved, own, self.shared + self.zero, self.all, KSM_MERGE_US, KSM_SCAN_NS)
    }

    /// Merging by PageONE.
    pub(crate) fn pageone(&self) -> Merging {
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
