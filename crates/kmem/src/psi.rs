//! Pressure stall information: the share of time that tasks lose waiting for memory, or for a CPU.
//!
//! Source: Documentation/accounting/psi.rst.

use std::io;
use std::time::Duration;

/// One line of the file: the share of time for which tasks were stalled.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Stall {
    /// Percent of the last 10 seconds.
    pub avg10: f64,
    /// Percent of the last 60 seconds.
    pub avg60: f64,
    /// Percent of the last 300 seconds.
    pub avg300: f64,
    /// Stalled time since the system started.
    pub total: Duration,
}

/// One file of `/proc/pressure`.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Pressure {
    /// At least one task was stalled.
    pub some: Stall,
    /// All tasks that were not idle were stalled at once.
    pub full: Stall,
}

/// The system's memory pressure. `None`: the kernel was built without it, or started with `psi=0`.
///
/// # Errors
///
/// Those of reading the file; `InvalidData`: the file is not understood.
pub fn memory() -> io::Result<Option<Pressure>> {
    read("/proc/pressure/memory")
}

/// The system's pressure on its CPUs; see [`memory`].
///
/// # Errors
///
/// See [`memory`].
pub fn cpu() -> io::Result<Option<Pressure>> {
    read("/proc/pressure/cpu")
}

fn read(file: &str) -> io::Result<Option<Pressure>> {
    match std::fs::read_to_string(file) {
        Ok(text) => parse(&text).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(text: &str) -> Option<Pressure> {
    let mut pressure = Pressure::default();
    let mut some = false;
    for line in text.lines() {
        let (kind, fields) = line.split_once(' ')?;
        let stall = match kind {
            "some" => &mut pressure.some,
            "full" => &mut pressure.full,
            _ => continue,
        };
        some |= kind == "some";
        for field in fields.split_whitespace() {
            let (name, value) = field.split_once('=')?;
            match name {
                "avg10" => stall.avg10 = value.parse().ok()?,
                "avg60" => stall.avg60 = value.parse().ok()?,
                "avg300" => stall.avg300 = value.parse().ok()?,
                "total" => stall.total = Duration::from_micros(value.parse().ok()?),
                _ => {}
            }
        }
    }
    some.then_some(pressure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses() {
        let text =
            "some avg10=1.25 avg60=0.50 avg300=0.10 total=123456\nfull avg10=0.75 avg60=0.00 avg300=0.00 total=99\n";
        let pressure = parse(text).unwrap();
        assert_eq!(
            pressure.some,
            Stall { avg10: 1.25, avg60: 0.5, avg300: 0.1, total: Duration::from_micros(123_456) }
        );
        assert_eq!((pressure.full.avg10, pressure.full.total), (0.75, Duration::from_micros(99)));
        assert_eq!(parse(""), None);
        assert_eq!(parse("some avg10=x"), None);
    }

    #[test]
    fn reads_this_system() {
        for pressure in [memory, cpu] {
            let Some(pressure) = pressure().unwrap() else {
                println!("SKIPPED: this kernel has no /proc/pressure");
                return;
            };
            assert!(pressure.some.total >= pressure.full.total);
            assert!((0.0..=100.0).contains(&pressure.some.avg10));
        }
    }
}
