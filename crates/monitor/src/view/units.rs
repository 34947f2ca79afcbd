//! Figures in as few characters as a column has.

/// Bytes in at most five characters: `0`, `812K`, `1.25G`, `64.0M`.
pub fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, ["B", "K", "M", "G", "T", "P"])
}

/// The same with a sign, in at most six characters.
pub fn size_signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// Bytes a second, without `/s`.
pub fn rate(bytes: f64) -> String {
    size(bytes.max(0.0) as u64)
}

/// A number of things in at most five characters: `950`, `12.3k`, `1.20M`.
pub fn count(value: f64) -> String {
    scaled(value, 1000.0, ["", "k", "M", "G", "T", "P"])
}

fn scaled(mut value: f64, base: f64, units: [&str; 6]) -> String {
    let mut unit = 0;
    // What rounds to four digits goes to the next unit.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    match value {
        0.0 => "0".into(),
        v if unit == 0 => format!("{v:.0}{}", units[0]),
        v if v < 9.995 => format!("{v:.2}{}", units[unit]),
        v if v < 99.95 => format!("{v:.1}{}", units[unit]),
        v => format!("{v:.0}{}", units[unit]),
    }
}

/// Percent in at most five characters: `0`, `0.4`, `12`.
pub fn percent(value: f64) -> String {
    match value {
        v if v.abs() < 0.05 => "0".into(),
        v if v.abs() < 9.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Seconds in at most six characters: `0`, `850µs`, `1.2ms`, `3.1s`.
pub fn stall(seconds: f64) -> String {
    match seconds * 1e6 {
        us if us < 0.5 => "0".into(),
        us if us < 999.5 => format!("{us:.0}µs"),
        us if us < 9_995.0 => format!("{:.1}ms", us / 1e3),
        us if us < 999_500.0 => format!("{:.0}ms", us / 1e3),
        us => format!("{:.1}s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_their_columns() {
        let sizes = [0, 1, 999, 1023, 1024, 10_240, 1 << 20, 1_047_000, 123 << 20, 5_368_709_120, u64::MAX];
        let text = sizes.map(size);
        assert_eq!(text, ["0", "1B", "999B", "1.00K", "1.00K", "10.0K", "1.00M", "1.00M", "123M", "5.00G", "16384P"]);
        assert!((0..50).map(|bit| size((1 << bit) - 1)).all(|text| text.len() <= 5));
        assert_eq!(size_signed(-(3 << 30)), "-3.00G");
        assert_eq!([0.0, 12.0, 999.6, 65_530.0].map(count), ["0", "12", "1.00k", "65.5k"]);
        assert_eq!([0.01, 0.44, 9.96, 123.4].map(percent), ["0", "0.4", "10", "123"]);
        assert_eq!([0.0, 42e-6, 1.24e-3, 0.05, 3.06].map(stall), ["0", "42µs", "1.2ms", "50ms", "3.1s"]);
    }
}
