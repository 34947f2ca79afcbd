//! Settings out of range are named, with the range.

use std::time::Duration;

use crate::{Governor, Mode, Settings};

#[test]
fn what_is_wrong_is_named_with_its_range() {
    let seconds = Duration::from_secs_f64;
    let good = Settings::default();
    assert_eq!(good.check(), Ok(()));
    let cases: [(Settings, &[&str]); 8] = [
        (Settings { target: seconds(0.05), ..good }, &["0.05", "0.1 and 86400"]),
        (Settings { target: seconds(90_000.0), ..good }, &["90000", "0.1 and 86400"]),
        (Settings { target: seconds(1.5), mode: Mode::ScanTime, ..good }, &["1.5", "whole seconds"]),
        (Settings { max_cpu: 0.0, ..good }, &["0 %", "0.1 and 100 %"]),
        (Settings { max_cpu: 150.0, ..good }, &["150 %", "0.1 and 100 %"]),
        (Settings { max_cpu: f64::NAN, ..good }, &["NaN"]),
        (Settings { min_pages: 0, ..good }, &["0 to 30000", "1 and 10000000"]),
        (Settings { min_pages: 5, max_pages: 4, ..good }, &["5 to 4"]),
    ];
    for (settings, words) in cases {
        let error = Governor::new(settings, seconds(0.02)).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let error = "fast".parse::<Mode>().unwrap_err().to_string();
    assert!(error.contains("fast") && error.contains("scan-time"), "{error}");
    for mode in [Mode::None, Mode::ScanTime, Mode::Target] {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
}
