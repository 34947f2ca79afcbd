//! KSM's settings at one moment, to be put back later.

use std::io;

use super::{Ksm, selected};

/// All settings, in the order in which they are put back. `run` starts ksmd, so it is last.
const SETTINGS: [&str; 13] = [
    "merge_across_nodes",
    "max_page_sharing",
    "use_zero_pages",
    "smart_scan",
    "stable_node_chains_prune_millisecs",
    "sleep_millisecs",
    "pages_to_scan",
    "advisor_max_cpu",
    "advisor_max_pages_to_scan",
    "advisor_min_pages_to_scan",
    "advisor_target_scan_time",
    "advisor_mode",
    "run",
];

/// KSM's settings at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    ksm: Ksm,
    /// Those of [`SETTINGS`] that this kernel has.
    values: Vec<(&'static str, String)>,
}

impl Snapshot {
    /// Reads the settings of the running kernel.
    ///
    /// # Errors
    ///
    /// `NotFound`: the kernel has no KSM; those of reading the files.
    pub fn take() -> io::Result<Self> {
        Self::of(&Ksm::open()?)
    }

    /// The settings that this kernel has, by the names of their files.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.values.iter().map(|(name, value)| (*name, value.as_str()))
    }

    /// Reads the settings of `ksm`.
    pub fn of(ksm: &Ksm) -> io::Result<Self> {
        let mut values = Vec::with_capacity(SETTINGS.len());
        for name in SETTINGS {
            if let Some(value) = ksm.value(name)? {
                values.push((name, value));
            }
        }
        Ok(Self { ksm: ksm.clone(), values })
    }

    /// Puts back every setting that has another value now. A failure does not keep the rest from
    /// being put back.
    ///
    /// # Errors
    ///
    /// The first failure. `EBUSY`: `merge_across_nodes` or `max_page_sharing` has changed, and
    /// pages are merged (set `run` to 2 first). `PermissionDenied`.
    pub fn restore(&self) -> io::Result<()> {
        let mut outcome = Ok(());
        for (name, value) in &self.values {
            let result = self.ksm.put_back(name, value).map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("putting {}/{name} back to {value}: {error}", self.ksm.root.display()),
                )
            });
            if outcome.is_ok() {
                outcome = result;
            }
        }
        outcome
    }
}

impl Ksm {
    fn value(&self, name: &str) -> io::Result<Option<String>> {
        Ok(self.read_if_there::<String>(name)?.map(|text| selected(&text).to_owned()))
    }

    fn put_back(&self, name: &str, value: &str) -> io::Result<()> {
        if self.value(name)?.as_deref() == Some(value) {
            return Ok(());
        }
        // While an advisor is on, only the advisor may set pages_to_scan. The advisor itself is put
        // back later.
        if name == "pages_to_scan" && self.value("advisor_mode")?.is_some_and(|mode| mode != "none") {
            self.set_advisor_mode("none")?;
        }
        self.write(name, &value)
    }
}
