//! Times as people read and write them, in the host's time zone.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};

/// Milliseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

fn zoned(time: i64) -> ZonedDateTime {
    Timestamp::from_millisecond(time).unwrap_or_default().to_zoned_datetime(TimeZone::system())
}

/// `2026-11-24 14:05:09`.
pub fn date(time: i64) -> String {
    zoned(time).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// `14:05:09`.
pub fn clock(time: i64) -> String {
    zoned(time).strftime("%H:%M:%S").to_string()
}

/// `14:05`.
pub fn minute(time: i64) -> String {
    zoned(time).strftime("%H:%M").to_string()
}

/// `2026-11-24T14:05:09.250Z`.
pub fn iso(time: i64) -> String {
    Timestamp::from_millisecond(time).unwrap_or_default().strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string()
}

/// A time that a person typed, within a recording from `first` to `last`: `14:05`, `14:05:09`,
/// `2026-11-24 14:05`, `+10m` from `from`, `-30s`, `2h` as `+2h`.
///
/// # Errors
///
/// A sentence that says what is understood.
pub fn parse(text: &str, first: i64, last: i64, from: i64) -> Result<i64, String> {
    let text = text.trim();
    if let Some(millis) = span(text) {
        return Ok(from.saturating_add(millis).clamp(first, last));
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time.as_millisecond());
    }
    if let Ok(time) = text.parse::<jiff::civil::DateTime>().and_then(|time| time.to_zoned_datetime(TimeZone::system()))
    {
        return Ok(time.timestamp().as_millisecond());
    }
    let padded = if text.len() == 4 { format!("0{text}") } else { text.to_owned() };
    if let Ok(time) = padded.parse::<Time>() {
        // The recording may pass midnight: the day on which it has that time.
        let on = |day: i64| zoned(day).date().to_datetime(time).to_zoned_datetime(TimeZone::system());
        let days = [first, last].map(|day| on(day).map_or(first, |time| time.timestamp().as_millisecond()));
        let within = days.into_iter().find(|time| (first - 999..=last + 59_999).contains(time));
        return Ok(within.unwrap_or(days[0]));
    }
    Err(format!("'{text}' is no time: write 14:05, 14:05:09, 2026-11-24 14:05, +10m or -30s"))
}

/// `+10m` and the like, in milliseconds.
fn span(text: &str) -> Option<i64> {
    let (sign, rest) = match text.as_bytes().first()? {
        b'+' => (1, &text[1..]),
        b'-' => (-1, &text[1..]),
        _ => (1, text),
    };
    let unit = rest.chars().last()?;
    let scale = match unit {
        's' => 1000.0,
        'm' => 60_000.0,
        'h' => 3_600_000.0,
        _ => return None,
    };
    let count: f64 = rest.strip_suffix(unit)?.trim().parse().ok().filter(|count: &f64| (0.0..1e9).contains(count))?;
    Some(sign * (count * scale) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_understood_as_people_write_them() {
        let first = now();
        let last = first + 600_000;
        let middle = first + 300_000;
        let parse = |text: &str| parse(text, first, last, middle);
        assert_eq!(parse("+1m"), Ok(middle + 60_000));
        assert_eq!(parse("-30s"), Ok(middle - 30_000));
        assert_eq!(parse("2h"), Ok(last), "not past the end");
        assert_eq!(parse(&clock(middle)), Ok(middle / 1000 * 1000));
        assert_eq!(parse(&minute(middle)), Ok(middle / 60_000 * 60_000));
        assert_eq!(parse(&date(middle)), Ok(middle / 1000 * 1000));
        assert_eq!(parse(&iso(middle)), Ok(middle));
        for wrong in ["", "yesterday", "25:00", "+m", "-"] {
            assert!(parse(wrong).unwrap_err().contains("is no time: write 14:05"), "{wrong}");
        }
    }
}
