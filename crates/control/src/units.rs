//! Figures for people: one family of units, and one way to write each.
//!
//! In a sentence 1.25 GiB are `1.25 GiB`; a column has room for `1.25G`.

use std::time::Duration;

use crate::metrics::Unit;

const PAGE: f64 = kmem::PAGE_SIZE as f64;
const BINARY: [&str; 6] = ["B", "K", "M", "G", "T", "P"];
const DECIMAL: [&str; 6] = ["", "k", "M", "G", "T", "P"];

/// Bytes in a sentence: `0 B`, `812 KiB`, `1.25 GiB`, `-64 MiB`.
pub fn size(bytes: impl Into<i128>) -> String {
    let (value, power) = scale(bytes.into() as f64, 1024.0);
    let places = if value.fract() == 0.0 { 0 } else { places(value, power) };
    match power {
        0 => format!("{value:.0} B"),
        _ => format!("{value:.places$} {}iB", BINARY[power]),
    }
}

/// A length of time: `45 s`, `12 min`, `3 h 20 min`, `261 d`.
pub fn length(time: Duration) -> String {
    match (time.as_millis() + 500) / 1000 {
        seconds @ ..=119 => format!("{seconds} s"),
        seconds @ ..=7199 => format!("{} min", seconds / 60),
        seconds @ ..=172_799 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// So many of these, of which `word` is one: `0 guests`, `1 guest`.
pub fn counted(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

impl Unit {
    /// A value of this unit in a column: at most six characters and a sign.
    pub fn short(self, value: f64) -> String {
        match self {
            Unit::Bytes | Unit::BytesPerSecond => scaled(value, 1024.0, BINARY),
            Unit::Pages | Unit::PagesPerSecond => scaled(value * PAGE, 1024.0, BINARY),
            Unit::Count => scaled(value, 1000.0, DECIMAL),
            Unit::Seconds => seconds(value),
            Unit::Microseconds => seconds(value / 1e6),
            Unit::Percent => percent(value),
            Unit::Ratio => percent(100.0 * value),
            Unit::Bool if value == 0.0 => "no".into(),
            Unit::Bool => "yes".into(),
        }
    }
}

/// What is left of a value below 1000 in steps of `base`, and how many steps were taken.
fn scale(mut value: f64, base: f64) -> (f64, usize) {
    let mut power = 0;
    // What rounds to four digits goes to the next unit.
    while value.abs() >= 999.5 && power + 1 < BINARY.len() {
        value /= base;
        power += 1;
    }
    (value, power)
}

/// Places behind the point that make three digits.
fn places(value: f64, power: usize) -> usize {
    match value.abs() {
        _ if power == 0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    }
}

fn scaled(value: f64, base: f64, units: [&str; 6]) -> String {
    match scale(value, base) {
        (0.0, _) => "0".into(),
        (value, power) => format!("{value:.*}{}", places(value, power), units[power]),
    }
}

/// `0`, `0.4`, `12`.
fn percent(value: f64) -> String {
    match value.abs() {
        ..0.05 => "0".into(),
        ..9.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// `0`, `850µs`, `1.2ms`, `3.1s`.
fn seconds(value: f64) -> String {
    match value * 1e6 {
        ..0.5 => "0".into(),
        us @ ..999.5 => format!("{us:.0}µs"),
        us @ ..9_995.0 => format!("{:.1}ms", us / 1e3),
        us @ ..999_500.0 => format!("{:.0}ms", us / 1e3),
        us @ ..999.5e6 => format!("{:.1}s", us / 1e6),
        us => format!("{}s", scaled(us / 1e6, 1000.0, DECIMAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_their_columns() {
        let sizes = [0, 1, 999, 1023, 1024, 10_240, 1 << 20, 1_047_000, 123 << 20, 5_368_709_120, u64::MAX];
        let text = sizes.map(|bytes| Unit::Bytes.short(bytes as f64));
        assert_eq!(text, ["0", "1B", "999B", "1.00K", "1.00K", "10.0K", "1.00M", "1.00M", "123M", "5.00G", "16384P"]);
        assert!((0..50).map(|bit| Unit::Bytes.short(((1u64 << bit) - 1) as f64)).all(|text| text.len() <= 5));
        assert_eq!(Unit::Bytes.short(-3.0 * f64::from(1 << 30)), "-3.00G");
        assert_eq!(Unit::Pages.short(256.0), "1.00M");
        assert_eq!([0.0, 12.0, 999.6, 65_530.0].map(|n| Unit::Count.short(n)), ["0", "12", "1.00k", "65.5k"]);
        assert_eq!([0.01, 0.44, 9.96, 123.4].map(|n| Unit::Percent.short(n)), ["0", "0.4", "10", "123"]);
        let times = [0.0, 42e-6, 1.24e-3, 0.05, 3.06, 12345.0].map(|n| Unit::Seconds.short(n));
        assert_eq!(times, ["0", "42µs", "1.2ms", "50ms", "3.1s", "12.3ks"]);
    }

    #[test]
    fn sizes_and_times_in_sentences_have_one_form() {
        let sizes = [(0, "0 B"), (999, "999 B"), (1023, "1.00 KiB"), (1024, "1 KiB"), (3 << 29, "1.50 GiB")];
        sizes.into_iter().for_each(|(bytes, text)| assert_eq!(size(bytes), text));
        assert_eq!((size(-(64i64 << 20)), size(u64::MAX)), ("-64 MiB".into(), "16384 PiB".into()));
        let times = [(45, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (22_590_346, "261 d")];
        assert_eq!([0, 1, 2].map(|count| counted(count, "guest")), ["0 guests", "1 guest", "2 guests"]);
        times.into_iter().for_each(|(seconds, text)| assert_eq!(length(Duration::from_secs(seconds)), text));
    }
}
