//! The operator's settings.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How the governor finds the rate.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// The rate stays as it is.
    None,
    /// The arithmetic of the kernel's advisor (Linux 6.8), truncation included: [`crate::kernel`].
    ScanTime,
    /// A model of the scanner, solved for the target: [`crate::law`].
    #[default]
    Target,
}

impl Mode {
    /// Every mode with its name.
    pub const NAMES: [(&'static str, Mode); 3] =
        [("none", Mode::None), ("scan-time", Mode::ScanTime), ("target", Mode::Target)];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Mode::NAMES.iter().find(|(_, mode)| mode == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for Mode {
    type Err = SettingsError;

    fn from_str(name: &str) -> Result<Mode, SettingsError> {
        let found = Mode::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|&(_, mode)| mode).ok_or_else(|| SettingsError::Mode(name.to_owned()))
    }
}

/// The goals and limits of the governor. The defaults are those of the kernel's advisor.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Settings {
    /// How the governor finds the rate.
    pub mode: Mode,
    /// The target time of a whole scan: 0.1 s to a day, and whole seconds for [`Mode::ScanTime`].
    pub target: Duration,
    /// The CPU limit, in percent of one CPU, over any [`Window::LENGTH`](crate::Window::LENGTH):
    /// 0.1 to 100.
    pub max_cpu: f64,
    /// Fewest pages in a batch, at least 1. Only the CPU limit may go below.
    pub min_pages: u32,
    /// Most pages in a batch.
    pub max_pages: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            target: Duration::from_secs(200),
            max_cpu: 70.0,
            min_pages: 500,
            max_pages: 30_000,
        }
    }
}

/// A setting out of its range.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum SettingsError {
    /// No such mode.
    #[error("there is no mode {0:?}; there are none, scan-time and target")]
    Mode(String),
    /// The target is out of range.
    #[error("a target scan time of {0} s is not between 0.1 and 86400 s")]
    Target(f64),
    /// The target is not a number of whole seconds, which the kernel's arithmetic needs.
    #[error("mode scan-time counts in whole seconds, as the kernel does: {0} s is not 1, 2, 3 … 86400 s")]
    WholeSeconds(f64),
    /// The CPU limit is out of range.
    #[error("a CPU limit of {0} % is not between 0.1 and 100 % of one CPU")]
    MaxCpu(f64),
    /// The least and most pages of a batch are out of range, or in the wrong order.
    #[error("pages per batch from {min} to {max} are not a range between 1 and 10000000")]
    Pages {
        /// The minimum given.
        min: u32,
        /// The maximum given.
        max: u32,
    },
}

impl Settings {
    /// Checks the ranges.
    ///
    /// # Errors
    ///
    /// The first setting that is out of its range, with the range.
    pub fn check(&self) -> Result<(), SettingsError> {
        let target = self.target.as_secs_f64();
        if !(0.1..=86_400.0).contains(&target) {
            return Err(SettingsError::Target(target));
        }
        if self.mode == Mode::ScanTime && target.fract() != 0.0 {
            return Err(SettingsError::WholeSeconds(target));
        }
        if !(0.1..=100.0).contains(&self.max_cpu) {
            return Err(SettingsError::MaxCpu(self.max_cpu));
        }
        if self.min_pages == 0 || self.min_pages > self.max_pages || self.max_pages > 10_000_000 {
            return Err(SettingsError::Pages { min: self.min_pages, max: self.max_pages });
        }
        Ok(())
    }
}
