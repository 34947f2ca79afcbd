//! What `pageone dirty` is told: which pages a client writes, and how fast.

use serde::{Deserialize, Serialize};

/// What a client writes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DirtyStatus {
    /// Its process.
    pub pid: i32,
    /// The name of its program.
    pub name: String,
    /// What its guest is called, as [`ClientStatus::called`](crate::ClientStatus::called) says.
    #[serde(default)]
    pub guest_name: Option<String>,
    /// Pages under management.
    pub pages: u64,
    /// Seconds for which the client has been watched, up to the last scan.
    pub watched_seconds: f64,
    /// Seconds between the last two scans; 0 before the second scan.
    pub interval_seconds: f64,
    /// Pages found written by scans within that interval, a second.
    pub pages_per_second: f64,
    /// Distinct pages written within windows of several lengths. No window is shorter than the
    /// interval.
    pub windows: Vec<Window>,
    /// Where the client writes.
    pub regions: Vec<Heat>,
    /// Why there is no newer figure.
    pub held_up: Option<String>,
}

/// Distinct pages written within a window of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Length of the window in seconds.
    pub seconds: f64,
    /// The pages.
    pub pages: u64,
    /// Whether the client has been watched for the whole window.
    pub complete: bool,
}

/// Where a region is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heat {
    /// Address of the region's first byte in the client.
    pub start: u64,
    /// Pages of the region.
    pub pages: u32,
    /// Pages of a part; the last part may have fewer.
    pub part_pages: u32,
    /// For each part, how many of its pages were written within the last ten seconds.
    pub parts: Vec<u32>,
}
