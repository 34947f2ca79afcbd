//! Where a client's memory went, and who shares with whom: the answers to [`crate::client::map`]
//! and [`crate::client::sharing`].

use serde::{Deserialize, Serialize};

/// Cells of a map at most, in all regions together.
pub const MOST_CELLS: usize = 4096;
/// Ranges of hot pages at most.
pub const MOST_HOT: usize = 32;
/// Clients of a domain in its matrix at most: those with the most merged pages.
pub const MOST_SHARERS: usize = 64;
/// Contents of a domain that are listed at most.
pub const MOST_CONTENTS: usize = 32;

/// A client's memory by the state of its pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientMap {
    /// Its process.
    pub pid: i32,
    /// The name of its program.
    pub name: String,
    /// Pages of a cell; the last cell of a region may have fewer.
    pub cell_pages: u32,
    /// Its regions, by address. The smallest are left out where there are over [`MOST_CELLS`].
    pub regions: Vec<RegionMap>,
    /// Regions that are left out.
    #[serde(default)]
    pub regions_unlisted: usize,
    /// What it writes most, the hottest first: at most [`MOST_HOT`] ranges.
    #[serde(default)]
    pub hottest: Vec<HotRange>,
}

/// One region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionMap {
    /// Address of its first byte in the client.
    pub start: u64,
    /// Its pages.
    pub pages: u32,
    /// Its pages, cell by cell.
    pub cells: Vec<Cell>,
}

/// How many pages of a cell are in which state. Each page counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cell {
    /// They map a frame.
    #[serde(skip_serializing_if = "is_zero")]
    pub merged: u32,
    /// They were given back as zero pages.
    #[serde(skip_serializing_if = "is_zero")]
    pub zero: u32,
    /// The guest has freed them, and they were taken back.
    #[serde(skip_serializing_if = "is_zero")]
    pub recycled: u32,
    /// They were looked at and are unique so far.
    #[serde(skip_serializing_if = "is_zero")]
    pub unshared: u32,
    /// They were written within the last two merge periods.
    #[serde(skip_serializing_if = "is_zero")]
    pub volatile: u32,
    /// Untouched, not looked at yet, or not managed.
    #[serde(skip_serializing_if = "is_zero")]
    pub other: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Pages side by side that a client writes again and again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotRange {
    /// Address of the first byte.
    pub start: u64,
    /// Pages that it spans.
    pub pages: u32,
    /// For how many merge periods, at least, its pages have been written again and again: the sum
    /// over its pages. A page that was written lately counts 1, one that always is up to 8.
    pub writes: u64,
}

/// Who shares with whom.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingMatrix {
    /// The domains that have merged pages.
    pub domains: Vec<DomainSharing>,
}

/// One domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainSharing {
    /// Its name.
    pub name: String,
    /// Its clients: at most [`MOST_SHARERS`], those with the most merged pages.
    pub clients: Vec<Sharer>,
    /// Clients that are left out.
    #[serde(default)]
    pub clients_unlisted: usize,
    /// Pairs of clients that share frames; the others are left out.
    pub pairs: Vec<Pair>,
    /// The contents that most pages have, the most frequent first. Empty where the domain has
    /// clients of others than who asks.
    #[serde(default)]
    pub contents: Vec<Content>,
    /// One in this number of frames was looked at, and the counts of `pairs` were multiplied: an
    /// estimate if it is not 1.
    pub sampled: u32,
}

/// A client in the matrix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharer {
    /// Its process.
    pub pid: i32,
    /// What it is called, as [`ClientStatus::called`](crate::ClientStatus::called) says.
    pub name: String,
    /// Frames that it maps and that no other listed client maps.
    pub alone: u64,
    /// Frames that it maps.
    pub frames: u64,
}

/// Two clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// Their places in [`DomainSharing::clients`]; `a < b`.
    pub a: usize,
    /// See `a`.
    pub b: usize,
    /// Frames that both map.
    pub pages: u64,
}

/// A content that many pages have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// Pages that have it.
    pub pages: u64,
    /// Frames that hold it; 0 for pages of zeros.
    pub frames: u64,
    /// What it is: `zeros`, one byte that is repeated, or the readable text that it begins with.
    pub hint: String,
    /// The process, and the address in it, of one page that has it.
    #[serde(default)]
    pub example: Option<(i32, u64)>,
}
